"""Admission with any order of arrivals, ends and departures: without a server, then through the proxy."""

from __future__ import annotations

import asyncio
from functools import cache
from itertools import count
from typing import Any

import httpx
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from policies.admission.base import NO_INSTANCES
from policies.session import Routed
from policies.types import NoCandidateError, RequestView
from proxy.fleet.instances import Instances
from proxy.routing.admission import Admission, Seat
from proxy.routing.refusals import QueueError
from proxy.routing.router import Router
from proxy.settings import HealthSettings, InstanceSettings, LimitSettings, load_settings
from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.stub_engine import StubEngine

OK = {"model": "stub", "prompt": list(range(200)), "max_tokens": 4}
FRESH = count(100_000, 6)
"""Numbers of blocks that nobody has."""


def fleet_of(count: int) -> tuple[InstanceSettings, ...]:
    return tuple(InstanceSettings(name=f"i{number}", url=f"http://127.0.0.1:{number + 1}") for number in range(count))


@cache
def router_of(count: int) -> Router:
    """One router for all gates of a size: every test leaves its ledger empty."""
    return Router(load_settings(None, instances=fleet_of(count), policy={"name": "least_loaded"}))


class Gate:
    """Admission over a real router and a fleet that is marked healthy."""

    def __init__(self, count: int = 2, **limits: Any) -> None:
        self.limits = LimitSettings(**limits)
        self.router = router_of(count)
        self.ledger = self.router.state.ledger
        assert not any(self.ledger.totals().values())
        self.instances = Instances(fleet_of(count), HealthSettings(trial_requests=1))
        self.admission = Admission(self.limits, self.instances, self, self.ledger)
        self.order: list[int] = []
        for instance in self.instances:
            self.instances.probed(instance)

    def route(self, request: RequestView, available: set[str], room_on: frozenset[str] = NO_INSTANCES) -> Routed:
        """Route with the real router and record the order in which places are given."""
        routed = self.router.route(request, available, room_on)
        if request.request_id[1:].isdigit():
            self.order.append(int(request.request_id[1:]))
        return routed

    def loads(self) -> list[int]:
        return [self.ledger.requests(instance.name) for instance in self.instances]

    def has_room(self) -> bool:
        limits = self.limits
        if limits.max_in_flight is not None and self.admission.in_flight >= limits.max_in_flight:
            return False
        cap = limits.max_in_flight_per_instance
        return any(cap is None or self.ledger.requests(name) < cap for name in self.instances.candidates())

    def start(self, number: int, tried: frozenset[str] = frozenset()) -> Client:
        return Client(self, number, tried)


class Client:
    """One request: waits for its place, then holds it until ``release``."""

    def __init__(self, gate: Gate, number: int, tried: frozenset[str]) -> None:
        self._gate = gate
        self.number = number
        self._released = asyncio.Event()
        self._tried = tried
        self.seat: Seat = gate.admission.seat()
        self.on: str | None = None
        self.task = asyncio.create_task(self._run())

    def release(self) -> None:
        self._released.set()

    async def _run(self) -> None:
        try:
            hashes = tuple(range(self.number * 10 + 1, self.number * 10 + 7))
            request = RequestView(f"r{self.number}", 100, hashes)
            routed = self.seat.route(request, self._tried) or await self.seat.wait()
            self.on = routed.decision.decode_on
            try:
                await self._released.wait()
            finally:
                routed.commitment.release()
        finally:
            self.seat.close()


