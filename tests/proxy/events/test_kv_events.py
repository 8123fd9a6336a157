"""The subscriber against a publisher that loses, repeats and garbles events, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from policies.predict.blocks import hash_token_blocks
from policies.predict.exact_index import PLAIN_ROOT, ExactIndex, StoredBlocks
from proxy.events.subscriber import EventSubscriber
from proxy.events.wire import (
    Cleared,
    Elsewhere,
    MalformedEventError,
    Removed,
    Stored,
    Unreadable,
    in_slices,
    read_batch,
    read_event,
)
from proxy.settings import EventSettings, InstanceSettings

SIZE = 4
END = (-1).to_bytes(8, "big", signed=True)


def batch(*events: list[Any]) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def stored(first: int, blocks: int, parent: int | None = None) -> list[Any]:
    """Blocks named after their number: block n holds the tokens 4n .. 4n+3."""
    names = list(range(first, first + blocks))
    return ["BlockStored", names, parent, list(range(first * SIZE, (first + blocks) * SIZE)), SIZE, None, "GPU"]


def event(*fields: Any) -> Any:
    (raw,) = read_batch(batch(list(fields)))
    return read_event(raw)


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ((), 2),
        ((None,), 2),
        ((None, "GPU"), 2),
        ((None, "GPU", None, None), 2),
        ((None, "GPU", None, [None, None]), 2),
        ((None, None, None, [[], []], None, "full_attention", 0), 2),
        ((None, "GPU", None, [None, ["image"]]), 1),
        ((None, "GPU", None, [["salt"], None]), 0),
        ((None, "GPU", "adapter", None), 0),
        ((3, "GPU", None, None), 0),
    ],
)
def test_stored_blocks_are_read_with_missing_or_additional_fields(fields: tuple[Any, ...], plain: int) -> None:
    for names, parent in (([1, 2], 7), ([b"x" * 32, b"y" * 32], b"z")):
        got = event("BlockStored", names, parent, list(range(8)), SIZE, *fields)
        assert got == Stored(StoredBlocks(names, parent, list(range(8)), SIZE, plain))


def test_the_other_kinds_of_events() -> None:
    assert event("BlockRemoved", [1, b"x"]) == Removed([1, b"x"])
    assert event("BlockRemoved", [1], "GPU", 1, "later") == Removed([1], 1)
    assert event("AllBlocksCleared") == event("AllBlocksCleared", "later") == Cleared()
    assert event("BlockRemoved", [1], "CPU") == event("SomethingNew", 1, 2) == Elsewhere()
    assert event("BlockStored", [1], None, list(range(4)), SIZE, None, "CPU") == Elsewhere()


@pytest.mark.parametrize(
    "fields",
    [
        ("BlockStored", [1], None, [1, 2, 3], SIZE),
        ("BlockStored", [1], None, "text", SIZE),
        ("BlockStored", [1]),
        ("BlockRemoved", 5),
        (5, 6),
        (),
    ],
)
def test_an_event_that_makes_no_sense_says_so(fields: tuple[Any, ...]) -> None:
    assert isinstance(event(*fields), Unreadable)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"text", msgspec.msgpack.encode({"ts": 1}), batch()[:-2]])
def test_a_message_that_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedEventError):
        read_batch(payload)


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_slices_are_the_same_blocks(most: int) -> None:
    whole = StoredBlocks([1, 2, 3, 4, 5], 9, list(range(20)), SIZE, 3)
    pieces = list(in_slices(whole, most))
    assert [name for piece in pieces for name in piece.hashes] == whole.hashes
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.parent for piece in pieces] == [9, *[piece.hashes[-1] for piece in pieces[:-1]]]
    assert sum(max(0, min(piece.plain_blocks, len(piece.hashes))) for piece in pieces) == 3


class Publisher:
    """The engine's side of the stream, with control over the events sent and kept for replays."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.pub = context.socket(zmq.PUB)
        self.port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.router = context.socket(zmq.ROUTER)
        self.replay_port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.kept: dict[int, bytes] = {}
        self.asked: list[int] = []
        self.lossy = False
        self.keeps = True

    async def send(self, sequence: int, payload: bytes, *, lose: bool = False) -> None:
        self.kept = {**self.kept, sequence: payload} if self.keeps else {}
        if not lose:
            await self.pub.send_multipart([b"kv-events", sequence.to_bytes(8, "big"), payload])

    async def answer_replays(self) -> None:
        while True:
            client, empty, start = await self.router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            answered = 0
            for sequence, payload in sorted(self.kept.items()):
                if sequence >= self.asked[-1]:
                    answered += 1
                    if not (self.lossy and answered % 3 == 0):  # dropped by a full queue
                        await self.router.send_multipart([client, empty, sequence.to_bytes(8, "big"), payload])
            await self.router.send_multipart([client, empty, END, b""])


