"""KV events of instances added and removed while the subscriber runs, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import zmq.asyncio

from policies.predict.exact_index import ExactIndex
from proxy.events.subscriber import EventSubscriber
from proxy.settings import EventSettings, InstanceSettings
from tests.proxy.events.test_kv_events import SIZE, Publisher, Rig, batch, rig, stored


def settings_of(publisher: Publisher, name: str, *, replay: bool = False) -> InstanceSettings:
    return InstanceSettings(
        url="http://127.0.0.1:2",
        name=name,
        events_url=f"tcp://127.0.0.1:{publisher.port}",
        events_replay_url=f"tcp://127.0.0.1:{publisher.replay_port}" if replay else None,
    )


@pytest.fixture
async def other() -> AsyncIterator[Publisher]:
    context = zmq.asyncio.Context()
    yield Publisher(context)
    context.destroy(linger=0)


def takes_the_place(it: Rig, instance: InstanceSettings) -> Rig:
    """Replace an engine by another one of the same name, in one step as the fleet does."""
    it.subscriber.remove("a")
    it.index.remove_instance("a")
    it.index.add_instance("a")
    it.subscriber.add(instance)
    return it


async def test_another_engine_takes_over_a_name_and_only_its_events_count(other: Publisher) -> None:
    async with rig(replay=False) as it:
        first = it.publisher
        await it.joined()
        await first.send(0, batch(stored(0, 6)))
        await it.until(lambda: it.matched(6) == 6)
        takes_the_place(it, settings_of(other, "a"))
        assert (it.index.trusted("a"), it.matched(6)) == (False, 0)
        it.publisher = other
        await it.joined()
        await first.send(1, batch(stored(6, 2, 5)))
        await other.send(0, batch(stored(0, 2)))
        await it.until(lambda: it.index.trusted("a"))
        assert (it.matched(6), it.figures["batches"]) == (2, 1)


async def test_one_that_leaves_in_the_middle_of_a_replay_ends_nothing_else(other: Publisher) -> None:
    async with rig(replay=True) as it:
        await it.joined()
        # Its replay is never answered: it waits for batches 0 to 2 when it leaves.
        replaying = settings_of(other, "b", replay=True)
        it.index.add_instance("b")
        it.subscriber.add(replaying)
        for _ in range(500):
            await other.send(3, batch(stored(0, 1)))
            await asyncio.sleep(0.01)
            if it.index.reason("b") == "replaying":
                break
        assert it.index.reason("b") == "replaying"
        it.subscriber.remove("b")
        it.index.remove_instance("b")
        await it.until(lambda: "b" not in it.subscriber.streams)
        await it.publisher.send(0, batch(stored(0, 4)))
        await it.until(lambda: it.matched(4) == 4)


async def test_instances_may_be_added_before_it_runs_and_to_none_at_all(other: Publisher) -> None:
    index = ExactIndex(SIZE)
    index.add_instance("a")
    subscriber = EventSubscriber((), EventSettings(), index)
    running = asyncio.create_task(subscriber.run())
    try:
        await asyncio.sleep(0)
        subscriber.add(InstanceSettings(url="http://127.0.0.1:1", name="silent"))
        assert subscriber.streams == {}
        subscriber.add(settings_of(other, "a"))
        it = Rig(other, index, subscriber)
        await it.joined()
        await other.send(0, batch(stored(0, 3)))
        await it.until(lambda: it.matched(3) == 3)
        subscriber.remove("a")
        subscriber.remove("a")
        assert not running.done()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    assert len(asyncio.all_tasks()) == 1
