"""Several replicas of the router in virtual time: what they know of each other, and when."""

from __future__ import annotations

from typing import Any

import pytest

from policies.admission.session_cap import SessionCap
from policies.registry import make_routing
from policies.replicas.parts import part_of
from sim.offline.options import SimOptions, SimulatedReplicas, SimulationError
from sim.offline.simulate import SimResult, simulate
from tests.sim.offline.offline_runs import ROOMY_TOKENS, agents, conversation, run, trace_of


def replicas(count: int, staleness_s: float, **more: Any) -> SimulatedReplicas:
    return SimulatedReplicas(count=count, staleness_s=staleness_s, **more)


def sent_to(result: SimResult) -> dict[str, str | None]:
    return {record.request_id: record.instance for record in result.run.records}


@pytest.mark.parametrize("policy", ["warm", "lmetric", "least_loaded"])
def test_with_news_at_once_several_replicas_find_about_the_hits_of_one(policy: str) -> None:
    trace = agents(60)
    alone = run(trace, policy, pool_tokens=ROOMY_TOKENS)
    four = run(trace, policy, pool_tokens=ROOMY_TOKENS, replicas=replicas(4, 0.0, events_s=0.0))
    assert four.run.end is not None
    assert four.run.end.ok == 60
    hits = [sum(record.cached_tokens or 0 for record in each.run.records) for each in (alone, four)]
    assert abs(hits[1] / hits[0] - 1) < 0.2


def test_nothing_is_in_flight_at_the_end_and_equal_options_give_equal_runs() -> None:
    trace = agents(80)
    first, second = (run(trace, "warm", replicas=replicas(3, 0.5)) for _ in range(2))
    assert first.ledger == dict.fromkeys(first.ledger, 0)
    assert sent_to(first) == sent_to(second)


def test_a_turn_before_the_news_of_the_session_loses_its_prefix_and_one_after_it_finds_it() -> None:
    trace = trace_of(conversation((0.0, 100, 1), (5.0, 110, 1)))
    for staleness_s, found in ((1.0, 100), (20.0, 0)):
        result = run(trace, "session_sticky", replicas=replicas(2, staleness_s, events_s=None))
        assert (result.run.records[1].predicted_cached_tokens or 0) // 64 == found


def test_kv_events_make_blocks_known_to_all_although_the_news_of_the_session_is_late() -> None:
    trace = trace_of(conversation((0.0, 100, 1), (5.0, 110, 1)))
    result = run(trace, "warm", replicas=replicas(2, 60.0, events_s=0.05))
    assert result.run.records[1].cached_tokens == 100 * 64


def test_load_that_is_not_yet_known_piles_up_on_one_instance() -> None:
    """One instance is known to be busy; what the others sent to the free one lately is not."""
    long = conversation((0.0, 400, 4_000), session="long", first_id=100)
    burst = [conversation((20.0 + 0.01 * n, 100, 500), session=str(n), first_id=n + 1) for n in range(8)]
    trace = trace_of(long, *burst)
    used = {
        staleness_s: set(sent_to(run(trace, "least_loaded", instances=2, replicas=replicas(9, staleness_s))).values())
        for staleness_s in (0.0, 10.0)
    }
    assert len(used[0.0]) == 2
    late = run(trace, "least_loaded", instances=2, replicas=replicas(9, 10.0))
    busy = next(record.instance for record in late.run.records if record.session_id == "long")
    assert busy not in {record.instance for record in late.run.records if record.session_id != "long"}


def test_replicas_place_new_work_on_their_parts() -> None:
    trace = trace_of(*[conversation((float(n), 100, 5), session=str(n), first_id=n + 1) for n in range(16)])
    result = run(trace, "least_loaded", instances=40, replicas=replicas(4, 10.0))
    names = [f"replica-{number}" for number in range(4)]
    parts = [part_of(name, names, [f"inst-{n}" for n in range(40)]) for name in names]
    assert all(record.instance in parts[number % 4] for number, record in enumerate(result.run.records))


def test_hand_offs_run_behind_several_replicas() -> None:
    result = run(agents(60), "least_loaded", "static_pd", prefill_instances=2, replicas=replicas(3, 0.2))
    assert any(record.prefill_instance for record in result.run.records)
    assert result.ledger == dict.fromkeys(result.ledger, 0)


@pytest.mark.parametrize(
    "options", [replicas(0, 0.0), replicas(2, -1.0), replicas(2, float("inf")), replicas(2, 0.0, events_s=-1.0)]
)
def test_impossible_replicas_are_refused(options: SimulatedReplicas) -> None:
    with pytest.raises(SimulationError, match="replicas"):
        SimOptions(replicas=options).check()


def test_rules_that_hold_requests_are_refused_with_several_replicas() -> None:
    options = SimOptions(instances=2, replicas=replicas(2, 0.1))
    with pytest.raises(SimulationError, match="never_hold"):
        simulate(agents(10), options, make_routing("warm"), admission=SessionCap())
