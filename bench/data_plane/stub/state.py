"""What the engines of the stub share: settings, what they counted, and the steps at which their streams advance."""

from __future__ import annotations

import asyncio
from collections import Counter
from time import monotonic, process_time
from typing import NamedTuple, Protocol

import msgspec

from bench.data_plane.stub.answers import Events, Renders, pages

IDLE_LIMIT_S = 5.0
"""uvicorn's default: an idle connection is closed after this long."""


class StubConnection(Protocol):
    """What is done to a connection from outside it."""

    idle_since_s: float

    def close_idle(self) -> None:
        """Close it."""

    def write_event(self) -> None:
        """Write the next event of its paced stream."""

    def finish(self) -> None:
        """Write the last event of its paced stream, and what follows it."""


class StubSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How generation requests are answered."""

    events: int = 80
    event_bytes: int = 250
    events_per_s: float = 0.0
    """Of one stream; 0: all at once."""
    events_per_write: int = 8
    """A burst leaves in writes of this many events, one per turn of the event loop; 0: in one write."""
    first_event_delay_s: float = 0.0
    """The length of a prefill. The answer's head is sent before it, as vLLM's server does."""
    records: bool = False
    """Keep one record per request."""


class StubRecord(NamedTuple):
    """One generation request. Times are ``CLOCK_MONOTONIC`` seconds."""

    tag: str
    """What stands between ``[[`` and ``]]`` in the body."""
    arrived_s: float
    """Its body was complete."""
    body_bytes: int
    ended_s: float
    aborted: bool


class Stub:
    """What all engines of the process share."""

    def __init__(self, settings: StubSettings) -> None:
        self.pages = pages()
        self.renders = Renders()
        self.connections: set[StubConnection] = set()
        self.apply(settings)
        self.reset()

    def apply(self, settings: StubSettings) -> None:
        """Answer from now on by these settings."""
        self.settings = settings
        self.events = {chat: Events(chat, settings.event_bytes) for chat in (False, True)}
        self.bursts = {chat: self.events[chat].burst(settings.events) for chat in (False, True)}

    def reset(self) -> None:
        """Forget what was counted."""
        self.paths: Counter[str] = Counter()
        self.records: list[StubRecord] = []
        self.aborted = 0
        self.completed = 0
        self.pipelined = 0
        self.refused: Counter[str] = Counter()

    def report(self) -> dict[str, object]:
        """Counts and records since the last reset."""
        return {
            "paths": dict(self.paths),
            "completed": self.completed,
            "aborted": self.aborted,
            "pipelined": self.pipelined,
            "refused": dict(self.refused),
            "cpu_s": process_time(),
            "records": [record._asdict() for record in self.records],
        }

    async def close_idle(self) -> None:
        """Close what idles too long, for ever."""
        while True:
            await asyncio.sleep(0.5)
            before_s = monotonic() - IDLE_LIMIT_S
            for connection in [each for each in self.connections if each.idle_since_s < before_s]:
                connection.close_idle()


class Ticker:
    """The steps of one engine: every stream that runs gets its next event at the same tick."""

    def __init__(self, stub: Stub, phase: float) -> None:
        self._stub = stub
        self._phase = phase
        self._timer: asyncio.TimerHandle | None = None
        self.streams: dict[StubConnection, int] = {}
        """Connection -> events still to come."""

    def add(self, connection: StubConnection, events: int) -> None:
        """Begin a stream's remaining events at the next tick."""
        self.streams[connection] = events
        if self._timer is None:
            loop = asyncio.get_running_loop()
            interval_s = 1.0 / self._stub.settings.events_per_s
            ticks = int(loop.time() / interval_s) + 1
            self._timer = loop.call_at(
                (ticks + self._phase) * interval_s, self._tick, (ticks + self._phase) * interval_s
            )

    def _tick(self, due_s: float) -> None:
        for connection, remaining in list(self.streams.items()):
            if remaining > 1:
                self.streams[connection] = remaining - 1
                connection.write_event()
            else:
                del self.streams[connection]
                connection.finish()
        rate = self._stub.settings.events_per_s
        if self.streams and rate:
            next_s = due_s + 1.0 / rate
            self._timer = asyncio.get_running_loop().call_at(next_s, self._tick, next_s)
        else:
            self._timer = None
