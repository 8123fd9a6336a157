"""KV hand-off between engines in virtual time: the successful case and each failure."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.engine import Engine
from sim.core.handoff import LoadFailurePolicy
from sim.core.sequence import KvTransfer
from sim.core.types import EngineDeadError, TokenEvent
from sim.virtual import VirtualFleet
from tests.sim.sim_engines import accounted, d_leg, drain, make_engine, make_request, p_leg

PROMPT = range(30)  # 7 full blocks and 2 tokens


def pair(**config: Any) -> VirtualFleet:
    """Engines p and d."""
    return VirtualFleet({name: make_engine(engine_id=name, **config) for name in ("p", "d")})


def run_p_leg(fleet: VirtualFleet, **more: Any) -> None:
    fleet.submit("p", p_leg("p-leg", PROMPT, **more))
    list(fleet.run(1.0))


def settle(fleet: VirtualFleet, until_s: float = 2000.0) -> list[TokenEvent]:
    return [event for _, event in fleet.run(until_s)]


def step_once(engine: Engine, now_s: float) -> None:
    """Make an engine step by giving it a small request."""
    engine.submit(make_request(f"work-{now_s}", range(900, 904)), now_s)
    drain(engine, now_s)


def test_d_decodes_without_computing_the_prompt() -> None:
    fleet = pair()
    run_p_leg(fleet)
    assert fleet.engines["p"].state().held_blocks == 8
    fleet.submit("d", d_leg("d-leg", PROMPT))
    events = settle(fleet)
    assert sum(event.tokens for event in events) == 4
    assert events[0].cached_tokens == 29  # all but the last token
    # 8 blocks of 4 tokens of 1,000 bytes at 1 MB/s, then one decode step.
    assert events[0].time_s == pytest.approx(1.0 + 0.032 + 0.010 + 30e-6)
    assert fleet.engines["d"].counters.external_tokens == 30
    assert fleet.engines["d"].counters.prefix_hits == 0


def test_d_pulls_only_what_it_lacks() -> None:
    fleet = pair()
    fleet.submit("d", make_request("before", range(16)))
    run_p_leg(fleet)
    fleet.submit("d", d_leg("d-leg", PROMPT))
    events = settle(fleet)
    assert events[0].time_s == pytest.approx(1.0 + 0.016 + 0.010 + 30e-6)
    assert fleet.engines["d"].counters.external_tokens == 14


def test_pulled_blocks_are_cached_on_d() -> None:
    fleet = pair()
    run_p_leg(fleet)
    fleet.submit("d", d_leg("d-leg", PROMPT))
    settle(fleet)
    fleet.submit("d", make_request("again", PROMPT))
    assert settle(fleet, 3000.0)[0].cached_tokens == 28


def test_d_may_ask_before_p_has_finished() -> None:
    fleet = pair()
    fleet.submit("d", d_leg("d-leg", PROMPT), 0.0)
    fleet.submit("p", p_leg("p-leg", PROMPT), 0.5)
    events = settle(fleet)
    assert [event.request_id for event in events if event.finish_reason] == ["p-leg", "d-leg"]


def test_p_keeps_the_blocks_until_they_are_pulled_and_it_steps() -> None:
    fleet = pair()
    run_p_leg(fleet)
    fleet.submit("d", d_leg("d-leg", PROMPT))
    settle(fleet, 20.0)
    p = fleet.engines["p"]
    assert p.state().held_blocks == 8
    step_once(p, 21.0)
    assert p.state().held_blocks == 0
    assert p.state().expired_holds == 0
    assert p.state().free_blocks == 64


def test_a_hold_that_is_not_pulled_expires_and_is_freed_when_p_steps() -> None:
    fleet = pair(abort_timeout_s=480.0)
    run_p_leg(fleet)
    p = fleet.engines["p"]
    step_once(p, 479.0)
    assert p.state().held_blocks == 8
    settle(fleet, 500.0)
    assert p.state().held_blocks == 8
    step_once(p, 501.0)
    assert (p.state().held_blocks, p.state().expired_holds) == (0, 1)


def test_held_blocks_count_against_p() -> None:
    fleet = VirtualFleet({"p": make_engine(engine_id="p", num_blocks=12)})
    run_p_leg(fleet)
    fleet.submit("p", make_request("big", range(100, 132), 1))
    assert settle(fleet, 479.0) == []  # 8 blocks needed, 4 free
    assert [event.request_id for event in settle(fleet, 600.0)] == ["big"]


def test_an_ending_first_token_means_p_never_sends() -> None:
    fleet = pair()
    fleet.submit("p", p_leg("p-leg", PROMPT, stop_after=1, min_tokens=0))
    (event,) = settle(fleet, 1.0)
    assert (event.finish_reason, event.transfer_id) == ("stop", None)
    assert fleet.engines["p"].state().held_blocks == 0
    fleet.submit("d", d_leg("d-leg", PROMPT))
    assert settle(fleet) == []


def test_min_tokens_keeps_the_first_token_from_ending() -> None:
    fleet = pair()
    fleet.submit("p", p_leg("p-leg", PROMPT, stop_after=1, min_tokens=1))
    (event,) = settle(fleet, 1.0)
    assert (event.finish_reason, event.transfer_id) == ("length", "t")


BROKEN = {
    "stale engine id": d_leg("d-leg", PROMPT)._replace(kv_transfer=KvTransfer(False, True, "t", "an older id", "p")),
    "unreachable P": d_leg("d-leg", PROMPT, source="nobody"),
    "unknown transfer": d_leg("d-leg", PROMPT, "another"),
    "no engine id": d_leg("d-leg", PROMPT)._replace(kv_transfer=KvTransfer(False, True, "t", None, "p")),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_pull_hangs_and_leaks_by_default(case: str) -> None:
    fleet = pair()
    run_p_leg(fleet)
    fleet.submit("d", BROKEN[case])
    assert settle(fleet, 5000.0) == []
    d = fleet.engines["d"]
    assert (d.state().pulling, d.state().used_blocks) == (1, 8)
    assert fleet.abort("d", "d-leg")
    state = d.state()
    assert (state.running, state.waiting, state.pulling, d.waiting) == (0, 0, 0, 0)
    assert (state.leaked_blocks, state.free_blocks) == (8, 56)
    assert d.kv_usage == pytest.approx(8 / 64)
    assert accounted(d)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_pull_fails_or_is_recomputed_by_policy(case: str) -> None:
    for policy, outcome in ((LoadFailurePolicy.FAIL, "error"), (LoadFailurePolicy.RECOMPUTE, "length")):
        fleet = pair(load_failure_policy=policy, abort_timeout_s=60.0)
        run_p_leg(fleet)
        fleet.submit("d", BROKEN[case])
        events = settle(fleet)
        assert [event.finish_reason for event in events if event.finish_reason] == [outcome]
        assert {event.cached_tokens for event in events} == {0}
        # A transfer id that P may still get to hold is given up only after the abort timeout.
        waited = events[0].time_s > 60.0
        assert waited == (case == "unknown transfer")
        assert fleet.engines["d"].state().free_blocks == 64


def test_a_transfer_serves_one_pull_only() -> None:
    fleet = pair()
    run_p_leg(fleet)
    fleet.submit("d", d_leg("first", PROMPT))
    assert settle(fleet)[-1].finish_reason == "length"
    fleet.engines["d"].reset_prefix_cache()
    fleet.submit("d", d_leg("second", PROMPT))
    assert settle(fleet, 5000.0) == []


def test_an_expired_transfer_is_unknown() -> None:
    fleet = pair(abort_timeout_s=10.0, load_failure_policy=LoadFailurePolicy.RECOMPUTE)
    run_p_leg(fleet)
    settle(fleet, 20.0)
    fleet.submit("d", d_leg("late", PROMPT))
    events = settle(fleet)
    assert events[0].time_s > 30.0
    assert events[0].cached_tokens == 0


def test_blocks_of_an_abandoned_pull_come_back_when_the_transfer_ends() -> None:
    fleet = pair()
    run_p_leg(fleet)
    fleet.submit("d", d_leg("d-leg", PROMPT))
    settle(fleet, 1.01)
    assert fleet.abort("d", "d-leg")
    assert fleet.engines["d"].state().leaked_blocks == 8
    assert settle(fleet, 10.0) == []
    assert fleet.engines["d"].state().free_blocks == 64


def test_a_pull_waits_for_room_on_d() -> None:
    fleet = VirtualFleet({"p": make_engine(engine_id="p"), "d": make_engine(engine_id="d", num_blocks=16)})
    run_p_leg(fleet)
    fleet.submit("d", make_request("big", range(500, 540), 20))
    fleet.submit("d", d_leg("d-leg", PROMPT))
    events = settle(fleet)
    assert [event.request_id for event in events if event.finish_reason] == ["big", "d-leg"]


def test_an_aborted_p_leg_is_never_held() -> None:
    fleet = pair()
    fleet.submit("p", p_leg("p-leg", PROMPT))
    settle(fleet, 0.01)
    assert fleet.abort("p", "p-leg")
    settle(fleet, 1.0)
    assert fleet.engines["p"].state().free_blocks == 64


def test_a_transfer_id_used_twice_holds_the_latest_only() -> None:
    fleet = pair()
    run_p_leg(fleet)
    fleet.submit("p", p_leg("again", range(100, 108)))
    settle(fleet, 2.0)
    p = fleet.engines["p"]
    step_once(p, 3.0)
    assert (p.state().holds, p.state().held_blocks) == (1, 2)


def test_a_consumer_dies_of_a_prefill_leg() -> None:
    engine = make_engine(role="kv_consumer")
    with pytest.raises(EngineDeadError, match="kv_consumer"):
        engine.submit(p_leg("p-leg", PROMPT), 0.0)
    with pytest.raises(EngineDeadError):
        engine.submit(make_request("next", PROMPT), 0.0)


def test_without_a_connector_the_parameters_mean_nothing() -> None:
    engine = make_engine(role="none")
    engine.submit(p_leg("p-leg", PROMPT), 0.0)
    engine.submit(d_leg("d-leg", PROMPT), 0.0)
    events, _ = drain(engine)
    assert {event.request_id for event in events if event.finish_reason} == {"p-leg", "d-leg"}
    assert engine.state().free_blocks == 64
