"""State that the stub's engines share: settings, counts, and the ticks at which their streams advance."""

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
    """The operations that the stub and its ticker call on a connection."""

    idle_since_s: float

    def close_idle(self) -> None:
        """Close it."""

    def write_event(self) -> None:
        """Write the next event of its paced stream."""

    def finish(self) -> None:
        """Write the last event of its paced stream and the end of the answer."""


class StubSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of generation answers."""

    events: int = 80
    event_bytes: int = 250
    events_per_s: float = 0.0
    """Rate of one stream; 0: all events at once."""
    events_per_write: int = 1
    """A burst leaves in writes of this many events, one per turn of the event loop; 0: in one write."""
    first_event_delay_s: float = 0.0
    """Length of a prefill in seconds. The answer's head is sent before it, as in vLLM's server."""
    records: bool = False
    """Keep one record per request."""


class StubRecord(NamedTuple):
    """One generation request. Times are ``CLOCK_MONOTONIC`` seconds."""

    tag: str
    """Text between ``[[`` and ``]]`` in the body."""
    arrived_s: float
    """Time at which its body was complete."""
    body_bytes: int
    ended_s: float
    aborted: bool


class Stub:
    """State shared by all engines of the process."""

    def __init__(self, settings: StubSettings) -> None:
        self.pages = pages()
        self.renders = Renders()
        self.connections: set[StubConnection] = set()
        self.apply(settings)
        self.reset()

    def apply(self, settings: StubSettings) -> None:
        """Apply settings to all further answers."""
        self.settings = settings
        self.events = {chat: Events(chat, settings.event_bytes) for chat in (False, True)}
        self.bursts = {chat: self.events[chat].burst(settings.events) for chat in (False, True)}

    def reset(self) -> None:
        """Reset all counts and records."""
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
        """Close idle connections until cancelled."""
        while True:
            await asyncio.sleep(0.5)
            before_s = monotonic() - IDLE_LIMIT_S
            for connection in [each for each in self.connections if each.idle_since_s < before_s]:
                connection.close_idle()


class Ticker:
    """The steps of one engine: all its streams get their next event at the same tick."""

    def __init__(self, stub: Stub, phase: float) -> None:
        self._stub = stub
        self._phase = phase
        self._timer: asyncio.TimerHandle | None = None
        self.streams: dict[StubConnection, int] = {}
        """Connection -> remaining events."""

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
