"""The soak test in ten seconds, and the functions that judge it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.soak.attacks import KINDS
from bench.soak.hostile import SILENT
from bench.soak.load import Seen, WrongAnswerError, _read_event
from bench.soak.phases import SliceKind, SliceTally, compare, kind_at
from bench.soak.plan import SoakPlan
from bench.soak.run import soak
from bench.soak.samples import ProcessSample, trend
from bench.soak.verdict import figures, hostile_violations, violations

QUICK = SoakPlan(
    duration_s=10.0,
    streams=24,
    engines=3,
    kill_every_s=2.0,
    down_s=1.0,
    prompts=12,
    rss_growth_mb=64.0,
    hostile_share=0.3,
    body_bytes=2**18,
    slice_pairs=2,
    ttft_ratio=1e3,  # so few requests, on a machine with other tests, are no measurement
)


@pytest.mark.fleet
async def test_ten_seconds_of_killed_engines_and_leaving_and_hostile_clients(tmp_path: Path) -> None:
    result = await soak(QUICK, tmp_path)
    assert result.violations == []
    assert result.kills >= 1
    assert result.ends["ok"] > 50
    assert result.ends["left"] > 5
    assert not set(result.ends) - {"ok", "left", "broken", "refused"}
    assert set(result.hostile) == {attack.__name__ for attack in KINDS}
    assert sum(sum(ends.values()) for ends in result.hostile.values()) > 10


def sample(at_s: float, rss_mb: float = 80.0, descriptors: int = 20) -> ProcessSample:
    return ProcessSample(at_s, rss_mb, descriptors, 5, at_s)


def clean() -> dict[str, Any]:
    """Arguments of ``violations`` for a run without fault."""
    seen = Seen(ends=Counter(ok=3, left=1, broken=1, refused=1), finished_ids={"a", "b", "c"}, left_ids={"d"})
    samples = [sample(float(number)) for number in range(60)]
    return {
        "seen": seen,
        "kills": 1,
        "stats": {"requests": {"in_flight": 0, "abandoned_pulls": 0}, "ledger": {"requests": 0, "held_tokens": 0}},
        "rows": Counter(["a", "b", "c"]),
        "measured": figures(samples, samples[0], samples[-1], QUICK),
        "plan": replace(QUICK, hostile_share=0.0),
        "log": "2026-01-01 INFO all is well\n",
    }


def test_a_clean_run_has_no_violation() -> None:
    assert violations(**clean()) == []
    assert violations(**{**clean(), "rows": Counter("abcd")}) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kills": 0}, "no engine was killed"),
        ({"rows": Counter("abcc")}, "more than one row"),
        ({"rows": Counter("ab")}, "no row"),
        ({"rows": Counter("abcz")}, "were not sent"),
        ({"stats": {"requests": {"in_flight": 2, "abandoned_pulls": 0}, "ledger": {}}}, "2 requests in_flight"),
        (
            {"stats": {"requests": {"in_flight": 0, "abandoned_pulls": 0}, "ledger": {"requests": 1}}},
            "ledger's requests",
        ),
        ({"log": "x\nTraceback (most recent call last)\n"}, "bad lines"),
        ({"log": "2026-01-01 ERROR asyncio Task exception was never retrieved\n"}, "bad lines"),
    ],
)
def test_what_does_not_hold_is_a_violation(change: dict[str, Any], says: str) -> None:
    found = violations(**{**clean(), **change})
    assert len(found) == 1
    assert says in found[0]


@pytest.mark.parametrize("kind", ["wrong answer", "cut without an error event"])
def test_a_wrong_answer_is_a_violation(kind: str) -> None:
    reported = clean()
    reported["seen"].ends[kind] += 1
    reported["seen"].wrong.append("r: what")
    assert kind in violations(**reported)[0]


def test_rows_of_hostile_clients_are_not_compared_with_those_of_polite_ones() -> None:
    polite = QUICK.polite_prefix
    seen = Seen(ends=Counter(ok=1), finished_ids={f"{polite}1"})
    run = {**clean(), "seen": seen, "rows": Counter([f"{polite}1", "x", "x"])}
    assert violations(**{**run, "plan": QUICK}) == []
    assert len(violations(**run)) == 2


def tallies(slow_s: float) -> dict[SliceKind, SliceTally]:
    return {SliceKind.WITHOUT: SliceTally(300, 0, [0.1] * 300), SliceKind.WITH: SliceTally(300, 2, [slow_s] * 300)}


@pytest.mark.parametrize(
    ("ends", "slow_s", "says"),
    [
        ({"trailers": {"431": 5, "closed": 1}}, 0.19, None),
        ({"trailers": {"431": 5, SILENT: 1}}, 0.1, "neither answered nor cut off"),
        ({"big_body": {"500": 2}}, 0.1, "answered 500"),
        ({"big_body": {"413": 2}}, 0.21, "2.10 times that without"),
        ({"big_body": {}}, 0.1, "no hostile client"),
    ],
)
def test_hostile_clients_must_be_answered_and_must_not_slow_polite_ones(
    ends: dict[str, dict[str, int]], slow_s: float, says: str | None
) -> None:
    found = hostile_violations(ends, compare(tallies(slow_s)), replace(QUICK, ttft_ratio=2.0))
    assert [says in each for each in found] == [True] if says else found == []


def test_slices_alternate_and_their_beginnings_are_not_compared() -> None:
    plan = replace(QUICK, duration_s=80.0, slice_pairs=2, settle_share=0.1)
    phases = [kind_at(plan, at_s) for at_s in (1.0, 3.0, 19.0, 21.0, 23.0, 45.0, 65.0, 80.5)]
    assert phases == [None, *[SliceKind.WITHOUT] * 2, None, SliceKind.WITH, SliceKind.WITHOUT, SliceKind.WITH, None]
    assert kind_at(replace(plan, hostile_share=0.0), 3.0) is None


def test_few_requests_are_not_compared() -> None:
    assert (
        compare({SliceKind.WITHOUT: SliceTally(10, 0, [0.1] * 10), SliceKind.WITH: tallies(1.0)[SliceKind.WITH]})
        is None
    )


def test_memory_that_grows_and_descriptors_that_stay_are_violations() -> None:
    leaking = [sample(float(number), 80.0 + 2 * number) for number in range(60)]
    after = replace_descriptors(leaking[-1], 90)
    found = violations(
        **{**clean(), "measured": figures(leaking, leaking[0], after, replace(QUICK, rss_growth_mb=8.0))}
    )
    assert ["memory grew" in found[0], "90 file descriptors" in found[1]] == [True, True]


def replace_descriptors(of: ProcessSample, descriptors: int) -> ProcessSample:
    return ProcessSample(of.at_s, of.rss_mb, descriptors, of.threads, of.cpu_s)


def test_the_trend_is_the_slope_and_shrugs_off_a_peak() -> None:
    values = [10.0 + number / 10 for number in range(50)]
    values[25] = 500.0
    found = trend([float(number) for number in range(50)], values)
    assert found.per_hour == pytest.approx(360, rel=0.02)
    assert found.over_window == pytest.approx(4.9, rel=0.02)


@pytest.mark.parametrize(
    "event",
    [b"datA: {}", b'data: {"choices":[]}', b'data: {"error":{"message":"x"}}', b": ping", b"data: {"],
)
def test_a_malformed_event_is_a_wrong_answer(event: bytes) -> None:
    with pytest.raises((WrongAnswerError, Exception)) as refused:
        _read_event(event)
    assert type(refused.value).__name__ in {"WrongAnswerError", "DecodeError"}
