"""The order of prefills in virtual time: short prompts overtake a long one that waits."""

from __future__ import annotations

import pytest

from policies.registry import make_routing
from replayer.records.runs import RequestRecord
from replayer.traces.trace import Trace
from sim.offline.simulate import SimOptions, simulate
from tests.sim.offline.offline_runs import ROOMY_TOKENS, conversation, trace_of

SHORT = range(2, 22)


def one_long_and_many_short() -> Trace:
    """A prompt of 32k tokens is computed when one of 64k arrives, and then 20 of 640 tokens.

    The short ones arrive after the long one has left the front end, which would let them go first by itself.
    """
    sessions = [conversation((0.0, 500, 5), session="first", first_id=0)]
    sessions.append(conversation((0.1, 1_000, 5), session="long", first_id=1_000))
    for number in SHORT:
        sessions.append(conversation((0.5 + 0.02 * number, 10, 5), session=f"short-{number}", first_id=1_000 * number))
    return trace_of(*sessions)


PARAMS: tuple[dict[str, float], ...] = ({}, {"slowdown": 0.0})
TRACE = one_long_and_many_short()


def records(policy: str, scheduling_policy: str, instances: int = 1, **params: float) -> list[RequestRecord]:
    options = SimOptions(instances=instances, pool_tokens=ROOMY_TOKENS, scheduling_policy=scheduling_policy)
    result = simulate(TRACE, options, make_routing(policy, params))
    assert set(result.ledger.values()) == {0}
    assert len(result.run.records) == len(TRACE.requests)
    return result.run.records


def ttfts(found: list[RequestRecord]) -> dict[str, float]:
    return {each.session_id: (each.first_token_s or 0.0) - (each.sent_s or 0.0) for each in found}


def test_the_mean_ttft_falls_and_the_long_prompt_waits_for_the_short_ones() -> None:
    ordered, plain = (ttfts(records("warm", "priority", 1, **params)) for params in PARAMS)
    assert sum(ordered.values()) < 0.5 * sum(plain.values())
    for number in SHORT:
        name = f"short-{number}"
        assert ordered[name] < ordered["long"]
        assert ordered[name] < plain[name]
    assert ordered["first"] == pytest.approx(plain["first"], rel=1e-3)  # its last chunk shares a step with another one
    assert ordered["long"] > plain["long"]


def test_without_a_slowdown_or_without_priority_scheduling_nothing_changes() -> None:
    for instances in (1, 2):
        plain = records("warm", "fcfs", instances, slowdown=0.0)
        assert records("warm", "fcfs", instances) == plain
        assert records("warm", "priority", instances, slowdown=0.0) == plain
        assert records("lmetric", "priority", instances) == records("lmetric", "fcfs", instances)
    assert records("warm", "priority") != records("warm", "fcfs")


def test_rows_have_the_priority_that_the_engine_got() -> None:
    def rows(**params: float) -> dict[str, int | None]:
        options = SimOptions(instances=1, pool_tokens=ROOMY_TOKENS, scheduling_policy="priority", decisions=True)
        found = simulate(TRACE, options, make_routing("warm", params)).decisions
        return {row["session_id"]: row["priority"] for row in found}

    ordered = rows()
    assert all(isinstance(each, int) for each in ordered.values())
    assert (ordered["long"] or 0) > max(ordered[f"short-{number}"] or 0 for number in SHORT)
    assert set(rows(slowdown=0.0).values()) == {None}
