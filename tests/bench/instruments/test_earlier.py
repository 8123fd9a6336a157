"""``warmroute calibrate --record``: records of several instruments become one profile."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from bench.instruments.cli import register
from bench.instruments.record import InstrumentRecord, read_record, write_record
from policies.types import Transport
from sim.hardware import load_profile
from sim.points import load_points
from tests.bench.instruments.documented import PAGES
from tests.bench.instruments.documented import RECORDS as INSTRUMENTS
from warmroute_yaml import HARDWARE_FOLDER

RECORDS = INSTRUMENTS / "h200-128"
SHIPPED = "h200-nvlink-128"
ONE_STEP = re.compile(r"\.step\.(frontend|decode|decode_experts|prefill|prefill_floor)_s")
"""Seconds of a whole step. A fit that ends at its bound, 0, leaves some nanoseconds, others on another processor."""


def run(*arguments: object) -> Result:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, ["calibrate", *(str(each) for each in arguments)])


def flat(result: Result) -> str:
    return " ".join(result.output.split())


def make(profile: str, records: Path, folder: Path) -> None:
    """Make a shipped profile in ``folder``, by the command of its page."""
    page = "\n".join(PAGES.values()).replace("\\\n", " ")
    found = re.search(rf"^\$ warmroute calibrate (.* --name {profile})$", page, re.MULTILINE)
    assert found, "no page has a command for the profile"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(records)
        result = run(*shlex.split(found[1]), "--output", folder)
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the documented command wrote to."""
    folder = tmp_path_factory.mktemp("made")
    make(SHIPPED, RECORDS, folder)
    return folder


def numbers(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: leaf for name, each in value.items() for key, leaf in numbers(each, f"{path}.{name}").items()}
    if isinstance(value, list | tuple):
        return {key: leaf for i, each in enumerate(value) for key, leaf in numbers(each, f"{path}.{i}").items()}
    return {path: value}


@pytest.mark.parametrize(("name", "records"), [(SHIPPED, "h200-128"), ("h100-nvlink-128", "h100")])
def test_a_shipped_profile_is_the_fit_of_the_committed_records(name: str, records: str, tmp_path: Path) -> None:
    make(name, INSTRUMENTS / records, tmp_path)
    assert load_points(tmp_path / f"{name}_points.yaml") == load_points(HARDWARE_FOLDER / f"{name}_points.yaml")
    shipped, refit = (numbers(load_profile(each).model_dump()) for each in (name, str(tmp_path / f"{name}.yaml")))
    assert shipped.keys() == refit.keys()
    for path, value in refit.items():
        least = 1e-6 if ONE_STEP.fullmatch(path) else 0.0
        close = pytest.approx(value, rel=2e-3, abs=least) if isinstance(value, float) else value
        assert shipped[path] == close, path


def test_records_of_both_transports_are_in_one_profile(made: Path) -> None:
    profile = load_profile(str(made / f"{SHIPPED}.yaml"))
    assert (profile.default_transport, sorted(profile.transports)) == ("nvlink", ["nvlink", "tcp"])
    assert profile.cost_constants is not None
    transfers = profile.cost_constants.transfers
    assert transfers[Transport.TCP].bytes_per_s < transfers[Transport.NVLINK].bytes_per_s
    size = 32_768 * profile.kv.bytes_per_token
    assert profile.transport("tcp").seconds(size, 0, 1) > 2 * profile.transport("nvlink").seconds(size, 0, 1)