async def turns(count: int = 6) -> None:
    """Let every runnable task run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def end(*clients: Client) -> None:
    for client in clients:
        client.task.cancel()
    await asyncio.gather(*(client.task for client in clients), return_exceptions=True)


@pytest.mark.parametrize(
    ("room_on", "down", "expected"),
    [
        ({"i2"}, (), {"i2"}),
        ({"i1", "i2"}, ("i1",), {"i2"}),
        ({"i1"}, ("i1",), {"i0", "i2"}),
        (set(), (), {"i0", "i1", "i2"}),
    ],
)
async def test_the_first_attempt_goes_where_the_rule_found_room_if_one_of_these_is_healthy(
    room_on: set[str], down: tuple[str, ...], expected: set[str]
) -> None:
    gate = Gate(3)
    for name in down:
        gate.instances.probe_failed(name, "down", refused=True)
    seat = gate.admission.seat()
    seat.room_on = frozenset(room_on)
    first_block = next(FRESH)  # blocks of no other test: an instance that has them may be chosen without room
    request = RequestView("r", 100, range(first_block, first_block + 6))
    first = seat.route(request, frozenset())
    assert first is not None
    first.commitment.release()
    again = seat.route(request, frozenset({first.decision.decode_on}))
    assert again is not None
    again.commitment.release()
    seat.close()
    assert first.decision.decode_on in expected
    assert seat.room_on == NO_INSTANCES
    assert again.decision.decode_on not in {first.decision.decode_on, *down}


async def test_a_request_that_waits_in_the_queue_may_be_sent_to_any_instance_afterwards() -> None:
    gate = Gate(2, max_in_flight=1)
    first = gate.start(0)
    await turns()
    second = gate.start(1)
    second.seat.room_on = frozenset({"i1"})
    await turns()
    assert (gate.admission.waiting, second.seat.room_on) == (1, NO_INSTANCES)
    await end(first)
    await turns()
    assert second.on in {"i0", "i1"}
    await end(second)


ACTIONS = st.lists(
    st.one_of(
        st.just(("arrive", 0)),
        st.just(("arrive", 0)),
        st.just(("arrive", 0)),
        st.tuples(st.sampled_from(["release", "leave", "release_and_arrive"]), st.integers(0, 50)),
        st.tuples(st.sampled_from(["down", "up"]), st.integers(0, 2)),
        st.just(("turn", 0)),
    ),
    max_size=80,
)


@given(
    actions=ACTIONS,
    cap=st.one_of(st.none(), st.integers(1, 3)),
    total=st.one_of(st.none(), st.integers(1, 5)),
    queue_size=st.integers(0, 8),
)
@hypothesis_settings(max_examples=120, deadline=None)
def test_under_any_events_caps_hold_order_is_kept_and_no_request_waits_beside_room(
    actions: list[tuple[str, int]], cap: int | None, total: int | None, queue_size: int
) -> None:
    asyncio.run(_run_actions(actions, cap, total, queue_size))


async def _run_actions(actions: list[tuple[str, int]], cap: int | None, total: int | None, queue_size: int) -> None:
    gate = Gate(3, max_in_flight_per_instance=cap, max_in_flight=total, queue_size=queue_size)
    clients: list[Client] = []

    def check() -> None:
        assert cap is None or max(gate.loads()) <= cap
        assert total is None or gate.admission.in_flight <= total
        assert len(gate.admission._queue) <= queue_size

    for number, (action, which) in enumerate(actions):
        served = [client for client in clients if client.on is not None and not client.task.done()]
        open_ones = [client for client in clients if not client.task.done()]
        if action == "arrive":
            clients.append(gate.start(number))
        elif action.startswith("release") and served:
            served[which % len(served)].release()
            if action == "release_and_arrive":  # in the very turn in which a place becomes free
                clients.append(gate.start(number))
        elif action == "leave" and open_ones:
            open_ones[which % len(open_ones)].task.cancel()
        elif action == "down":
            gate.instances.probe_failed(f"i{which}", "down", refused=True)
        elif action == "up":
            gate.instances.probed(f"i{which}")
        elif action == "turn":
            await asyncio.sleep(0)
            check()
            continue
        if which % 2:  # often several things happen in one turn
            await turns()
            check()
            assert not (gate.admission.waiting and gate.has_room()), "somebody waits although there is room"
    await turns()
    check()
    assert not (gate.admission.waiting and gate.has_room())
    assert gate.order == sorted(gate.order), "served in the order of arrival"
    served = [client for client in clients if client.on is not None and not client.task.done()]
    assert gate.admission.in_flight == len(served)
    for client in clients:
        if client.task.done() and not client.task.cancelled() and (error := client.task.exception()):
            assert isinstance(error, NoCandidateError) or (isinstance(error, QueueError) and error.status == 429)
    await end(*clients)
    assert (gate.admission.in_flight, gate.admission.waiting, sum(gate.loads())) == (0, 0, 0)
    assert not any(gate.ledger.totals().values())


async def test_one_release_wakes_exactly_as_many_as_fit() -> None:
    gate = Gate(2, max_in_flight_per_instance=2)
    clients = [gate.start(number) for number in range(10)]
    await turns()
    woken = 0

    def count(_: float) -> None:
        nonlocal woken
        woken += 1

    gate.admission.on_waited = count
    for client in clients[:3]:
        client.release()
    await turns()
    assert gate.order == [0, 1, 2, 3, 4, 5, 6]
    assert (woken, gate.admission.waiting, gate.loads()) == (3, 3, [2, 2])
    await end(*clients)


async def test_a_newcomer_in_the_turn_of_a_release_does_not_overtake() -> None:
    gate = Gate(1, max_in_flight_per_instance=1)
    first, second = gate.start(0), gate.start(1)
    await turns()
    routed = first.seat.route(RequestView("again", 100), frozenset())
    assert routed is None, "the cap holds for a further attempt, too"
    first.release()
    await asyncio.sleep(0)  # the place is free, the second not woken yet
    assert gate.loads() == [0]
    seat = gate.admission.seat()
    assert seat.route(RequestView("newcomer", 100), frozenset()) is None
    await turns()
    assert gate.order == [0, 1]
    await end(first, second)


async def test_a_waiter_cancelled_in_the_turn_of_its_grant_gives_its_place_to_the_next() -> None:
    gate = Gate(1, max_in_flight_per_instance=1)
    clients = [gate.start(number) for number in range(901, 904)]
    await turns()
    blocks = gate.router.state.index.blocks("i0")
    clients[0].release()
    await asyncio.sleep(0)
    assert gate.loads() == [0], "free, and no waiter has been woken"
    gate.admission._move_up()
    assert gate.loads() == [1], "granted"
    assert gate.router.state.index.blocks("i0") == blocks + 6
    clients[1].task.cancel()
    await turns()
    assert clients[1].on is None
    assert (clients[2].on, gate.loads(), gate.admission.in_flight) == ("i0", [1], 1)
    assert gate.router.state.index.blocks("i0") == blocks + 6, "blocks of an unsent request are retracted"
    await end(*clients)


async def test_a_waiter_cancelled_just_before_its_grant_is_passed_over() -> None:
    gate = Gate(1, max_in_flight_per_instance=1)
    clients = [gate.start(number) for number in range(3)]
    await turns()
    clients[0].release()
    await asyncio.sleep(0)
    assert gate.loads() == [0], "free, and no waiter has been woken"
    clients[1].task.cancel()
    gate.admission._move_up()
    await turns()
    assert (gate.order, gate.loads()) == ([0, 2], [1])
    await end(*clients)


async def test_a_defect_of_a_policy_is_the_failure_of_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(1, max_in_flight_per_instance=1)
    clients = [gate.start(number) for number in range(3)]
    await turns()
    route = gate.router.route

    def broken(request: RequestView, available: set[str], room_on: frozenset[str]) -> Routed:
        if request.request_id == "r1":
            raise ZeroDivisionError
        return route(request, available, room_on)

    monkeypatch.setattr(gate.router, "route", broken)
    clients[0].release()
    await turns()
    assert isinstance(clients[1].task.exception(), ZeroDivisionError)
    assert (clients[2].on, gate.loads()) == ("i0", [1])
    await end(*clients)


async def test_a_retry_precedes_the_queue_and_does_not_block_excluded_instances() -> None:
    gate = Gate(2, max_in_flight_per_instance=1)
    again = gate.admission.seat()
    first = again.route(RequestView("again", 100), frozenset())
    assert first is not None
    failed_on = first.decision.decode_on
    clients = [gate.start(number) for number in range(3)]
    await turns()
    assert gate.order == [0]
    # Its attempt has failed: the lease ends, the seat stays, and the other instance is full.
    first.commitment.release()
    assert again.route(RequestView("again", 100), {failed_on}) is None
    waiting = asyncio.create_task(again.wait())
    await turns()
    assert gate.order == [0, 1], "what it may not use is not kept from others"
    clients[0].release()
    routed = await waiting
    assert routed.decision.decode_on != failed_on
    assert gate.order == [0, 1]
    routed.commitment.release()
    await turns()
    assert gate.order == [0, 1, 2]
    again.close()
    await end(*clients)


async def test_a_newcomer_in_the_turn_of_a_release_does_not_overtake_a_further_attempt() -> None:
    gate = Gate(2, max_in_flight_per_instance=1)
    again = gate.admission.seat()
    first = again.route(RequestView("again", 100), frozenset())
    assert first is not None
    other = gate.start(0)
    await turns()
    first.commitment.release()
    assert again.route(RequestView("again", 100), {first.decision.decode_on}) is None
    waiting = asyncio.create_task(again.wait())
    instead = gate.start(1)
    await turns()
    assert gate.loads() == [1, 1]
    other.release()
    await asyncio.sleep(0)
    assert sum(gate.loads()) == 1, "free, and no waiter has been woken"
    newcomer = gate.admission.seat()
    assert newcomer.route(RequestView("newcomer", 100), frozenset()) is None
    routed = await waiting
    assert routed.decision.decode_on == other.on
    routed.commitment.release()
    again.close()
    newcomer.close()
    await end(other, instead)


async def test_a_request_that_ends_between_two_attempts_gives_its_place_in_the_fleet_on() -> None:
    gate = Gate(2, max_in_flight=1)
    between = gate.admission.seat()
    first = between.route(RequestView("between", 100), frozenset())
    assert first is not None
    first.commitment.release()
    waiting = gate.start(0)
    await turns()
    assert waiting.on is None, "it may still be tried again"
    between.close()
    await turns()
    assert waiting.on is not None
    await end(waiting)


async def test_a_further_attempt_that_finds_no_room_in_time_has_no_candidate() -> None:
    gate = Gate(2, max_in_flight_per_instance=1, queue_timeout_s=0.05)
    clients = [gate.start(number) for number in range(2)]
    await turns()
    on = clients[0].on
    assert on is not None
    assert clients[0].seat.route(RequestView("r0", 100), {on}) is None
    with pytest.raises(NoCandidateError):
        await clients[0].seat.wait()
    with pytest.raises(NoCandidateError):
        clients[0].seat.route(RequestView("r0", 100), {"i0", "i1"})
    await end(*clients)


async def test_without_a_healthy_instance_new_requests_fail_and_queued_ones_keep_waiting() -> None:
    gate = Gate(1, max_in_flight_per_instance=1)
    clients = [gate.start(number) for number in range(2)]
    await turns()
    gate.instances.probe_failed("i0", "gone", refused=True)
    clients[0].release()
    late = gate.start(2)
    await turns()
    assert isinstance(late.task.exception(), NoCandidateError)
    assert not clients[1].task.done()
    gate.instances.probed("i0")
    await turns()
    assert clients[1].on == "i0"
    await end(*clients)


async def test_an_instance_on_trial_gets_its_few_requests_and_the_rest_when_it_has_passed() -> None:
    gate = Gate(1)
    gate.instances.failed("i0", "refused", refused=True)
    gate.instances.probed("i0")
    clients = [gate.start(number) for number in range(5)]
    await turns()
    assert (gate.order, gate.admission.waiting) == ([0], 4)
    clients[0].release()  # without a result, as when its client leaves
    await turns()
    assert (gate.order, gate.admission.waiting) == ([0, 1], 3)
    gate.instances.succeeded("i0")
    await turns()
    assert (gate.order, gate.admission.waiting) == ([0, 1, 2, 3, 4], 0)
    await end(*clients)


async def test_draining_instances_get_no_requests_and_queued_ones_resume_after_the_drain() -> None:
    gate = Gate(1, max_in_flight_per_instance=1)
    clients = [gate.start(number) for number in range(2)]
    await turns()
    gate.instances.set_draining(gate.instances["i0"], True)
    clients[0].release()
    await turns()
    assert gate.order == [0]
    gate.instances.set_draining(gate.instances["i0"], False)
    await turns()
    assert gate.order == [0, 1]
    await end(*clients)


# Through the proxy


class Counting(StubEngine):
    """Records the maximum number of concurrent requests."""

    peak = 0
    let_go: asyncio.Event | None = None
    """No request is answered before it is set."""

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.peak = max(self.peak, self.running)
        if self.let_go is not None:
            await self.let_go.wait()
        return await super()._answer(request, body)


class Held(StubEngine):
    """Answers nothing until released."""

    let_go: asyncio.Event

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await self.let_go.wait()
        return await super()._answer(request, body)


def held() -> Held:
    engine = Held()
    engine.let_go = asyncio.Event()
    return engine


def ask(proxy: Running, number: int = 0, **body: Any) -> asyncio.Task[httpx.Response]:
    """A request in flight, with a prompt of its own."""
    prompt = list(range(number * 1000, number * 1000 + 200))
    headers = {"x-request-id": f"r{number}"}
    return asyncio.create_task(
        proxy.client.post("/v1/completions", json={**OK, "prompt": prompt, **body}, headers=headers)
    )


async def ask_in_order(proxy: Running, numbers: range, **body: Any) -> list[asyncio.Task[httpx.Response]]:
    """Requests sent one after the other, each after the previous one has arrived."""
    tasks = []
    for number in numbers:
        started = proxy.core.breakdown.started
        tasks.append(ask(proxy, number, **body))
        await proxy.until(lambda: proxy.core.breakdown.started > started)  # noqa: B023
        await asyncio.sleep(0.01)
    return tasks


@pytest.mark.parametrize("stream", [False, True])
async def test_caps_hold_under_fifty_requests_at_once_and_all_are_answered(
    start_proxy: StartProxy, stream: bool
) -> None:
    engines = [Counting(prefill_s=0.03) for _ in range(2)]
    proxy = await start_proxy(engines=list(engines), limits={"max_in_flight_per_instance": 3})
    engines[0].let_go = engines[1].let_go = let_go = asyncio.Event()
    tasks = [ask(proxy, number, stream=stream) for number in range(50)]
    await proxy.until(lambda: proxy.core.admission.waiting == 44)
    let_go.set()
    answers = await asyncio.gather(*tasks)
    assert {answer.status_code for answer in answers} == {200}
    assert [engine.peak for engine in engines] == [3, 3]
    assert sum(len(engine.seen) for engine in engines) == 50
    stats = await proxy.settled()
    assert ledger_is_zero(stats)
    assert (stats["admission"]["in_flight"], stats["admission"]["waiting"]) == (0, 0)
    rows = await proxy.rows()
    assert sum("queued" in row["stages_ms"] for row in rows) == 44
    assert all(
        row["stages_ms"]["queued"] < row["stages_ms"]["first_byte"] for row in rows if "queued" in row["stages_ms"]
    )
    metrics = (await proxy.client.get("/metrics")).text
    assert "warmroute_queue_wait_seconds_count 44.0" in metrics
    assert "warmroute_queue_requests 0.0" in metrics


async def test_the_cap_of_the_fleet_counts_requests_wherever_they_are(start_proxy: StartProxy) -> None:
    engines = [Counting(prefill_s=0.05) for _ in range(3)]
    proxy = await start_proxy(engines=list(engines), limits={"max_in_flight": 4}, policy={"name": "least_loaded"})
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, sum(engine.running for engine in engines))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    answers = await asyncio.gather(*(ask(proxy, number) for number in range(40)))
    watching.cancel()
    assert {answer.status_code for answer in answers} == {200}
    assert peak == 4


async def test_prefill_legs_count_on_the_instance_they_run_on(start_proxy: StartProxy) -> None:
    engines = [Counting(prefill_s=0.05) for _ in range(3)]
    proxy = await start_proxy(
        engines=list(engines),
        role="kv_both",
        offload={"planner": "threshold", "params": {"min_decode_requests": 0}},
        classes={"medium_tokens": 50, "heavy_tokens": 100},
        limits={"max_in_flight_per_instance": 2},
    )
    answers = await asyncio.gather(*(ask(proxy, number) for number in range(24)))
    assert {answer.status_code for answer in answers} == {200}
    offloaded = sum(row["prefill_instance"] is not None for row in await proxy.rows())
    assert offloaded >= 1
    assert max(engine.peak for engine in engines) == 2
    assert ledger_is_zero(await proxy.settled())


async def test_requests_are_served_in_the_order_of_their_arrival(start_proxy: StartProxy) -> None:
    engine = held()
    proxy = await start_proxy(engines=[engine], limits={"max_in_flight_per_instance": 1})
    tasks = await ask_in_order(proxy, range(12))
    engine.let_go.set()
    assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
    assert [headers["x-request-id"] for headers in engine.seen_headers] == [f"r{number}" for number in range(12)]


async def test_a_full_queue_answers_429_and_a_wait_too_long_503_both_saying_when_to_come_back(
    start_proxy: StartProxy,
) -> None:
    engine = StubEngine(prefill_s=30)
    limits = {"max_in_flight": 1, "queue_size": 2, "queue_timeout_s": 2.0}
    proxy = await start_proxy(engines=[engine], limits=limits)
    first, *waiting = await ask_in_order(proxy, range(3))
    await proxy.until(lambda: proxy.core.admission.waiting == 2)
    refused = await ask(proxy, 3)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "queue_full"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert int(refused.headers["retry-after"]) >= 1
    for answer in await asyncio.gather(*waiting):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "queue_timeout"
        assert "limits.queue_timeout_s" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
    assert proxy.core.admission.waiting == 0
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    stats = await proxy.settled()
    assert ledger_is_zero(stats)
    assert stats["requests"]["outcomes"] == {"queue_full": 1, "queue_timeout": 2, "client_gone": 1}
    assert len(engine.seen) == 1
    metrics = (await proxy.client.get("/metrics")).text
    assert 'warmroute_queue_refused_total{reason="queue_full"} 1.0' in metrics
    assert 'warmroute_queue_refused_total{reason="queue_timeout"} 2.0' in metrics


async def test_without_a_queue_a_request_without_room_is_rejected_at_once(start_proxy: StartProxy) -> None:
    engine = StubEngine(prefill_s=30)
    proxy = await start_proxy(engines=[engine], limits={"max_in_flight_per_instance": 1, "queue_size": 0})
    first = ask(proxy)
    await proxy.until(lambda: engine.running == 1)
    assert (await ask(proxy, 1)).status_code == 429
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await proxy.until(lambda: proxy.core.admission.in_flight == 0)
    engine.prefill_s = 0
    assert (await ask(proxy, 2)).status_code == 200


async def test_a_client_that_leaves_the_queue_leaves_nothing_and_the_next_moves_up(start_proxy: StartProxy) -> None:
    engine = held()
    proxy = await start_proxy(engines=[engine], limits={"max_in_flight_per_instance": 1})
    first, second, third = await ask_in_order(proxy, range(3))
    await proxy.until(lambda: proxy.core.admission.waiting == 2)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await proxy.until(lambda: proxy.core.admission.waiting == 1)
    assert not first.done(), "it was dropped at once, not when its turn came"
    engine.let_go.set()
    assert [answer.status_code for answer in await asyncio.gather(first, third)] == [200, 200]
    assert [headers["x-request-id"] for headers in engine.seen_headers] == ["r0", "r2"]
    stats = await proxy.settled()
    assert ledger_is_zero(stats)
    assert stats["admission"] == {
        "in_flight": 0,
        "waiting": 0,
        "queue_full": 0,
        "queue_timeout": 0,
        "left_the_queue": 1,
    }
    [row] = await proxy.rows(request_id="r1")
    assert (row["outcome"], row["instance"]) == ("client_gone", None)
    assert row["stages_ms"]["queued"] > 0


async def test_queued_requests_go_to_an_instance_that_comes_up_or_is_added(start_proxy: StartProxy) -> None:
    busy, down, new = StubEngine(prefill_s=30), StubEngine(mode="sick"), StubEngine()
    await new.start()
    proxy = await start_proxy(engines=[busy, down], limits={"max_in_flight_per_instance": 1})
    first = ask(proxy)
    await proxy.until(lambda: busy.running == 1)
    second = ask(proxy, 1)
    await proxy.until(lambda: proxy.core.admission.waiting == 1)
    down.mode = "ok"
    assert (await second).headers["x-warmroute-instance"] == "inst-1"
    down.prefill_s = 30
    third = ask(proxy, 2)
    await proxy.until(lambda: down.running == 1)
    fourth = ask(proxy, 3)
    await proxy.until(lambda: proxy.core.admission.waiting == 1)
    try:
        await proxy.operations.fleet.add(
            proxy.core.settings.instances[0].model_copy(update={"name": "new", "url": new.url})
        )
        assert (await fourth).headers["x-warmroute-instance"] == "new"
    finally:
        for task in (first, third):
            task.cancel()
        await asyncio.gather(first, third, return_exceptions=True)
        await new.stop()


async def test_without_limits_no_request_waits(start_proxy: StartProxy) -> None:
    engines = [held() for _ in range(2)]
    proxy = await start_proxy(engines=list(engines), policy={"name": "round_robin"})
    tasks = [ask(proxy, number) for number in range(40)]
    await proxy.until(lambda: sum(engine.running for engine in engines) == 40)
    for engine in engines:
        engine.let_go.set()
    assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
    assert not any("queued" in row["stages_ms"] for row in await proxy.rows())
