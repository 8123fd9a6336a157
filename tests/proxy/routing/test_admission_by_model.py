"""Admission of requests for several models: order per model, and no model that blocks another."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from policies.types import RequestView
from proxy.fleet.models import ModelList
from tests.proxy.routing.test_admission import Client, Gate, end, turns


def names(*models: str) -> ModelList:
    return ModelList(names=frozenset(models))


class ModelGate(Gate):
    """i0 serves a; i1 a and b; i2 b and its adapter c."""

    def __init__(self, **limits: int) -> None:
        super().__init__(3, **limits)
        for name, models in (("i0", "a"), ("i1", "ab"), ("i2", "bc")):
            self.instances.listed(name, names(*models))

    def ask(self, number: int, model: str) -> Client:
        client = self.start(number)
        client.seat.model = model
        return client

    def has_room_for(self, model: str) -> bool:
        limits = self.limits
        if limits.max_in_flight is not None and self.admission.in_flight >= limits.max_in_flight:
            return False
        cap = limits.max_in_flight_per_instance
        return any(cap is None or self.ledger.requests(name) < cap for name in self.instances.candidates(model))


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive", "release", "leave", "lose", "list"]), st.integers(0, 50)),
    max_size=50,
)


@given(actions=ACTIONS, total=st.one_of(st.none(), st.integers(1, 4)))
@hypothesis_settings(max_examples=60, deadline=None)
def test_order_is_kept_per_model_and_no_request_waits_beside_room(
    actions: list[tuple[str, int]], total: int | None
) -> None:
    asyncio.run(_run_actions(actions, total))


async def _run_actions(actions: list[tuple[str, int]], total: int | None) -> None:
    limits = {} if total is None else {"max_in_flight": total}
    gate = ModelGate(max_in_flight_per_instance=1, queue_size=8, **limits)
    clients: list[Client] = []
    for number, (action, which) in enumerate(actions):
        served = [client for client in clients if client.on is not None and not client.task.done()]
        open_ones = [client for client in clients if not client.task.done()]
        if action == "arrive":
            clients.append(gate.ask(number, "abc"[which % 3]))
        elif action == "release" and served:
            served[which % len(served)].release()
        elif action == "leave" and open_ones:
            open_ones[which % len(open_ones)].task.cancel()
        elif action == "lose":  # the list of an engine changes while requests wait
            gate.instances.lacks("i1", "b")
        elif action == "list":
            gate.instances.listed("i1", names("a", "b"))
        if which % 2:
            await turns()
            waiting = {seat.model for seat in gate.admission._queue}
            assert not [model for model in waiting if model and gate.has_room_for(model)], (
                "waits although there is room"
            )
    await turns()
    for model in "abc":
        of_model = [client.number for client in clients if client.seat.model == model]
        order = [number for number in gate.order if number in of_model]
        assert order == sorted(order), "served in the order of arrival"
    for client in clients:
        if client.on is not None and client.seat.model == "c":
            assert client.on == "i2"
    await end(*clients)
    assert (gate.admission.in_flight, gate.admission.waiting, sum(gate.loads())) == (0, 0, 0)
    assert not gate.admission._waiting


async def test_a_request_for_a_full_model_is_overtaken_only_by_those_for_other_engines() -> None:
    gate = ModelGate(max_in_flight_per_instance=1)
    on_c, waits_c = gate.ask(0, "c"), gate.ask(1, "c")
    await turns()
    assert (on_c.on, waits_c.on) == ("i2", None)
    first_a, second_a, waits_a = gate.ask(2, "a"), gate.ask(3, "a"), gate.ask(4, "a")
    await turns()
    assert {first_a.on, second_a.on} == {"i0", "i1"}
    waits_b = gate.ask(5, "b")
    await turns()
    assert gate.admission.waiting == 3
    on_c.release()
    await turns()
    assert (waits_c.on, waits_b.on) == ("i2", None), "the older of the two that the engine serves"
    next(client for client in (first_a, second_a) if client.on == "i1").release()
    await turns()
    assert (waits_a.on, waits_b.on) == ("i1", None), "in order of arrival where both are served"
    waits_c.release()
    await turns()
    assert waits_b.on == "i2"
    await end(on_c, waits_c, first_a, second_a, waits_a, waits_b)


async def test_a_long_context_waits_for_its_engine_and_overtakes_nobody_that_others_can_serve() -> None:
    gate = Gate(2, max_in_flight_per_instance=1)
    for name, tokens in (("i0", 1000), ("i1", 9000)):
        gate.instances.listed(name, ModelList.read(b'{"data": [{"id": "m", "max_model_len": %d}]}' % tokens))

    def ask(number: int, tokens: int) -> Client:
        client = gate.start(number)
        client.seat.model, client.seat.tokens = "m", tokens
        return client

    first = ask(0, 2000)
    await turns()
    assert first.on == "i1"
    waits, short = ask(1, 2000), ask(2, 500)
    await turns()
    assert (waits.on, short.on) == (None, "i0"), "an engine that refuses it is left idle for others"
    later, last = ask(3, 500), ask(4, 2000)
    await turns()
    short.release()
    await turns()
    assert (waits.on, later.on) == (None, "i0")
    first.release()
    await turns()
    assert (waits.on, last.on) == ("i1", None)
    gate.instances.set_draining(gate.instances["i1"], True)
    later.release()
    await turns()
    assert last.on == "i0", "without an engine that takes it, another one answers it, if only with its refusal"
    await end(first, waits, short, later, last)
    assert not gate.admission._waiting


async def test_a_model_that_an_engine_loads_wakes_its_queue() -> None:
    gate = ModelGate(max_in_flight_per_instance=1)
    on_c, waits_c = gate.ask(0, "c"), gate.ask(1, "c")
    await turns()
    gate.instances.listed("i0", names("a", "c"))
    await turns()
    assert waits_c.on == "i0"
    await end(on_c, waits_c)


async def test_requests_for_adapters_of_full_engines_are_tried_once_for_all() -> None:
    gate = ModelGate(max_in_flight_per_instance=1)
    adapters = [f"lora-{number}" for number in range(50)]
    gate.instances.listed("i2", names("c", *adapters))
    busy = gate.ask(0, "c")
    await turns()
    waiting = [gate.ask(number + 1, name) for number, name in enumerate(adapters)]
    await turns()
    tries = 0
    choose = gate.admission._choose

    def counted(seat: object) -> bool:
        nonlocal tries
        tries += 1
        return choose(seat)  # type: ignore[arg-type]

    gate.admission._choose = counted  # type: ignore[method-assign]
    gate.instances.on_room()
    await turns()
    assert (gate.admission.waiting, tries) == (50, 1)
    assert gate.admission.seat("c").route(RequestView("newcomer", 100), frozenset()) is None
    await end(busy, *waiting)
