"""Figures that the sections of a page show: turns, decisions, offloads, one session, rows, conditions."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from replayer.records.breakdown_rows import BreakdownError, BreakdownRow, Leg, read_rows, rows_of
from replayer.records.runs import RequestRecord, Run, RunHeader
from replayer.report.conditions import freshness, machine
from replayer.report.decisions import class_matrix, reasons, summarise_rows
from replayer.report.figures.style import slug
from replayer.report.inputs import OneRun
from replayer.report.offloads import offloads
from replayer.report.sections import hits, session
from replayer.report.summary import median_interval
from replayer.report.timeline import choose_session, spans
from replayer.report.turns import MIN_REQUESTS, by_turn
from replayer.report.turns import median_interval as order_statistics
from replayer.traces.trace import Trace, TraceRequest
from tests.replayer.constructed_runs import make_run


def record(session: str = "s", turn: int = 1, **more: Any) -> RequestRecord:
    values: dict[str, Any] = {"ok": True, "scheduled_s": 0.0, "prompt_tokens": 1000, "cached_tokens": 0}
    return RequestRecord(
        request_id=f"{session}-{turn}",
        session_id=session,
        turn=turn,
        chat_id=0,
        trace_timestamp_s=0.0,
        **{**values, **more},
    )


@pytest.mark.parametrize("size", [6, 7, 10, 25, 60, 1000])
def test_the_median_lies_between_the_two_order_statistics_with_95_per_cent(size: int) -> None:
    from scipy.stats import binom  # takes most of a second, in each process that collects this file

    low, high = order_statistics(size)
    # The median is outside when no more than `low` of the values lie on one of its sides.
    assert 1 - 2 * binom.cdf(low, size, 0.5) >= 0.95
    assert 1 - 2 * binom.cdf(low + 1, size, 0.5) < 0.95
    assert high == size - 1 - low


def test_turns_count_a_session_once_with_its_median_over_repeats() -> None:
    runs = [[record(f"s{n}", ttft_s=float(n) + repeat) for n in range(MIN_REQUESTS)] for repeat in (0, 2, 1)]
    runs[0] += [record("s0", turn=2, ttft_s=1.0), record("dead", ok=False, ttft_s=99.0)]
    [found] = by_turn(runs)
    assert (found.turn, found.sessions) == (1, MIN_REQUESTS)
    assert found.p50_s == pytest.approx(np.median(np.arange(MIN_REQUESTS) + 1))
    assert (found.low_s, found.high_s) == (1, MIN_REQUESTS)


def test_the_interval_of_a_median_holds_it_and_narrows_with_sessions() -> None:
    few, many = (median_interval(make_run(sessions=count).records, "ttft_s") for count in (20, 400))
    assert few.low_s is not None
    assert few.high_s is not None
    assert many.low_s is not None
    assert many.high_s is not None
    assert few.low_s < 1.0 < few.high_s
    assert many.high_s / many.low_s < few.high_s / few.low_s
    assert median_interval([], "ttft_s").low_s is None


def test_reasons_by_hand() -> None:
    found = reasons([
        record(reason="affinity", ttft_s=1.0, cached_tokens=500, predicted_cached_tokens=600),
        record(reason="affinity", ttft_s=3.0, cached_tokens=700, predicted_cached_tokens=600),
        record(ok=False),
    ])  # fmt: skip
    assert [(row.reason, row.requests) for row in found] == [("affinity", 2), ("not reported", 1)]
    assert found[0].share == pytest.approx(2 / 3)
    assert found[0].ttft_s.p50 == 2.0
    assert found[0].apc == 0.6
    assert found[0].error_tokens.mean == 0.0
    assert found[1].apc is None


def test_classes_decided_against_classes_computed() -> None:
    found = class_matrix([
        record(request_class="WARM"),
        record(request_class="WARM", prompt_tokens=30_000),
        record(request_class="HEAVY", prompt_tokens=30_000),
        record(request_class="WARM", ok=False),
        record(request_class=None),
    ])  # fmt: skip
    assert found is not None
    assert found.counts["WARM"] == {"WARM": 1, "MEDIUM": 0, "HEAVY": 1}
    assert found.agreeing == pytest.approx(2 / 3)
    assert class_matrix([record()]) is None


def test_rows_say_what_was_believed_of_each_candidate_in_any_of_the_forms() -> None:
    def row(**inputs: float) -> dict[str, Any]:
        return {"prompt_tokens": 100, "scores": [{"instance": "i0", "score": 1.0, "inputs": inputs, "skipped": False}]}

    found = rows_of([row(cached_tokens=30), row(cached=31.0), row(new_tokens=60, pending=1), row(load=3.0)])
    assert [one.believed for one in found] == [{"i0": 30.0}, {"i0": 31.0}, {"i0": 40.0}, {}]
    assert found[3].candidates == ("i0",)
    with pytest.raises(BreakdownError, match="row 1"):
        rows_of([{"scores": 3}])


def test_rows_of_a_file_and_a_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"outcome": "ok", "attempts": [{}], "stages_ms": {"total": 5}, "legs": {}}\n\n')
    [found] = read_rows(path)
    assert (found.outcome, found.attempts, found.stages_ms) == ("ok", 1, {"total": 5.0})
    summary = summarise_rows([found])
    assert summary is not None
    assert (summary.rows, summary.retried, summary.stages[0][1].p50) == (1, 1, 5.0)
    path.write_text('{"outcome": "ok"}\n[1]\n')
    with pytest.raises(BreakdownError, match=r"rows\.jsonl:2"):
        read_rows(path)


def test_offloads_by_hand() -> None:
    rows = [
        BreakdownRow(offload_reason="chosen", legs={"prefill": Leg(1.0, 2.0), "transfer": Leg(0.5, 0.5)}),
        BreakdownRow(offload_reason="chosen", legs={"prefill": Leg(0.0, 9.0)}),
        BreakdownRow(offload_reason="fell_back_p_timeout"),
        BreakdownRow(offload_reason="does_not_pay", legs={"first_token": Leg(1.0, 1.0)}),
    ]
    records = [record(prefill_instance="p", ttft_s=4.0), record(ttft_s=1.0), record(ok=False)]
    found = offloads(records, rows, clock_scale=10.0)
    assert (found.requests, found.offloaded, found.tried) == (3, 1, True)
    assert found.reasons == [("chosen", 2), ("does_not_pay", 1)]
    assert found.fallbacks == [("fell_back_p_timeout", 1)]
    assert [leg.leg for leg in found.legs] == ["prefill", "transfer", "first_token"]
    prefill = found.legs[0]
    assert prefill.actual.n == 2
    assert prefill.predicted.p99 == pytest.approx(9.9)  # engine seconds
    assert prefill.ratio.p50 == 2.0  # a prediction of nothing has no ratio
    assert (found.ttft_offloaded_s.p50, found.ttft_colocated_s.p50) == (4.0, 1.0)
    nothing = offloads(records[1:], [], clock_scale=1.0)
    assert not nothing.tried
    assert not nothing.from_rows


def test_the_session_drawn_is_the_longest_that_succeeded_everywhere() -> None:
    def run(*records: RequestRecord) -> Run:
        return Run(RunHeader(), list(records), None)

    long_but_failed = [record("long", turn) for turn in (1, 2, 3)]
    runs = [
        run(*long_but_failed, record("a", 1), record("a", 2), record("b", 1)),
        run(*[record("long", turn, ok=turn != 3) for turn in (1, 2, 3)], record("a", 1), record("a", 2)),
    ]
    assert choose_session(runs) == "a"
    assert choose_session([run(record("x", ok=False))]) == "x"
    assert choose_session([run()]) is None


def test_spans_begin_when_the_session_was_due() -> None:
    times: dict[str, Any] = {"scheduled_s": 10.0, "sent_s": 11.0, "first_token_s": 13.0, "finished_s": 14.0}
    late: dict[str, Any] = {"scheduled_s": 20.0, "sent_s": 20.0, "first_token_s": None, "finished_s": 21.0, "ok": False}
    run = Run(RunHeader(), [record(turn=2, **late), record(cached_tokens=250, **times), record(turn=3)], None)
    first, second = spans(run, "s")
    assert (first.scheduled_s, first.sent_s, first.first_token_s, first.finished_s) == (0, 1, 3, 4)
    assert first.cached_share == 0.25
    assert (second.turn, second.first_token_s, second.ok) == (2, None, False)


def test_a_session_that_failed_at_once_is_drawn_without_a_warning() -> None:
    at_once: dict[str, Any] = {"sent_s": 0.0, "first_token_s": None, "finished_s": 0.0, "ok": False}
    one = OneRun(Run(RunHeader(), [record(**at_once), record("t", **at_once)], None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown = session({"a": [one]}, None)
    assert shown is not None
    for axes in shown.drawings[0].figure.axes:
        low, high = axes.get_xlim()
        assert low == 0 < high


def proof(fresh: dict[str, Any] | None) -> str:
    run = Run(RunHeader(), [], None)
    found = freshness({"a": [OneRun(run, fresh=fresh)], "b": [OneRun(run, fresh={"kind": "simulated"})]})
    return f"{found[0].state}: {found[0].why}"


def test_proofs_of_freshness_are_read_as_the_launcher_writes_them() -> None:
    assert proof(None).startswith("no proof")
    assert proof({"engines": [{"instance": "i0", "problems": []}], "gpus": {"status": "ok"}}).startswith("fresh: 1 ")
    stale = proof({"engines": [{"instance": "i0", "problems": ["served 7 requests before"]}]})
    assert stale == "not fresh: i0: served 7 requests before"
    assert "GPUs" in proof({"engines": [{"problems": []}], "gpus": {"status": "foreign"}})
    assert proof({"engines": []}).startswith("not fresh")
    assert freshness({"a": [OneRun(Run(RunHeader(), [], None))]}) == []


def test_a_machine_is_described_as_far_as_it_is_known() -> None:
    gpus = {"gpus": [{"name": "H200"}, {"name": "H200"}], "driver_version": "570"}
    found = dict(
        machine({
            "hardware": {"cpu": "EPYC", "memory_bytes": 2**34, "gpus": gpus, "governor": None},
            "software": {"git": {"commit": "abc", "dirty": True}, "packages": {"numpy": "2.4", "x": "1"}},
        })
    )  # fmt: skip
    assert found["GPUs"] == "2 x H200"
    assert found["memory"] == "16.0 GiB"
    assert found["git commit"] == "abc with local changes"
    assert found["packages"] == "numpy 2.4"
    assert "frequency governor" not in found
    assert machine(None) == []


def test_the_runs_or_the_experiment_give_the_capacity_and_the_instances() -> None:
    run = Run(RunHeader(options={"pool_tokens": 500, "kv_capacity_tokens": None}), [record(instance="i1")], None)
    rows = [BreakdownRow(candidates=("i0", "i1"))]
    found = OneRun(run, rows=rows, fresh={"engines": [{"instance": "i2"}]}, arm={"kv_capacity_tokens": 9})
    assert found.capacity_tokens == 500
    assert sorted(found.instances) == ["i0", "i1", "i2"]
    assert OneRun(Run(RunHeader(), [], None), arm={"kv_capacity_tokens": 9}).capacity_tokens == 9
    assert OneRun(Run(RunHeader(), [], None)).capacity_tokens is None
    with_four = Run(RunHeader(options={"instances": 4}), [record(instance="i1")], None)
    assert OneRun(with_four).instances == ["i1", "unnamed-1", "unnamed-2", "unnamed-3"]


def test_a_run_of_another_trace_has_no_anatomy() -> None:
    trace = Trace(requests=[], block_tokens=16, sha256="a")
    runs = {"x": [OneRun(Run(RunHeader(trace_sha256="b"), [record(instance="i0")], None))]}
    assert hits(runs, trace, why_no_trace="", capacity_tokens=None).why_missing.startswith("no request of any arm")
    assert hits(runs, None, why_no_trace="no file", capacity_tokens=None).why_missing == "no file"


def test_file_names_of_figures_are_plain() -> None:
    assert slug("load", "../../etc/passwd") == "load-etc_passwd"
    assert slug("", "\x00") == "figure"


def test_a_capacity_that_cannot_be_right_is_doubted_and_the_bars_end_at_the_ideal() -> None:
    requests = [
        TraceRequest(chat_id=n, session_id=f"s{n}", input_length=160, hash_ids=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
        for n in range(2)
    ]
    times: dict[str, Any] = {"sent_s": 0.0, "prompt_tokens": 160, "instance": "i0"}
    records = [record(f"s{n}", cached_tokens=160 * n, **times) for n in range(2)]
    for n, one in enumerate(records):
        one.chat_id, one.sent_s = n, float(n)
    runs = {"x": [OneRun(Run(RunHeader(), records, None))]}
    trace = Trace(requests=requests, block_tokens=16)
    small, large = (hits(runs, trace, why_no_trace="", capacity_tokens=tokens) for tokens in (32, 3200))
    assert "check --pool-tokens" in small.doubtful["x"]
    assert not large.doubtful
    assert small.drawing is not None
    bars = [patch for patch in small.drawing.figure.axes[0].patches if isinstance(patch, Rectangle)]
    reach = max(bar.get_x() + bar.get_width() for bar in bars)
    assert reach == pytest.approx(0.5)


def test_requests_left_out_are_the_reason_for_more_hits_than_the_model_has_not_the_capacity() -> None:
    ids = list(range(10))
    requests = [TraceRequest(chat_id=n, session_id=f"s{n}", input_length=160, hash_ids=ids) for n in range(2)]
    times: dict[str, Any] = {"prompt_tokens": 160, "instance": "i0", "cached_tokens": 160}
    failed = record("s0", sent_s=0.0, ok=False)
    found = record("s1", sent_s=1.0, **times)
    found.chat_id = 1
    runs = {"x": [OneRun(Run(RunHeader(), [failed, found], None))]}
    shown = hits(runs, Trace(requests=requests, block_tokens=16), why_no_trace="", capacity_tokens=3200)
    assert "1 of 2 requests are left out" in shown.doubtful["x"]
    assert "--pool-tokens" not in shown.doubtful["x"]
