"""Summaries of a run's samples: medians, ratios per round, targets, tables, exit codes."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.data_plane.__main__ import app
from bench.data_plane.measure import DataPlaneRecord
from bench.data_plane.quantities import QuantitySample
from bench.data_plane.report.ratios import by_round, medians, ratios
from bench.data_plane.report.table import show, title
from bench.data_plane.report.targets import TARGETS, Target, check
from bench.data_plane.report.watching import spread, watching

RECORDED = Path(__file__).with_name("data_plane_record.json")


def sample(stack: str, round_number: int, **values: float) -> QuantitySample:
    return QuantitySample(round=round_number, stack=stack, measurement="m", values=values, errors={})


@pytest.fixture(scope="module")
def record() -> DataPlaneRecord:
    return msgspec.json.decode(RECORDED.read_bytes(), type=DataPlaneRecord)


def test_ratios_are_taken_within_rounds() -> None:
    """The machine is ten times slower in round 1: ratios of medians would differ from the median of ratios."""
    samples = [
        sample("warmroute", 0, cpu_ms_2k=1.0),
        sample("warmroute", 1, cpu_ms_2k=30.0),
        sample("warmroute", 2, cpu_ms_2k=4.0),
        sample("peer", 0, cpu_ms_2k=2.0),
        sample("peer", 1, cpu_ms_2k=20.0),
        sample("peer", 2, cpu_ms_2k=5.0),
        sample("peer", 3, cpu_ms_2k=1.0),
    ]
    ratio = ratios(samples, "cpu_ms_2k", "warmroute", "peer")
    assert ratio == (0.8, 0.5, 1.5, 3)
    assert medians(samples) == {("cpu_ms_2k", "warmroute"): 4.0, ("cpu_ms_2k", "peer"): 3.5}
    assert by_round(samples, "cpu_ms_2k", "peer")[3] == 1.0


def test_a_quantity_that_one_of_both_lacks_has_no_ratio() -> None:
    samples = [sample("warmroute", 0, cpu_ms_ids=1.0), sample("peer", 0), sample("peer", 1, cpu_ms_ids=1.0)]
    assert ratios(samples, "cpu_ms_ids", "warmroute", "peer") is None
    assert ratios([*samples, sample("zero", 0, cpu_ms_ids=0.0)], "cpu_ms_ids", "warmroute", "zero") is None


@pytest.mark.parametrize(
    ("count", "low", "high"), [(2, 0, 1), (5, 0, 4), (6, 0, 5), (9, 1, 7), (12, 2, 9), (20, 5, 14), (34, 10, 23)]
)
def test_the_interval_of_a_median_has_the_ranks_of_the_sign_test(count: int, low: int, high: int) -> None:
    """Ranks of the usual tables (from 0), at 95 %."""
    found = spread([float(number) for number in reversed(range(count))])
    assert (found.low, found.high, found.rounds) == (low, high, count)
    assert found.median == (count - 1) / 2
    assert found.first_quartile <= found.median <= found.third_quartile


def test_the_cost_of_watching_is_a_ratio_within_rounds(record: DataPlaneRecord) -> None:
    assert watching(record) is None  # a run without the observed stacks
    stacks = {"warmroute-unobserved": 1.0, "warmroute-observed": 1.05, "warmroute-traced": 1.2}
    observed = msgspec.structs.replace(
        record,
        rounds=3,
        stacks=dict.fromkeys(stacks, ""),
        samples=[
            sample(stack, number, cpu_ms_2k=factor * slowness, rss_mb=1.0)
            for stack, factor in stacks.items()
            for number, slowness in enumerate((1.0, 10.0, 3.0))
        ],
    )
    table = watching(observed)
    assert table is not None
    out = StringIO()
    Console(file=out, width=200).print(table)
    assert "1.05 [1.05, 1.05] (1.05 to 1.05)" in out.getvalue()
    assert "1.20 [1.20, 1.20] (1.20 to 1.20)" in out.getvalue()
    assert table.row_count == 1
    assert watching(msgspec.structs.replace(observed, rounds=1)) is None


@pytest.mark.parametrize(("ours", "met"), [(0.59, True), (0.6, True), (0.61, False)])
def test_a_ratio_target(ours: float, met: bool) -> None:
    target = Target("cpu_ms_130k", 0.6, "sglang-ca")
    samples = [sample("warmroute", 0, cpu_ms_130k=ours), sample("sglang-ca", 0, cpu_ms_130k=1.0)]
    (found,) = check(samples, [target])
    assert found.met is met
    assert str(found) == f"cpu_ms_130k <= 0.6x sglang-ca: {ours:g}, {'met' if met else 'missed'}"


def test_an_absolute_target_is_about_the_median() -> None:
    samples = [sample("warmroute", i, abort_stream_p99_ms=value) for i, value in enumerate((5.0, 40.0, 90.0))]
    assert check(samples, [Target("abort_stream_p99_ms", 50.0)])[0].met
    assert not check(samples, [Target("abort_stream_p99_ms", 39.0)])[0].met


def test_one_error_in_one_round_misses() -> None:
    samples = [sample("warmroute", i, many_errors=value) for i, value in enumerate((0.0, 1.0, 0.0))]
    assert not check(samples, [Target("many_errors", 0.0)])[0].met
    assert check(samples[:1], [Target("many_errors", 0.0)])[0].met


def test_what_was_not_measured_is_missed() -> None:
    findings = check([])
    assert len(findings) == len(TARGETS)
    assert not any(finding.met for finding in findings)
    assert "not measured" in str(findings[0])


def test_every_target_is_about_a_quantity_of_a_run(record: DataPlaneRecord) -> None:
    quantities = {quantity for each in record.samples for quantity in each.values}
    assert {target.quantity for target in TARGETS} <= quantities
    assert {target.peer for target in TARGETS if target.peer} <= set(record.stacks)


def test_the_table_of_a_recorded_run(record: DataPlaneRecord) -> None:
    out = StringIO()
    show(record, Console(file=out, width=200))
    text = out.getvalue()
    for quantity in {quantity for each in record.samples for quantity in each.values}:
        assert title(quantity) in text
    for stack, note in record.stacks.items():
        assert f"{stack}: {note}" in text
    ratio = ratios(record.samples, "cpu_ms_130k", "warmroute", "vllm-router-ca")
    assert ratio is not None
    assert f"{ratio.median:.2f} [{ratio.low:.2f} - {ratio.high:.2f}]" in text
    assert "status 422" in text  # SGLang's gateway rejects token ids, which the table must report
    assert "real tokenizer" in text


def test_check_exits_with_one_and_names_what_is_missed(record: DataPlaneRecord, tmp_path: Path) -> None:
    """The same record, with our figures made a hundred times better and worse."""

    def outcome(factor: float) -> tuple[int, str]:
        scaled = msgspec.json.decode(msgspec.json.encode(record), type=DataPlaneRecord)
        for each in scaled.samples:
            if each.stack == "warmroute":
                each.values = {name: value * factor for name, value in each.values.items()}
        path = tmp_path / f"{factor}.json"
        path.write_bytes(msgspec.json.encode(scaled))
        result = CliRunner().invoke(app, ["--input", str(path), "--check"])
        return result.exit_code, result.output

    assert outcome(0.01)[0] == 0
    code, text = outcome(100.0)
    assert code == 1
    assert "cpu_ms_130k <= 0.1x vllm-router-ca: " in text


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    for option in ("--only", "--sizes", "--measure"):
        result = CliRunner().invoke(app, [option, "nothing"])
        assert result.exit_code == 2
        assert "unknown: nothing; known: " in result.output.replace("\n", " ").replace("│ ", "").replace("  ", " ")