def test_a_combined_record_is_fitted_again_as_it_was(made: Path, tmp_path: Path) -> None:
    result = run("--record", made / f"{SHIPPED}_record.json", "--name", "again", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    points = load_points(tmp_path / "again_points.yaml")
    assert points == load_points(made / f"{SHIPPED}_points.yaml").model_copy(update={"name": "again"})


def test_interference_replaces_and_what_compiled_kernels_is_left_out(made: Path) -> None:
    points = load_points(made / f"{SHIPPED}_points.yaml").interference
    measured = read_record(RECORDS / "interference.json").rows
    assert {(each.streams, each.prefill) for each in points} == {
        (row["streams"], row["prefill_tokens"]) for row in measured
    }
    left_out = {(each.streams, each.prefill): each.skip for each in points if each.skip}
    assert left_out.keys() == {(1, 2_048), (4, 2_048)}
    assert left_out[1, 2_048] == "repeats differ 15 times, perhaps kernels were compiled"


def test_of_one_repeat_what_took_longer_than_a_longer_prefill_is_left_out(tmp_path: Path) -> None:
    records = INSTRUMENTS / "h100-one-run"
    both = ("--record", records / "calibrate.json", "--record", records / "interference.json")
    result = run(*both, "--name", "one", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    points = load_points(tmp_path / "one_points.yaml").interference
    assert {(each.streams, each.prefill): each.skip for each in points if each.skip} == {
        (1, 2_048): "took 7 times as long as 8,192 tokens, perhaps kernels were compiled",
        (8, 2_048): "took 10 times as long as 8,192 tokens, perhaps kernels were compiled",
    }
    assert "prefill TTFT: 16 points, median error 10.0%" in flat(result)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("transfer-tcp.json",), "a record of transfer; give one that `warmroute calibrate` wrote first"),
        (("tcp=calibrate.json",), "give one that `warmroute calibrate` wrote first"),
        (("calibrate.json", "calibrate.json"), "further records are those of `measure interference` and"),
        (("calibrate.json", "tcp=interference.json"), "only the latter take a TRANSPORT="),
        (("calibrate.json", "tpc=transfer-tcp.json"), "name the transport, --record TRANSPORT=transfer-tcp.json; one"),
        (("calibrate.json", "tcp=nothing.json"), "nothing.json: No such file"),
    ],
)
def test_records_that_do_not_belong_together_are_refused(
    given: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(RECORDS)
    result = run(*(part for each in given for part in ("--record", each)), "--output", tmp_path)
    assert result.exit_code == 2
    assert expected in flat(result)
    assert list(tmp_path.iterdir()) == []


def test_records_of_other_engines_are_refused(tmp_path: Path) -> None:
    for field, value in (("model", "another"), ("version", "0.18.1")):
        record = read_record(RECORDS / "interference.json")
        for engine in record.engines:
            setattr(engine, field, value)
        write_record(tmp_path / f"{field}.json", record)
    for other, says in (
        (INSTRUMENTS / "h100-one-run" / "interference.json", "hardware nvidia h100 80gb hbm3, but"),
        (tmp_path / "model.json", "model another, but"),
        (tmp_path / "version.json", "engine version 0.18.1, but"),
    ):
        output = tmp_path / "out"
        result = run("--record", RECORDS / "calibrate.json", "--record", other, "--output", output)
        assert result.exit_code == 2
        assert says in flat(result)
        assert not output.exists()


def test_engines_beside_records_are_refused(tmp_path: Path) -> None:
    record = ("--record", RECORDS / "calibrate.json", "--output", tmp_path)
    for engines in (("--url", "http://127.0.0.1:9"), ("sim-4x",)):
        result = run(*record, *engines)
        assert result.exit_code == 2
        assert "give no fleet file and no --url" in flat(result)


def test_transfers_beside_a_calibration_of_one_engine_need_their_transport(tmp_path: Path) -> None:
    record: InstrumentRecord = read_record(RECORDS / "calibrate.json")
    record.facts["transport"], record.rows["transfers"] = None, []
    alone = tmp_path / "alone.json"
    write_record(alone, record)
    common = ("--record", alone, "--name", "one", "--output", tmp_path)
    refused = run(*common, "--record", RECORDS / "transfer-tcp.json")
    assert refused.exit_code == 2
    assert "name the transport" in flat(refused)
    named = run(*common, "--record", f"tcp={RECORDS / 'transfer-tcp.json'}")
    assert named.exit_code == 0, named.output
    profile = load_profile(str(tmp_path / "one.yaml"))
    assert (profile.default_transport, list(profile.transports)) == ("tcp", ["tcp"])
