"""Policies and planners of plug-ins that fail: the request is served by a built-in one, and the failure is shown."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from policies.registry import PolicyLoadError
from policies.routing.warm import Warm
from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, OffloadPlan, OffloadReason, Reason, RequestView
from proxy.routing.policy_watch import MIN_SLOW
from tests.chaos.conftest import BODY, Chaos, StartChaos
from tests.chaos.rig.engine import ChaosEngine

Answers = Callable[[FleetSnapshot], Any]


@dataclasses.dataclass(frozen=True)
class Odd:
    """A policy, and a planner, that gives a scripted answer."""

    answer: Answers
    name: ClassVar[str] = "odd"

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        choice: Choice = self.answer(fleet)
        return choice

    def plan(self, request: RequestView, *_: Any) -> OffloadPlan:
        plan: OffloadPlan = self.answer(_[-1])
        return plan


def raises(_: FleetSnapshot) -> Any:
    raise KeyError("a key that every request lacks")


def first(fleet: FleetSnapshot) -> str:
    return fleet.instances[0].instance


BAD_CHOICES: dict[str, Answers] = {
    "raises": raises,
    "none": lambda _: None,
    "a stranger": lambda _: Choice("nowhere", Reason.DRAWN, ()),
    "no name": lambda _: Choice(None, Reason.DRAWN, ()),  # type: ignore[arg-type]
    "a reason of its own": lambda fleet: Choice(first(fleet), "mine", ()),  # type: ignore[arg-type]
    "scores of another shape": lambda fleet: Choice(first(fleet), Reason.DRAWN, ((1.0,),)),  # type: ignore[arg-type]
    "no scores": lambda fleet: Choice(first(fleet), Reason.DRAWN, None),  # type: ignore[arg-type]
    "an object": lambda _: object(),
}
BAD_PLANS: dict[str, Answers] = {
    "raises": raises,
    "none": lambda _: None,
    "a stranger": lambda _: OffloadPlan("nowhere", OffloadReason.CHOSEN),
    "a reason of its own": lambda _: OffloadPlan(None, "mine"),  # type: ignore[arg-type]
}


async def served(proxy: Chaos) -> dict[str, Any]:
    """The row of a request that must succeed."""
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": True})
    assert (answer.status_code, "[DONE]" in answer.text) == (200, True)
    row: dict[str, Any] = (await proxy.rows())[-1]
    assert row["outcome"] == "ok"
    return row


async def condition(proxy: Chaos, name: str) -> dict[str, Any]:
    answer = await proxy.client.get("/ready?verbose")
    assert answer.status_code == 200
    (found,) = (each for each in answer.json()["conditions"] if each["name"] == name)
    return found


@pytest.mark.parametrize("name", BAD_CHOICES)
async def test_a_failing_policy_is_replaced_for_the_request(
    start_chaos: StartChaos, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    proxy = await start_chaos(ChaosEngine(), ChaosEngine())
    caplog.set_level(logging.WARNING, "warmroute.policy")
    assert (await condition(proxy, "policy"))["ok"]
    proxy.core.router.routing.policy = Odd(BAD_CHOICES[name])
    # Without a zero before the first failure, Prometheus sees no increase, and WarmroutePolicyFailing does not fire.
    assert 'warmroute_policy_failures_total{name="odd",part="policy"} 0.0' in (await proxy.client.get("/metrics")).text
    for _ in range(4):
        assert (await served(proxy))["policy"] == "warm"
    assert 'warmroute_policy_failures_total{name="odd",part="policy"} 4.0' in (await proxy.client.get("/metrics")).text
    (failure,) = (await proxy.client.get("/stats")).json()["policy_failures"]["failures"]
    assert (failure["part"], failure["name"], failure["count"]) == ("policy", "odd", 4)
    shown = await condition(proxy, "policy")
    assert not shown["ok"]
    assert "odd failed 4 times" in shown["detail"]
    assert "PUT /policy" in shown["remedy"]
    assert failure["last"] not in str(shown)
    first_one, *_ = caplog.messages
    assert "the policy 'odd' failed, for this request warm decided: " in first_one
    assert [" _choose" in message for message in caplog.messages].count(True) == 1
    await proxy.nothing_left()


@pytest.mark.parametrize("name", BAD_PLANS)
async def test_without_a_usable_plan_nothing_is_offloaded(start_chaos: StartChaos, name: str) -> None:
    proxy = await start_chaos(ChaosEngine(), ChaosEngine(), role="kv_both")
    proxy.core.router.routing.planner = Odd(BAD_PLANS[name])
    row = await served(proxy)
    assert (row["policy"], row["offload_reason"], row["prefill_instance"]) == ("round_robin", "planner_failed", None)
    assert not (await condition(proxy, "planner"))["ok"]
    assert (await condition(proxy, "policy"))["ok"]
    await proxy.nothing_left()


async def test_both_may_fail_at_once_and_so_may_the_default_policy(
    start_chaos: StartChaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await start_chaos(ChaosEngine(), ChaosEngine())
    proxy.core.router.routing.policy, proxy.core.router.routing.planner = Odd(raises), Odd(raises)
    monkeypatch.setattr(Warm, "choose", lambda *_: None)
    assert (await served(proxy))["policy"] == "least_loaded"
    failures = (await proxy.client.get("/stats")).json()["policy_failures"]["failures"]
    assert {(each["part"], each["name"]) for each in failures} == {
        ("policy", "odd"),
        ("policy", "warm"),
        ("planner", "odd"),
    }


async def test_explanations_show_a_failing_policy_and_go_on(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(), ChaosEngine())
    proxy.core.router.known_policies["odd"] = Odd(raises)
    decisions = (await proxy.client.post("/explain", json=BODY)).json()["decisions"]
    assert decisions["linear"]["failures"] == []
    assert decisions["odd"]["decided_by"] == "warm"
    assert [each["name"] for each in decisions["odd"]["failures"]] == ["odd"]
    assert (await proxy.client.get("/stats")).json()["policy_failures"]["failures"] == []


async def test_scores_that_are_no_numbers_break_neither_row_nor_explanation(start_chaos: StartChaos) -> None:
    def odd_scores(fleet: FleetSnapshot) -> Choice:
        inputs: dict[str, Any] = {"nan": float("nan"), "object": object(), "big": 2**70, "own": {1: [float("inf")]}}
        inputs["itself"] = inputs
        values = [float("inf"), *[float("nan")] * (len(fleet.instances) - 1)]
        scores = [
            CandidateScore(view.instance, value, inputs) for view, value in zip(fleet.instances, values, strict=True)
        ]
        return Choice(first(fleet), Reason.LOWEST_SCORE, tuple(scores))

    proxy = await start_chaos(ChaosEngine(), ChaosEngine())
    proxy.core.router.routing.policy = Odd(odd_scores)
    assert (await served(proxy))["policy"] == "odd"
    assert (await proxy.client.post("/explain", json=BODY)).status_code == 200


async def test_warm_decides_where_the_chosen_score_is_nan(start_chaos: StartChaos) -> None:
    def unscored(fleet: FleetSnapshot) -> Choice:
        scores = tuple(CandidateScore(view.instance, float("nan"), {}) for view in fleet.instances)
        return Choice(first(fleet), Reason.LOWEST_SCORE, scores)

    proxy = await start_chaos(ChaosEngine(), ChaosEngine())
    proxy.core.router.routing.policy = Odd(unscored)
    assert (await served(proxy))["policy"] == "warm"
    [failure] = (await proxy.client.get("/stats")).json()["policy_failures"]["failures"]
    assert (failure["part"], failure["name"]) == ("policy", "odd")


async def test_a_slow_policy_is_counted_and_shown(start_chaos: StartChaos) -> None:
    def slow(fleet: FleetSnapshot) -> Choice:
        time.sleep(0.03)
        return Choice(first(fleet), Reason.DRAWN, ())

    proxy = await start_chaos(ChaosEngine(), limits={"slow_decision_s": 0.02})
    assert (await condition(proxy, "decision_time"))["ok"]
    proxy.core.router.routing.policy = Odd(slow)
    assert (await served(proxy))["policy"] == "odd"
    assert 'warmroute_slow_decisions_total{policy="odd"} 1.0' in (await proxy.client.get("/metrics")).text
    assert (await proxy.client.get("/stats")).json()["policy_failures"]["slow_decisions"] == {"odd": 1}
    assert (await condition(proxy, "decision_time"))["ok"], "one slow decision may be a pause of the machine"
    for _ in range(MIN_SLOW - 1):
        await served(proxy)
    found = await condition(proxy, "decision_time")
    assert "limits.slow_decision_s" in found["remedy"]
    assert found["detail"].startswith(f"{MIN_SLOW} of {MIN_SLOW} routing decisions of odd")


async def test_readiness_lists_its_conditions_only_when_asked(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine())
    for query in ("", "?verbose=0", "?verbose=false"):
        assert set((await proxy.client.get(f"/ready{query}")).json()) == {"ready", "healthy_instances"}
    for query in ("?verbose", "?verbose=1", "?verbose=true"):
        conditions = (await proxy.client.get(f"/ready{query}")).json()["conditions"]
        assert all(each["ok"] and each["remedy"] is None for each in conditions)
    proxy.core.router.broken_policies["theirs"] = str(PolicyLoadError("a path of this machine"))
    shown = await condition(proxy, "plug_ins")
    assert "theirs" in shown["detail"]
    assert "a path" not in str(shown)
    proxy.instance().up = False
    proxy.core.instances._update(proxy.instance())
    answer = await proxy.client.get("/ready?verbose=1")
    assert answer.status_code == 503
    assert answer.json()["conditions"][0]["detail"] == "0 of 1 instances can be sent requests"


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
async def test_a_failure_leaves_nothing_for_the_collector(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(), ChaosEngine())
    proxy.core.router.routing.policy, proxy.core.router.routing.planner = Odd(raises), Odd(raises)
    for _ in range(3):
        await served(proxy)
    before = sum(isinstance(each, KeyError | FleetSnapshot) for each in gc.get_objects())
    for _ in range(10):
        await served(proxy)
    assert sum(isinstance(each, KeyError | FleetSnapshot) for each in gc.get_objects()) <= before + 2
