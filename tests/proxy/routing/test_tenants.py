"""Tenants in the queue for room and in the line of held requests, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from policies.row import Row
from policies.types import NO_TENANT, RequestView, Tenant
from proxy.fleet.instances import Instances
from proxy.routing.admission import Admission
from proxy.routing.holding import HoldingLine
from proxy.routing.refusals import QueueError
from proxy.routing.router import Router
from proxy.settings import AdmissionSettings, HealthSettings, LimitSettings, load_settings
from tests.proxy.routing.test_admission import fleet_of, turns
from tests.proxy.routing.test_holding import until

HOG, POLITE = Tenant("hog"), Tenant("polite")


class Place:
    """Admission with a line of held requests over one instance, and its clients."""

    def __init__(self, *, sessions: int | None = None, **limits: Any) -> None:
        self.router = Router(load_settings(None, instances=fleet_of(1), policy={"name": "least_loaded"}))
        self.instances = Instances(fleet_of(1), HealthSettings(trial_requests=1))
        for instance in self.instances:
            self.instances.probed(instance)
        self.shares = self.router.routing.gate.shares
        self.admission = Admission(
            LimitSettings(**limits), self.instances, self.router, self.router.state.ledger, self.shares
        )
        self.holding = HoldingLine(AdmissionSettings(), self.router, self.instances, self.admission)
        if sessions is not None:
            self.holding.switch("session_cap", {"sessions": sessions, "keep_s": 0.0}, None)
        self.order: list[Tenant] = []
        self.errors: dict[int, Exception] = {}
        self._running: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    def ask(self, tenant: Tenant, tokens: int) -> None:
        self._tasks.append(asyncio.create_task(self._serve(tenant, tokens, len(self._tasks))))

    async def end_one(self) -> None:
        """End the request that runs for the longest time; returns when another one has taken its place."""
        running = len(self._running)
        self._running.pop(0).set()
        await turns(6)
        # The line of held requests is not looked at more often than its looks' cost permits.
        await until(lambda: len(self._running) >= running or not (self.admission.waiting or len(self.holding)))

    async def end_all(self) -> None:
        while self._running:
            await self.end_one()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.holding.close()

    def is_empty(self) -> bool:
        shares = self.shares
        waiting = (self.admission.in_flight, self.admission.waiting, len(self.holding))
        return waiting == (0, 0, 0) and not (shares.waiting or shares.in_flight_tokens or shares._accounts)

    async def _serve(self, tenant: Tenant, tokens: int, number: int) -> None:
        request = RequestView(f"r{number}", tokens, tenant=tenant)
        seat = self.admission.seat()
        ended = asyncio.Event()
        try:
            held = self.holding.enter(request, seat, Row(request.request_id, "/v1/completions", 0.0))
            if held is not None:
                await held
            routed = seat.route(request, frozenset()) or await seat.wait()
            self.order.append(tenant)
            self._running.append(ended)
            try:
                await ended.wait()
            finally:
                if ended in self._running:
                    self._running.remove(ended)
                routed.commitment.release()
        except QueueError as error:
            self.errors[number] = error
        finally:
            seat.close()


@asynccontextmanager
async def place(**options: Any) -> AsyncIterator[Place]:
    made = Place(**options)
    try:
        yield made
    finally:
        await made.close()
    assert made.is_empty()


async def test_a_polite_tenant_is_next_behind_hundreds_of_long_prompts() -> None:
    async with place(max_in_flight=2) as fleet:
        for _ in range(300):
            fleet.ask(HOG, 50_000)
        await turns()
        for _ in range(10):
            fleet.ask(POLITE, 1_000)
        await turns()
        assert fleet.order == [HOG, HOG]
        for _ in range(10):
            await fleet.end_one()
        assert fleet.order[2:12] == [POLITE] * 10


async def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    async with place(max_in_flight=1) as fleet:
        sizes = [9_000, 100, 50_000, 7]
        for tokens in sizes:
            fleet.ask(NO_TENANT, tokens)
        await turns()
        await fleet.end_all()
        assert fleet.order == [NO_TENANT] * 4
        assert not fleet.errors


async def test_a_full_queue_refuses_the_tenant_that_uses_most_of_it() -> None:
    async with place(max_in_flight=1, queue_size=10) as fleet:
        for _ in range(12):
            fleet.ask(HOG, 1_000)
        await turns()
        assert set(fleet.errors) == {11}  # the queue is its own
        for _ in range(4):
            fleet.ask(POLITE, 1_000)
        await turns()
        assert fleet.admission.waiting == 10
        assert set(fleet.errors) == {11, 10, 9, 8, 7}  # the hog's last ones made place
        refused = fleet.errors[7]
        assert isinstance(refused, QueueError)
        assert (refused.status, refused.code) == (429, "queue_full")
        assert fleet.admission.refused_full == 5
        await fleet.end_all()
        assert fleet.order.count(POLITE) == 4
        assert not fleet.admission._waiting


async def test_the_operators_priority_goes_first_in_both_lines() -> None:
    urgent = Tenant("urgent", priority=1)
    for options in ({"max_in_flight": 1}, {"sessions": 1}):
        async with place(**options) as fleet:
            for tenant in (HOG, HOG, HOG, urgent, urgent):
                fleet.ask(tenant, 1_000)
            await turns()
            await fleet.end_all()
            assert fleet.order == [HOG, urgent, urgent, HOG, HOG]


async def test_held_tenants_take_turns_by_tokens() -> None:
    async with place(sessions=1) as fleet:
        for _ in range(50):
            fleet.ask(HOG, 1_000)
        await turns()
        fleet.ask(POLITE, 30_000)
        await turns()
        line = fleet.holding.as_dict()["line"]
        shown = next(each for each in line if each["tenant"] == "polite")
        assert shown["sentence"].endswith("ninth in line, first of tenant polite")
        for _ in range(12):
            await fleet.end_one()
        # Shortest first would send it after all others.
        assert fleet.order.index(POLITE) in range(2, 11)


async def test_prompt_tokens_that_are_cached_do_not_count() -> None:
    async with place(max_in_flight=1) as fleet:
        fleet.ask(HOG, 10_000)
        await turns()
        assert fleet.shares.in_flight_tokens == {"hog": 10_000}


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "end", "leave"]), st.integers(0, 3), st.integers(1, 60_000)), max_size=40
)
TENANTS = (HOG, POLITE, Tenant("heavy", 5.0), Tenant("urgent", priority=3))


@pytest.mark.parametrize("options", [{"max_in_flight": 2, "queue_size": 5}, {"sessions": 2}])
@given(actions=ACTIONS)
@hypothesis_settings(max_examples=25, deadline=None)
def test_nothing_is_left_behind(options: dict[str, Any], actions: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        async with place(**options) as fleet:
            for what, number, tokens in actions:
                if what == "ask":
                    fleet.ask(TENANTS[number], tokens)
                elif what == "end" and fleet._running:
                    fleet._running.pop(0).set()
                elif what == "leave" and fleet._tasks:
                    fleet._tasks[tokens % len(fleet._tasks)].cancel()
                await turns(1 + number)
                assert fleet.admission.waiting <= 5
                assert sum(fleet.shares.waiting.values()) == fleet.admission.waiting + len(fleet.router.routing.gate)
            await turns(12)
            await fleet.end_all()

    asyncio.run(run())
