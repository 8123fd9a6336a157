"""The queue and the task of shadow decisions, without a server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from policies.classes import ClassThresholds
from policies.offload.never import Never
from policies.routing.least_loaded import LeastLoaded
from policies.session import RoutingSession
from policies.snapshot import FleetSnapshot
from policies.state import FleetState
from policies.types import Choice, RequestView
from proxy.settings import ShadowSettings
from proxy.shadow import shadows
from proxy.shadow.figures import KEPT, ShadowFigures
from proxy.shadow.shadows import PAUSE_AFTER, SLOW_S, Shadows
from tests.policies.builders import ask_new

NAMES = ["a", "b", "c"]
LONG_S = 3600.0


class Fleet:
    """A routing session with three instances, and its shadows."""

    def __init__(self, **settings: Any) -> None:
        self.routing = RoutingSession(FleetState(), LeastLoaded(), Never(), ClassThresholds(5_000, 20_000))
        for name in NAMES:
            self.routing.state.add_instance(name)
        self.shadows = Shadows(ShadowSettings(**settings), self.routing)
        self.sent = 0

    def route(self, count: int = 1) -> None:
        for _ in range(count):
            self.sent += 1
            request = ask_new(self.sent)._replace(request_id=f"r{self.sent}")
            self.routing.route(request, NAMES, [], float(self.sent))

    def figures(self, label: str) -> ShadowFigures:
        return self.shadows.figures[label]


@dataclass(frozen=True)
class Defective:
    """Fails as a third party's policy may."""

    name: ClassVar[str] = "lmetric"

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        raise RuntimeError("defect")


def defective(fleet: Fleet, label: str = "lmetric") -> None:
    entry, _ = fleet.shadows._parts.policies[label]
    fleet.shadows._parts.policies[label] = (entry, Defective())


def test_without_shadows_nothing_is_observed() -> None:
    fleet = Fleet()
    fleet.route(3)
    assert fleet.routing.on_decided is None
    assert fleet.routing.gate.on_offer is None
    assert (fleet.shadows.enabled, fleet.shadows.waiting) == (False, 0)


def test_every_decision_is_compared_once() -> None:
    fleet = Fleet(policies=["least_loaded", "lmetric"], planners=["threshold"])
    fleet.route(10)
    assert fleet.shadows.requests == 0
    assert fleet.shadows.waiting == 10
    fleet.shadows.work_off(LONG_S)
    assert (fleet.shadows.requests, fleet.shadows.waiting) == (10, 0)
    same = fleet.figures("least_loaded").as_dict()
    assert (same["requests"], same["agreed"], same["agreement"]) == (10, 10, 1.0)
    assert same["regret_s"]["total"] == 0.0
    assert fleet.figures("threshold").as_dict()["answers"] == {"stayed": 10}
    assert fleet.figures("lmetric").decisions == 10


def test_a_full_queue_skips_and_counts() -> None:
    fleet = Fleet(policies=["warm"], queue=4)
    fleet.route(10)
    assert (fleet.shadows.waiting, fleet.shadows.skipped) == (4, 6)
    fleet.shadows.work_off(LONG_S)
    assert (fleet.shadows.requests, fleet.shadows.skipped) == (4, 6)
    fleet.route()
    assert (fleet.shadows.waiting, fleet.shadows.skipped) == (1, 6)


def test_a_slice_ends_after_its_time_and_the_next_one_continues() -> None:
    fleet = Fleet(policies=["warm", "lmetric"])
    fleet.route(2)
    progress: list[int] = []
    while fleet.shadows.waiting and len(progress) < 20:
        fleet.shadows.work_off(1e-9)  # one step
        progress.append(sum(each.decisions for each in fleet.shadows.figures.values()))
    assert progress == [1, 2, 2, 3, 4, 4]
    assert [fleet.figures(name).decisions for name in ("warm", "lmetric")] == [2, 2]


def test_a_failing_shadow_is_counted_then_paused_and_the_others_continue() -> None:
    fleet = Fleet(policies=["lmetric", "warm"])
    defective(fleet)
    fleet.route(PAUSE_AFTER - 1)
    fleet.shadows.work_off(LONG_S)
    broken = fleet.figures("lmetric")
    assert (broken.failures, broken.paused, broken.last_error) == (PAUSE_AFTER - 1, False, "RuntimeError: defect")
    fleet.route(5)
    fleet.shadows.work_off(LONG_S)
    assert (broken.failures, broken.paused, broken.requests) == (PAUSE_AFTER, True, 0)
    assert broken.as_dict()["last_error"] == f"paused after {PAUSE_AFTER} failures in a row: RuntimeError: defect"
    assert fleet.figures("warm").requests == PAUSE_AFTER + 4