FORGETFUL = {
    7: batch(stored(0, 1), stored(1, 1, 0)),
    8: batch(["BlockRemoved", [1], "GPU"], stored(2, 1, 1), ["BlockRemoved", [60], "GPU"]),
    9: batch(stored(90, 1, 89)),
}
"""Batches of an engine that no longer keeps its first ones: block 89 was stored before."""


class Rig:
    def __init__(self, publisher: Publisher, index: ExactIndex, subscriber: EventSubscriber) -> None:
        self.publisher = publisher
        self.index = index
        self.subscriber = subscriber

    @property
    def figures(self) -> dict[str, int]:
        return self.subscriber.figures("a")

    async def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(3000):
            if holds():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"did not come true in 30 s: {self.figures}, {self.index.reason('a')}")

    async def joined(self) -> None:
        """Send until a message arrives: a subscription takes a moment to reach the publisher."""
        for _ in range(3000):
            # Of an unknown kind: the batch has a number and no other effect.
            await self.publisher.pub.send_multipart([b"kv-events", b"no number", b""])
            await asyncio.sleep(0.01)
            if self.figures["malformed"]:
                return
        raise AssertionError("the subscription did not take effect in 30 s")

    def matched(self, blocks: int) -> int:
        return self.index.match(hash_token_blocks(range(blocks * SIZE), SIZE, PLAIN_ROOT))["a"]


@contextlib.asynccontextmanager
async def rig(
    *, replay: bool, join_interval_s: float = 60.0, before: dict[int, bytes] | None = None
) -> AsyncIterator[Rig]:
    """A subscriber and one publisher, which keeps the batches ``before``."""
    context = zmq.asyncio.Context()
    publisher = Publisher(context)
    publisher.kept = {} if before is None else before
    instance = InstanceSettings(
        url="http://127.0.0.1:1",
        name="a",
        events_url=f"tcp://127.0.0.1:{publisher.port}",
        events_replay_url=f"tcp://127.0.0.1:{publisher.replay_port}" if replay else None,
    )
    index = ExactIndex(SIZE)
    index.add_instance("a")
    settings = EventSettings(blocks_per_turn=3, replay_timeout_s=10.0, join_interval_s=join_interval_s)
    subscriber = EventSubscriber((instance,), settings, index)
    tasks = [asyncio.create_task(subscriber.run()), asyncio.create_task(publisher.answer_replays())]
    try:
        yield Rig(publisher, index, subscriber)
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)


@pytest.mark.parametrize("replay", [False, True])
async def test_events_from_the_first_on_are_followed(replay: bool) -> None:
    async with rig(replay=replay) as it:
        await it.joined()
        await it.publisher.send(0, batch(stored(0, 10)))
        await it.publisher.send(1, batch(stored(10, 2, 9), ["BlockRemoved", [11], "GPU"]))
        await it.until(lambda: it.figures["next_sequence"] == 2)
        assert (it.index.trusted("a"), it.matched(12), it.figures["gaps"]) == (True, 11, 0)
        assert it.publisher.asked == [0] * replay


async def test_what_was_missed_is_replayed() -> None:
    async with rig(replay=True) as it:
        await it.joined()
        await it.publisher.send(0, batch(stored(0, 2)))
        await it.publisher.send(1, batch(stored(2, 2, 1)), lose=True)
        await it.publisher.send(2, batch(stored(4, 2, 3)), lose=True)
        await it.publisher.send(3, batch(stored(6, 2, 5)))
        await it.until(lambda: it.index.trusted("a") and it.matched(8) == 8)
        assert it.figures["gaps"] == 1
        assert it.publisher.asked[:2] == [0, 1]
        await it.publisher.send(4, batch(["BlockRemoved", [7]]))
        await it.until(lambda: it.matched(8) == 7)
        assert it.figures["unknown_removed"] == 0


