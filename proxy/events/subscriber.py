"""Subscriptions to the KV events of every instance that publishes them, over ZMQ."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Collection
from dataclasses import asdict

import zmq
import zmq.asyncio

from policies.predict.exact_index import ExactIndex
from proxy.events.endpoint import needs_ipv6
from proxy.events.stream import EventStream
from proxy.settings import EventSettings, InstanceSettings

log = logging.getLogger("warmroute.events")

_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
_RECONNECT_MS = 50
"""Constant reconnect interval: events that a new process sends before we are connected are missed."""


class EventSubscriber:
    """One task and one socket per instance with an ``events_url``, while ``run`` runs.

    ``add`` and ``remove`` change the subscriptions at any time, before ``run`` and during it.
    """

    def __init__(self, instances: tuple[InstanceSettings, ...], settings: EventSettings, index: ExactIndex) -> None:
        self._settings = settings
        self._index = index
        self._context: zmq.asyncio.Context | None = None
        self._group: asyncio.TaskGroup | None = None
        self._subscriptions: dict[str, _Subscription] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.streams: dict[str, EventStream] = {}
        for instance in instances:
            self.add(instance)

    def add(self, instance: InstanceSettings) -> None:
        """Subscribe to an instance registered in the index; no effect without an ``events_url``."""
        if instance.events_url is None:
            return
        self._index.follow(instance.name)
        stream = EventStream(self._index, instance.name, self._settings.blocks_per_turn)
        self.streams[instance.name] = stream
        self._subscriptions[instance.name] = _Subscription(instance, stream, self._settings, self._index)
        if self._group is not None:
            self._start(instance.name)

    def remove(self, name: str) -> None:
        """Unsubscribe from an instance, before the index removes it. Unknown names are ignored.

        Its task ends in the next turn of the loop and applies no further events.
        """
        self.streams.pop(name, None)
        subscription, task = self._subscriptions.pop(name, None), self._tasks.pop(name, None)
        if subscription is not None:
            subscription.removed = True
        if task is not None:
            task.cancel()

    async def caught_up(self, names: Collection[str], timeout_s: float) -> None:
        """Wait until the first replay of each of these instances has ended, at most ``timeout_s``; ``run`` runs.

        Instances without an ``events_replay_url`` are not waited for.
        """
        waiting = {name: each for name, each in self._subscriptions.items() if name in names and each.replays}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for each in waiting.values():
                    await each.caught_up.wait()
        for name in waiting:
            if self._index.trusted(name):
                log.info(
                    "%s: KV events replayed, %d blocks are cached%s",
                    name,
                    self._index.blocks(name),
                    "; older ones are not known" if name in self._index.partial_instances else "",
                )
        late = sorted(name for name, each in waiting.items() if not each.caught_up.is_set())
        if late:
            log.warning(
                "%s: the KV events were not replayed within %g s (events.replay_at_start_s): requests are served, and "
                "the exact index is used once they are",
                ", ".join(late),
                timeout_s,
            )

    def figures(self, instance: str) -> dict[str, int]:
        """Event counts of one instance since the start, and the state of its part of the index."""
        stream, counters = self.streams[instance], self._index.counters(instance)
        return {
            "trusted": int(self._index.trusted(instance)),
            "blocks": self._index.blocks(instance),
            "next_sequence": -1 if stream.next is None else stream.next,
            **asdict(stream.counters),
            **asdict(counters),
        }

    async def run(self) -> None:
        """Subscribe until cancelled. Closes sockets and context on every exit."""
        self._context = zmq.asyncio.Context()
        try:
            async with asyncio.TaskGroup() as self._group:
                for name in self._subscriptions:
                    self._start(name)
                await asyncio.get_running_loop().create_future()  # forever: others may be added at any time
        finally:
            self._group = None
            self._tasks.clear()
            self._context.destroy(linger=0)
            self._context = None

    def _start(self, name: str) -> None:
        assert self._group is not None
        assert self._context is not None
        receiving = self._subscriptions[name].run(self._context)
        self._tasks[name] = self._group.create_task(receiving, name=f"kv-events {name}")


class _Subscription:
    """Subscription to one instance."""

    _context: zmq.asyncio.Context

    def __init__(
        self,
        instance: InstanceSettings,
        stream: EventStream,
        settings: EventSettings,
        index: ExactIndex,
    ) -> None:
        self._instance = instance
        self._stream = stream
        self._settings = settings
        self._index = index
        self.removed = False
        """The name no longer belongs to this subscription: the index may not have it, or use it for another engine."""
        self.caught_up = asyncio.Event()
        """Set once the first replay has ended, or the subscription."""
        self._joined = False

    @property
    def replays(self) -> bool:
        """True if past events can be replayed."""
        return self._instance.events_replay_url is not None

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Receive until cancelled."""
        assert self._instance.events_url is not None
        self._context = context
        name = self._instance.name
        socket = self._context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.RCVHWM, self._settings.receive_hwm)
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            # A host that disappears without closing leaves a connection that looks alive.
            socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
            socket.setsockopt(zmq.SUBSCRIBE, self._settings.topic.encode())
            socket.setsockopt(zmq.IPV6, await needs_ipv6(self._instance.events_url))
            socket.connect(self._instance.events_url)
            while True:
                try:
                    frames = await self._next(socket)
                    if frames is not None:
                        await self._take(frames)
                except zmq.ZMQError:
                    raise
                except Exception:
                    # A bad event must not end the subscription.
                    log.exception("%s: a KV event could not be applied", name)
                    self._stream.counters.malformed += 1
                    self._index.distrust(name, "unreadable")
        except zmq.ZMQError as error:
            log.error("%s: no KV events from %s: %s", name, self._instance.events_url, error)
            self._index.distrust(name, "socket_failed")
        finally:
            self.caught_up.set()
            socket.close(linger=0)

    async def _next(self, socket: zmq.asyncio.Socket) -> list[bytes] | None:
        """Next message, or None after a replay of the past and from time to time."""
        if not self.replays:
            return list(await socket.recv_multipart())
        if not self.caught_up.is_set():
            try:
                await self._replay(0)
            finally:
                self.caught_up.set()
            return None
        # Polled first: a receive that is cancelled while its message arrives loses it.
        if await socket.poll(int(self._settings.join_interval_s * 1e3)):
            return list(await socket.recv_multipart())
        following = self._stream.next if self._stream.synced() else None
        if following is None or not self._joined:
            # The second time: events between the first replay and the moment the subscription reached the engine.
            self._joined = True
            await self._replay(following or 0, confirming=following is not None)
        return None

    async def _take(self, frames: list[bytes]) -> None:
        if len(frames) < 2 or len(frames[-2]) != _SEQUENCE_BYTES:
            self._stream.counters.malformed += 1
            log.debug("%s sent %d frames that are no KV events", self._instance.name, len(frames))
            return
        sequence, payload = int.from_bytes(frames[-2], "big"), frames[-1]
        missing = self._stream.missing_before(sequence)
        if missing is not None:
            await self._fill(missing, sequence)
        if self._stream.is_next(sequence):
            await self._apply(payload)

    async def _fill(self, start: int, sequence: int) -> None:
        """Fetch the batches missing from ``start`` to ``sequence``: that part, else everything, else give up."""
        name = self._instance.name
        for first in dict.fromkeys((start, 0)) if self.replays else ():
            if await self._replay(first) and self._reaches(sequence):
                log.info("%s: KV events %d to %d were replayed", name, first, sequence - 1)
                return
        self._stream.give_up(sequence, "missed_events" if start else "joined_late")
        log.warning(
            "%s: KV events %d to %d were missed: its exact index is not used until the engine restarts or clears "
            "its cache",
            name,
            start,
            sequence - 1,
        )

    def _reaches(self, sequence: int) -> bool:
        following = self._stream.next
        return following is not None and following >= sequence

    async def _replay(self, start: int, *, confirming: bool = False) -> bool:
        """Fetch and apply all batches from ``start`` on; False if the engine no longer has them or does not answer.

        The instance is not trusted in the meantime, unless the replay only confirms that nothing is missing so far.
        """
        # What is asked for now covers a restart that was found before.
        self._stream.follow_restart()
        if not confirming:
            self._index.suspend(self._instance.name)
        try:
            async with asyncio.timeout(self._settings.replay_timeout_s):
                complete = await self._replay_all(start)
        except TimeoutError:
            log.debug("%s: no end of the replay within %g s", self._instance.name, self._settings.replay_timeout_s)
            complete = False
        finally:
            if not confirming and not self.removed:
                self._index.resume(self._instance.name)
        if not complete:
            self._stream.give_up(None, "replay_failed")
        return complete

    async def _replay_all(self, start: int) -> bool:
        """Replay until nothing is left: an engine drops what its socket's queue cannot hold, so gaps are normal.

        From 0, a replay that begins later is partial: the engine no longer keeps its first events.
        """
        stream, position, begun = self._stream, start, False
        while True:
            progress = beyond = False
            async with contextlib.aclosing(self._replayed(position)) as batches:
                async for sequence, payload in batches:
                    if not begun and not start and sequence:
                        begun, position = True, sequence
                        stream.begin_partial_replay(sequence)
                    if sequence != position:
                        beyond = True
                        continue
                    if not begun:
                        begun = True
                        stream.begin_replay(start)
                    stream.counters.replayed += 1
                    await self._apply(payload)
                    position += 1
                    progress = True
            if not progress:
                if not beyond and not begun:
                    # The engine keeps nothing from there on; from 0 this means that its cache never held anything.
                    stream.begin_replay(start)
                return not beyond

    async def _replayed(self, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield (number, payload) of every batch the engine still keeps from ``start`` on, once."""
        assert self._instance.events_replay_url is not None
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.IPV6, await needs_ipv6(self._instance.events_replay_url))
            socket.connect(self._instance.events_replay_url)
            await socket.send_multipart([b"", start.to_bytes(_SEQUENCE_BYTES, "big")])
            while True:
                frames = await socket.recv_multipart()
                if len(frames) < 2 or frames[-2] == _END:
                    return
                yield int.from_bytes(frames[-2], "big"), frames[-1]
        finally:
            socket.close(linger=0)

    async def _apply(self, payload: bytes) -> None:
        for _ in self._stream.apply(payload):
            await asyncio.sleep(0)
