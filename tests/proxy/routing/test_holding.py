"""The line of held requests with any order of arrivals, ends, departures and switches, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from policies.row import Row
from policies.types import RequestView
from proxy.fleet.instances import Instances
from proxy.fleet.models import ModelList
from proxy.routing import holding as holding_module
from proxy.routing.admission import Admission
from proxy.routing.holding import HoldEnd, HoldingLine
from proxy.routing.router import Router
from proxy.settings import AdmissionSettings, HealthSettings, LimitSettings, load_settings
from tests.proxy.routing.test_admission import fleet_of, turns


@cache
def router() -> Router:
    """One router for all lines: every test leaves its ledger and accounts empty."""
    return Router(load_settings(None, instances=fleet_of(2), policy={"name": "least_loaded"}))


class Line:
    """A line over a real router and a fleet that is marked healthy."""

    def __init__(self, sessions: int = 1, limits: dict[str, Any] | None = None, **bounds: Any) -> None:
        self.router = router()
        self.state = self.router.state
        assert not any(self.state.ledger.totals().values())
        self.instances = Instances(fleet_of(2), HealthSettings(trial_requests=1))
        for instance in self.instances:
            self.instances.probed(instance)
        settings = AdmissionSettings(**bounds)
        self.admission = Admission(LimitSettings(**(limits or {})), self.instances, self.router, self.state.ledger)
        self.holding = HoldingLine(settings, self.router, self.instances, self.admission)
        self.ends: list[HoldEnd] = []
        self.holding.on_ended = lambda end, _: self.ends.append(end)
        self.cap(sessions, settings.max_hold_s)

    def cap(self, sessions: int, max_hold_s: float | None = None) -> None:
        self.holding.switch("session_cap", {"sessions": sessions, "keep_s": 0.0}, max_hold_s)

    def start(self, number: int, session: str | None = None, model: str | None = None) -> Client:
        return Client(self, number, session, model)

    def is_empty(self) -> bool:
        gate, accounts = self.router.routing.gate, self.state.accounts
        return (
            not len(self.holding)
            and not len(gate)
            and not any(self.state.ledger.totals().values())
            and (accounts.active_sessions, accounts.active_tokens) == (0, 0)
            and self.holding._timer is None
            and self.admission.in_flight == self.admission.waiting == 0
        )


class Client:
    """One request: is held or not, waits for its place, then keeps it until ``release``."""

    def __init__(self, line: Line, number: int, session: str | None, model: str | None) -> None:
        self._line = line
        self._model = model
        self.row = Row(f"r{number}", "/v1/completions", 0.0)
        hashes = tuple(range(number * 10 + 1, number * 10 + 7))
        self._request = RequestView(f"r{number}", 100, hashes, session_id=session, model=model)
        self._released = asyncio.Event()
        self.running = False
        self.task = asyncio.create_task(self._run())

    def release(self) -> None:
        self._released.set()

    async def _run(self) -> None:
        seat = self._line.admission.seat(self._model)
        try:
            held = self._line.holding.enter(self._request, seat, self.row)
            if held is not None:
                await held
            routed = seat.route(self._request, frozenset()) or await seat.wait()
            self.running = True
            try:
                await self._released.wait()
            finally:
                self.running = False
                routed.commitment.release()
        finally:
            seat.close()


async def end(*clients: Client) -> None:
    for client in clients:
        client.task.cancel()
    await asyncio.gather(*(client.task for client in clients), return_exceptions=True)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("condition did not come true in 20 s")


ACTIONS = st.lists(
    st.one_of(
        st.just(("arrive", 0)),
        st.just(("arrive", 0)),
        st.tuples(st.sampled_from(["arrive", "release", "leave", "release_and_leave"]), st.integers(0, 40)),
        st.tuples(st.sampled_from(["down", "up"]), st.integers(0, 1)),
        st.tuples(st.just("cap"), st.integers(1, 4)),
        st.just(("never_hold", 0)),
        st.just(("look", 0)),
        st.just(("turn", 0)),
    ),
    max_size=60,
)


@given(actions=ACTIONS, places=st.one_of(st.none(), st.integers(1, 3)), max_held=st.integers(0, 6))
@hypothesis_settings(max_examples=70, deadline=None)
def test_under_any_events_the_bound_holds_and_nothing_is_left(
    actions: list[tuple[str, int]], places: int | None, max_held: int
) -> None:
    asyncio.run(_run_actions(actions, places, max_held))


async def _run_actions(actions: list[tuple[str, int]], places: int | None, max_held: int) -> None:
    line = Line(limits={"max_in_flight": places}, max_held=max_held)
    clients: list[Client] = []
    for what, number in actions:
        open_ones = [client for client in clients if not client.task.done()]
        chosen = open_ones[number % len(open_ones)] if open_ones else None
        if what == "arrive":
            clients.append(line.start(len(clients), f"s{number}" if number else None))
        elif what in {"cap", "never_hold"}:
            line.cap(number) if what == "cap" else line.holding.switch("never_hold", {}, None)
        elif what == "down":
            line.instances.probe_failed(f"i{number}", "gone", refused=True)
        elif what == "up":
            line.instances.probed(f"i{number}")
        elif what == "look":
            line.holding._rests_until_s = 0.0
            line.holding.wake()
        elif what == "turn":
            await turns()
        elif chosen is not None:
            if "release" in what:
                chosen.release()
            if "leave" in what:
                chosen.task.cancel()
        assert len(line.router.routing.gate) <= max_held
    for name in ("i0", "i1"):
        line.instances.probed(name)
    line.holding.switch("never_hold", {}, None)
    for client in clients:
        client.release()
    for _ in range(200):  # a look leaves the rest of a long line to a later turn
        await asyncio.sleep(0)
        line.holding._rests_until_s = 0.0
        line.holding.wake()
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.task for client in clients), return_exceptions=True)
    assert line.is_empty()
    sent = [client for client in clients if not client.task.cancelled() and client.task.exception() is None]
    assert all(client.row.admission for client in sent)
    line.holding.close()


async def test_each_request_that_is_sent_takes_room_before_the_next_is_judged() -> None:
    line = Line(sessions=1)
    first, *others = (line.start(number, f"s{number}") for number in range(6))
    await turns()
    assert (first.running, len(line.holding)) == (True, 5)
    first.release()
    await first.task
    await turns()
    assert sum(client.running for client in others) == 1
    assert len(line.holding) == 4
    await end(*others)
    assert line.is_empty()


async def test_while_requests_are_queued_nobody_is_sent_into_the_queue() -> None:
    line = Line(sessions=1, limits={"max_in_flight": 1})
    clients = [line.start(number, f"s{number}") for number in range(6)]
    await turns()
    line.holding.switch("never_hold", {}, None)
    await turns()
    assert (line.admission.in_flight, line.admission.waiting, len(line.holding)) == (1, 1, 4)
    for client in clients:
        client.release()
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.task for client in clients))
    assert line.is_empty()


async def test_a_queue_for_one_model_does_not_stop_the_line_of_another() -> None:
    line = Line(sessions=1, limits={"max_in_flight_per_instance": 1})
    for name, model in (("i0", "a"), ("i1", "b")):  # one part of the fleet, for the model of both
        line.instances.listed(name, ModelList(names=frozenset({model, "both"})))
    first = line.start(0, "s0", "a")
    await turns()
    held = [line.start(number, f"s{number}", "a") for number in (1, 2, 3)]
    await turns()
    line.holding.switch("session_cap", {"sessions": 9, "keep_s": 0.0}, None)
    await turns()
    assert (first.running, line.admission.waiting, len(line.holding)) == (True, 1, 2)
    line.cap(1)
    other = line.start(4, "s4", "b")
    await turns()
    assert len(line.holding) == 3
    line.cap(9)
    await turns()
    assert (other.running, len(line.holding)) == (True, 2)
    await end(first, other, *held)
    assert line.is_empty()


async def test_a_request_whose_model_has_no_healthy_instance_stays_in_line() -> None:
    line = Line(sessions=1)
    for name, model in (("i0", "a"), ("i1", "b")):  # one part of the fleet, for the model of both
        line.instances.listed(name, ModelList(names=frozenset({model, "both"})))
    first = line.start(0, "s0", "a")
    await turns()
    held = line.start(1, "s1", "b")
    await turns()
    line.instances.probe_failed("i1", "gone", refused=True)
    line.cap(9)
    await turns()
    assert (first.running, held.running, len(line.holding)) == (True, False, 1)
    line.instances.probed("i1")
    await until(lambda: held.running)
    await end(first, held)
    assert line.is_empty()


async def test_requests_for_one_model_are_not_held_for_those_for_another() -> None:
    line = Line(sessions=1)
    for name, model in (("i0", "a"), ("i1", "b")):
        line.instances.listed(name, ModelList(names=frozenset({model})))
    first, held, other = line.start(0, "s0", "a"), line.start(1, "s1", "a"), line.start(2, "s2", "b")
    await turns()
    assert (first.running, held.running, other.running) == (True, False, True)
    shown = line.holding.as_dict()["line"]
    assert [(each["request_id"], each["behind"]) for each in shown] == [("r1", 0)]
    second = line.start(3, "s3", "b")
    await turns()
    other.release()
    await until(lambda: second.running)
    assert not held.running, "an end for the other model makes no room"
    # An instance that serves both models joins the parts: the line is judged as a whole from now on.
    line.instances.listed("i0", ModelList(names=frozenset({"a", "b"})))
    first.release()
    await until(lambda: not first.running)
    await turns()
    assert (held.running, second.running) == (False, True)
    second.release()
    await until(lambda: held.running)
    await end(first, held, other, second)
    assert line.is_empty()


async def test_a_restart_in_a_fleet_of_one_model_divides_nothing() -> None:
    line = Line(sessions=1)
    for name in ("i0", "i1"):
        line.instances.listed(name, ModelList(names=frozenset({"m"})))
    line.instances.restarted("i1")
    first, held = line.start(0, "s0", "m"), line.start(1, "s1", "m")
    await turns()
    assert (first.running, held.running) == (True, False)
    assert line.holding.as_dict()["parts"] == []
    await end(first, held)
    assert line.is_empty()


async def test_an_instance_of_unknown_models_keeps_the_fleet_whole() -> None:
    line = Line(sessions=1)
    line.instances.listed("i0", ModelList(names=frozenset({"a"})))
    first, held = line.start(0, "s0", "b"), line.start(1, "s1", "a")
    await turns()
    assert (first.running, held.running) == (True, False)
    line.instances.listed("i1", ModelList(names=frozenset({"b"})))
    line.holding.wake()
    await until(lambda: held.running)
    await end(first, held)
    assert line.is_empty()


async def test_at_the_bound_requests_go_to_the_queue_without_room() -> None:
    line = Line(sessions=1, limits={"max_in_flight": 1})
    clients = [line.start(number, f"s{number}") for number in range(4)]
    await turns()
    assert len(line.holding) == 3
    line.cap(1, max_hold_s=0.001)
    await until(lambda: not len(line.holding))
    await turns()
    assert (line.admission.waiting, len(line.holding), line.ends) == (3, 0, [HoldEnd.AT_BOUND] * 3)
    await end(*clients)
    assert line.is_empty()


async def test_a_switch_sends_a_long_line_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding_module, "_AT_ONCE_S", 0.0)
    line = Line(sessions=1)
    clients = [line.start(number, f"s{number}") for number in range(30)]
    await turns()
    line.holding.switch("never_hold", {}, None)
    await turns(3)
    assert 0 < len(line.holding) < 29
    await until(lambda: not len(line.holding))
    await end(*clients)
    assert line.is_empty()


async def test_the_timer_runs_only_while_something_is_held() -> None:
    line = Line(sessions=1)
    first = line.start(0, "a")
    await turns()
    assert line.holding._timer is None
    other = line.start(1, "b")
    await turns()
    assert line.holding._timer is not None
    await end(other)
    assert line.holding._timer is None
    await end(first)
    assert line.ends == [HoldEnd.LEFT]
    assert line.is_empty()


async def test_the_timer_finds_room_that_no_event_announces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding_module, "LOOK_S", 0.01)
    line = Line(sessions=1)
    clients = [line.start(number, f"s{number}") for number in range(2)]
    await turns()
    line.router.switch_admission("session_cap", {"sessions": 2, "keep_s": 0.0}, None)  # without waking the line
    await until(lambda: clients[1].running)
    await end(*clients)
    assert line.is_empty()


async def test_what_is_still_held_when_it_is_closed_is_cancelled() -> None:
    line = Line(sessions=1)
    clients = [line.start(number, f"s{number}") for number in range(3)]
    await turns()
    line.holding.close()
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.task for client in clients[1:]), return_exceptions=True)
    assert all(client.task.cancelled() for client in clients[1:])
    await end(clients[0])
    assert line.is_empty()


async def test_a_policy_that_fails_while_the_line_is_sent_fails_that_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = Line(sessions=1)
    clients = [line.start(number, f"s{number}") for number in range(3)]
    await turns()
    real = line.router.route

    def failing(request: RequestView, available: set[str], room_on: frozenset[str]) -> Any:
        if request.request_id == "r1":
            raise KeyError("a defect")
        return real(request, available)

    monkeypatch.setattr(line.router, "route", failing)
    clients[0].release()
    await until(lambda: clients[2].running)  # a look that takes long leaves the rest to a later one
    assert isinstance(clients[1].task.exception(), KeyError)
    assert line.ends == [HoldEnd.FAILED, HoldEnd.SENT]
    await end(*clients)
    assert line.is_empty()