async def test_the_index_is_used_while_a_replay_only_confirms_it(monkeypatch: pytest.MonkeyPatch) -> None:
    suspended: list[str] = []
    monkeypatch.setattr(ExactIndex, "suspend", lambda _, instance: suspended.append(instance))
    async with rig(replay=True, join_interval_s=0.05, before={0: batch(stored(0, 2))}) as it:
        await it.until(lambda: it.publisher.asked == [0, 1, 1])  # the first replay asks until nothing is left
        assert (suspended, it.index.trusted("a"), it.matched(2)) == (["a"], True, 2)


async def test_a_restart_found_before_the_first_replay_costs_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that reads the block size counts as one: the index was not used during the second replay."""
    suspended: list[str] = []
    monkeypatch.setattr(ExactIndex, "suspend", lambda _, instance: suspended.append(instance))
    async with rig(replay=True, join_interval_s=0.05, before={0: batch(stored(0, 2))}) as it:
        it.index.restarted("a")
        await it.until(lambda: it.publisher.asked == [0, 1, 1])
        assert (suspended, it.index.trusted("a"), it.matched(2)) == (["a"], True, 2)


async def test_a_replay_with_holes_is_asked_for_again() -> None:
    async with rig(replay=True) as it:
        await it.joined()
        it.publisher.lossy = True
        for number in range(20):
            await it.publisher.send(number, batch(stored(number, 1, number - 1 if number else None)), lose=True)
        await it.publisher.send(20, batch(stored(20, 1, 19)))
        await it.until(lambda: it.index.trusted("a") and it.matched(21) == 21)
        assert len(it.publisher.asked) > 5


@pytest.mark.parametrize("replay", [False, True])
async def test_what_was_missed_and_cannot_be_had_ends_the_trust_until_the_cache_is_cleared(replay: bool) -> None:
    async with rig(replay=replay) as it:
        await it.joined()
        await it.publisher.send(0, batch(stored(0, 2)))
        await it.until(lambda: it.matched(2) == 2)
        it.publisher.keeps = False
        await it.publisher.send(5, batch(stored(2, 2, 1)))
        await it.until(lambda: it.index.reason("a") == "missed_events")
        assert (it.matched(4), it.figures["blocks"]) == (0, 0)
        await it.publisher.send(6, batch(["AllBlocksCleared"], stored(0, 3)))
        await it.until(lambda: it.matched(3) == 3)
        assert it.index.trusted("a")


async def test_who_comes_late_learns_from_a_replay_before_anything_is_sent() -> None:
    async with rig(replay=True, join_interval_s=0.05) as it:
        for number in range(3):
            await it.publisher.send(number, batch(stored(number, 1, number - 1 if number else None)), lose=True)
        await it.until(lambda: it.index.trusted("a") and it.matched(3) == 3)
        assert it.figures["gaps"] == 0


async def test_an_engine_without_a_past_is_known_by_its_empty_replay() -> None:
    async with rig(replay=True, join_interval_s=0.05) as it:
        await it.until(lambda: it.index.trusted("a"))
        assert (it.figures["next_sequence"], it.figures["blocks"]) == (0, 0)


async def test_who_comes_late_to_an_engine_that_forgot_its_first_events_knows_a_lower_bound() -> None:
    async with rig(replay=True, before=FORGETFUL) as it:
        await it.until(lambda: it.index.trusted("a"))
        # Block 1 was removed, so the prefix of block 2 is not known, nor is that of block 90.
        assert (it.matched(3), it.figures["blocks"], it.index.partial_instances) == (1, 3, {"a"})
        await it.joined()
        await it.publisher.send(10, batch(["BlockRemoved", [0, 90, 50], "GPU"], stored(91, 1, 90)))
        await it.until(lambda: it.figures["next_sequence"] == 11)
        assert (it.matched(3), it.index.trusted("a"), it.figures["gaps"]) == (0, True, 0)
        await it.publisher.send(11, batch(["AllBlocksCleared"], stored(0, 2)))
        await it.until(lambda: it.matched(3) == 2)
        assert it.index.partial_instances == frozenset()


async def test_a_gap_that_is_no_longer_kept_leaves_a_lower_bound() -> None:
    async with rig(replay=True) as it:
        await it.joined()
        await it.publisher.send(0, batch(stored(0, 2), stored(20, 1)))
        await it.until(lambda: it.matched(2) == 2)
        it.publisher.kept = {}
        await it.publisher.send(4, batch(stored(0, 1)), lose=True)
        await it.publisher.send(5, batch(stored(1, 1, 0)))
        await it.until(lambda: it.figures["next_sequence"] == 6)
        await it.until(lambda: it.index.trusted("a"))
        assert (it.matched(2), it.figures["blocks"], it.index.partial_instances) == (2, 2, {"a"})


async def test_the_start_waits_for_replays_and_not_for_longer_than_allowed() -> None:
    async with rig(replay=True, before={0: batch(stored(0, 3))}) as it:
        await it.subscriber.caught_up(["a", "not followed"], 60.0)
        assert (it.index.trusted("a"), it.matched(3)) == (True, 3)
        # The other one does not answer.
        silent = InstanceSettings(
            url="http://127.0.0.1:2",
            name="b",
            events_url="tcp://127.0.0.1:2",
            events_replay_url="tcp://127.0.0.1:2",
        )
        it.index.add_instance("b")
        it.subscriber.add(silent)
        await it.subscriber.caught_up(["a", "b"], 0.05)
        assert (it.index.trusted("a"), it.index.trusted("b")) == (True, False)


async def test_events_between_the_first_replay_and_the_subscription_are_fetched_without_a_further_event() -> None:
    async with rig(replay=True, join_interval_s=0.05, before={0: batch(stored(0, 3))}) as it:
        await it.subscriber.caught_up(["a"], 60.0)
        await it.publisher.send(1, batch(["BlockRemoved", [2], "GPU"]), lose=True)
        await it.until(lambda: it.matched(3) == 2)


async def test_numbers_that_begin_again_mean_another_process() -> None:
    async with rig(replay=False) as it:
        await it.joined()
        for number in range(3):
            await it.publisher.send(number, batch(stored(number, 1, number - 1 if number else None)))
        await it.until(lambda: it.matched(3) == 3)
        await it.publisher.send(0, batch(stored(0, 2)))
        await it.until(lambda: it.figures["next_sequence"] == 1)
        assert (it.matched(3), it.index.trusted("a")) == (2, True)
        it.index.restarted("a")  # the health probe notices later
        assert (it.matched(3), it.index.trusted("a")) == (2, True)
        await it.publisher.send(1, batch(stored(2, 1, 1)))
        await it.until(lambda: it.matched(3) == 3)


async def test_a_restart_seen_by_the_probe_first_restarts_the_numbers() -> None:
    async with rig(replay=False) as it:
        await it.joined()
        await it.publisher.send(0, batch(stored(0, 2)))
        await it.until(lambda: it.matched(2) == 2)
        it.index.restarted("a")
        assert (it.matched(2), it.index.trusted("a")) == (0, False)
        await it.publisher.send(0, batch(stored(0, 1)))
        await it.until(lambda: it.index.trusted("a") and it.matched(2) == 1)
        assert it.figures["gaps"] == 0


async def test_garbage_ends_the_trust_and_not_the_listening() -> None:
    async with rig(replay=False) as it:
        await it.joined()
        await it.publisher.send(0, batch(stored(0, 2)))
        await it.until(lambda: it.matched(2) == 2)
        before = it.figures["malformed"]
        await it.publisher.pub.send_multipart([b"one frame"])
        await it.publisher.pub.send_multipart([b"t", b"short", b""])
        await it.publisher.send(1, b"\xc1 no batch")
        await it.until(lambda: it.index.reason("a") == "unreadable")
        await it.publisher.send(2, batch(["BlockStored", [1], None, [1], SIZE]))
        await it.publisher.send(3, batch(["AllBlocksCleared"], ["SomethingNew"], stored(0, 1)))
        await it.until(lambda: it.matched(2) == 1)
        assert it.figures["malformed"] == before + 4
        assert it.index.trusted("a")


async def test_blocks_of_a_second_cache_group_are_not_understood() -> None:
    async with rig(replay=False) as it:
        await it.joined()
        await it.publisher.send(0, batch([*stored(0, 1), None, None, 1]))
        await it.until(lambda: it.index.reason("a") == "several_cache_groups")