def test_a_shadow_that_blocks_the_event_loop_is_paused() -> None:
    fleet = Fleet(policies=["warm"])
    fleet.route(PAUSE_AFTER)
    now_s = 0.0

    def slow() -> float:
        nonlocal now_s
        now_s += 2 * SLOW_S
        return now_s

    fleet.shadows._clock = slow
    fleet.shadows.work_off(LONG_S)
    slow_one = fleet.figures("warm")
    assert slow_one.paused
    assert slow_one.requests == PAUSE_AFTER
    assert "a decision took 20 ms" in str(slow_one.last_error)


def test_a_switch_keeps_the_figures_of_those_that_stay_and_restarts_paused_ones() -> None:
    fleet = Fleet(policies=["warm", "lmetric", "linear"])
    defective(fleet)
    fleet.route(PAUSE_AFTER)
    fleet.shadows.work_off(LONG_S)
    fleet.route()
    fleet.shadows.switch(ShadowSettings(policies=["warm", "lmetric", "round_robin"]))  # type: ignore[arg-type]
    assert fleet.shadows.waiting == 0
    assert list(fleet.shadows.figures) == ["warm", "lmetric", "round_robin"]
    assert fleet.figures("warm").requests == PAUSE_AFTER
    assert (fleet.figures("lmetric").failures, fleet.figures("lmetric").paused) == (0, False)
    fleet.route()
    fleet.shadows.work_off(LONG_S)
    assert [fleet.figures(name).requests for name in fleet.shadows.figures] == [PAUSE_AFTER + 1, 1, 1]
    fleet.shadows.switch(ShadowSettings())
    assert fleet.routing.on_decided is None


def test_other_parameters_begin_new_figures() -> None:
    fleet = Fleet(policies=["warm"])
    fleet.route()
    fleet.shadows.work_off(LONG_S)
    again = {"name": "warm", "params": {"step_s": 0.0}}
    fleet.shadows.switch(ShadowSettings(policies=[again]))  # type: ignore[arg-type]
    assert fleet.figures("warm").as_dict()["requests"] == 0
    assert fleet.figures("warm").params == {"step_s": 0.0}


def test_the_newest_decisions_are_kept_newest_first() -> None:
    fleet = Fleet(policies=["round_robin"])
    fleet.route(KEPT + 5)
    fleet.shadows.work_off(LONG_S)
    latest = fleet.shadows.as_dict()["latest"]
    assert [row["request_id"] for row in latest] == [f"r{number}" for number in range(KEPT + 5, 5, -1)]
    assert set(latest[0]) == {"request_id", "unix_s", "live", "shadow"}
    assert set(latest[0]["shadow"]["round_robin"]) >= {"instance", "reason", "regret_s"}


def test_a_decision_that_cannot_be_read_is_skipped_and_the_next_one_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(policies=["lmetric"])
    fleet.route()
    with monkeypatch.context() as patch:
        patch.setattr(shadows, "LiveDecision", lambda *_: 1 // 0)
        fleet.shadows.work_off(LONG_S)
    fleet.route()
    fleet.shadows.work_off(LONG_S)
    assert (fleet.shadows.skipped, fleet.figures("lmetric").requests, fleet.shadows.waiting) == (1, 1, 0)
    assert [message for message in caplog.messages if "ZeroDivisionError" in message]


async def test_a_queue_that_is_half_full_is_worked_off_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "BATCH_S", LONG_S)
    fleet = Fleet(policies=["warm"], queue=8)
    task = asyncio.create_task(fleet.shadows.run())
    try:
        for goal in (5, 10):
            fleet.route(4)
            for _ in range(3):  # turns of the event loop
                await asyncio.sleep(0)
            assert fleet.shadows.waiting == 4
            fleet.route()
            for _ in range(1_000):
                if fleet.shadows.requests == goal and not fleet.shadows.waiting:
                    break
                await asyncio.sleep(0.005)
            assert (fleet.shadows.requests, fleet.shadows.skipped) == (goal, 0)
    finally:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_task_works_off_what_arrives_and_ends_when_cancelled() -> None:
    fleet = Fleet(policies=["warm"])
    task = asyncio.create_task(fleet.shadows.run())
    try:
        for goal in (3, 6):
            fleet.route(3)
            for _ in range(1_000):
                if fleet.shadows.requests == goal and not fleet.shadows.waiting:
                    break
                await asyncio.sleep(0.005)
            assert fleet.shadows.requests == goal
    finally:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
