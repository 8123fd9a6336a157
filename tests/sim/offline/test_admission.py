"""Admission in virtual time: turns are held and sent by the rule, and waiting counts."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from policies.admission.gate import LOOK_S
from policies.registry import make_admission, make_routing
from sim.offline.simulate import SimOptions, SimResult, simulate
from tests.sim.offline.offline_runs import conversation, trace_of

INSTANCES = 2
POOL = 400_000
"""Tokens of each pool: room for a quarter of the sessions of ``crowd``."""


@cache
def crowd(rule: str = "never_hold", *, seed: int = 1, max_hold_s: float = 600.0, **params: Any) -> SimResult:
    """Sixty agents, a new one every two seconds; each comes back twelve times with its whole history."""
    draw = random.Random(seed)
    sessions = []
    for number in range(60):
        start_s, blocks = number * 2.0 + draw.random(), draw.randint(350, 500)
        turns = [(start_s + turn, blocks + 30 * turn, 60) for turn in range(12)]
        think_s = [draw.uniform(1.0, 4.0) for _ in turns]
        sessions.append(conversation(*turns, session=f"s{number}", first_id=number * 100, think_s=think_s))
    options = SimOptions(instances=INSTANCES, pool_tokens=POOL, max_hold_s=max_hold_s, decisions=True)
    return simulate(trace_of(*sessions), options, make_routing("warm"), admission=make_admission(rule, params))


def waits(result: SimResult) -> list[float]:
    return [each["held_s"] for each in result.decisions]


def mean_e2e(result: SimResult) -> float:
    return float(np.mean([each.e2e_scheduled_s or np.inf for each in result.run.records]))


@pytest.mark.parametrize("rule", ["working_set", "session_cap"])
def test_every_held_turn_is_sent_within_the_bound_and_nothing_is_left(rule: str) -> None:
    params = {"sessions": 12} if rule == "session_cap" else {}
    result = crowd(rule, max_hold_s=40.0, **params)
    assert len(result.run.records) == len(crowd().run.records)
    assert all(each.ok for each in result.run.records)
    assert 0.0 < max(waits(result)) <= 40.0 + LOOK_S
    assert set(result.ledger.values()) == {0}


def test_never_holding_sends_every_turn_when_it_is_due() -> None:
    assert set(waits(crowd())) == {0.0}


def test_a_session_cap_bounds_the_sessions_in_flight() -> None:
    result = crowd("session_cap", sessions=5, keep_s=0.0, max_hold_s=1e6)
    moments: list[tuple[float, int, str]] = []
    for row, each in zip(result.decisions, result.run.records, strict=True):
        held_s = row["stages_ms"].get("held", 0.0) / 1e3
        # Rows are rounded, and a turn takes the place of one that ends at the same moment.
        moments.append(((each.sent_s or 0.0) + held_s + 1e-5, 1, each.session_id))
        moments.append((each.finished_s or 0.0, 0, each.session_id))
    running: set[str] = set()
    most = 0
    for _, begins, session in sorted(moments):
        running = running | {session} if begins else running - {session}
        most = max(most, len(running))
    assert most == 5


def test_rows_and_header_say_what_was_held_and_why() -> None:
    result = crowd("working_set", lost_share=0.2)
    assert result.run.header.options["admission"] == "working_set"
    assert result.run.header.options["admission_params"]["lost_share"] == 0.2
    for row, record in zip(result.decisions, result.run.records, strict=True):
        assert row["stages_ms"].get("held", 0.0) == pytest.approx(row["held_s"] * 1e3, abs=1)
        assert record.sent_s == pytest.approx(record.scheduled_s)  # a hold is a part of the proxy's answer
        assert row["stages_ms"]["first_byte"] >= row["stages_ms"].get("held", 0.0)
        assert record.ttft_s == pytest.approx(row["stages_ms"]["first_byte"] / 1e3, abs=1e-5)
    held = {row["request_id"]: row["stages_ms"]["held"] for row in result.decisions if "held" in row["stages_ms"]}
    assert result.held_s == pytest.approx({request_id: ms / 1e3 for request_id, ms in held.items()}, abs=1e-5)
    assert result.run.end is not None
    assert result.run.end.finished_unix_s == max(each.finished_s or 0.0 for each in result.run.records)
    reasons = {row["admission"] for row in result.decisions if row["held_s"]}
    assert reasons <= {"room", "idle_fleet", "held_long_enough", "resident"}
    assert reasons


@pytest.mark.parametrize("seed", [1, 2])
def test_holding_helps_where_contexts_exceed_the_pools(seed: int) -> None:
    assert mean_e2e(crowd("working_set", seed=seed)) < 0.7 * mean_e2e(crowd(seed=seed))


def test_equal_arguments_give_equal_results() -> None:
    first, second = crowd("working_set"), crowd.__wrapped__("working_set")
    assert first.run.records == second.run.records
