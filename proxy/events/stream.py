"""One instance's stream of events, and the detection of missed events by sequence numbers.

Every batch of an engine has the next number, from 0. Number 0 means that the cache was empty before it, a jump means
that batches were lost, and a number that does not grow means that another process has taken over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from policies.predict.exact_index import ExactIndex
from proxy.events.wire import (
    Cleared,
    MalformedEventError,
    Removed,
    Stored,
    Unreadable,
    in_slices,
    read_batch,
    read_event,
)


@dataclass(slots=True)
class StreamCounters:
    """Counts since the start."""

    batches: int = 0
    gaps: int = 0
    replayed: int = 0
    """Batches received by replay."""
    malformed: int = 0
    """Messages or events that could not be read."""


class EventStream:
    """Applies one instance's batches to the index, in order, each once."""

    def __init__(self, index: ExactIndex, instance: str, blocks_per_turn: int = 256) -> None:
        self._index = index
        self._instance = instance
        self._blocks_per_turn = blocks_per_turn
        self._epoch = index.epoch(instance)
        self._last_live = -1
        self.next: int | None = None
        """Number of the next batch to apply; None if unknown."""
        self.counters = StreamCounters()

    def missing_before(self, sequence: int) -> int | None:
        """First batch that is missing before this live one (replay from there), or None.

        After None, apply the batch if ``is_next``.
        """
        self.follow_restart()
        if sequence <= self._last_live:
            self._index.events_restarted(self._instance)
            self.next = 0
        self._last_live = sequence
        if self.next is None:
            if sequence:
                return 0
            self._index.reset(self._instance)
            self.next = 0
        if sequence > self.next:
            self.counters.gaps += 1
            return self.next
        return None

    def is_next(self, sequence: int) -> bool:
        """True if this is the next batch to apply; False if a replay has already applied it."""
        return sequence == self.next

    def begin_replay(self, start: int) -> None:
        """Start applying a replay from ``start``. From 0 it covers the whole cache."""
        if not start:
            self._index.reset(self._instance)
        self.next = start

    def begin_partial_replay(self, start: int) -> None:
        """Start applying a replay of all that the engine keeps, which begins after number 0."""
        self._index.reset_partial(self._instance)
        self.next = start

    def give_up(self, sequence: int | None, reason: str) -> None:
        """Record that the batches before ``sequence`` (None: those before subscribing) cannot be obtained."""
        self._index.distrust(self._instance, reason)
        self.next = sequence

    def synced(self) -> bool:
        """True if the numbers are known, so that the next batch reveals a gap."""
        self.follow_restart()
        return self.next is not None

    def apply(self, payload: bytes) -> Iterator[None]:
        """Apply the next batch. Yields after about every ``blocks_per_turn`` blocks to let other tasks run."""
        assert self.next is not None
        self.next += 1
        self.counters.batches += 1
        index, instance, most = self._index, self._instance, self._blocks_per_turn
        try:
            events = read_batch(payload)
        except MalformedEventError:
            self._unreadable()
            return
        done = 0
        for raw in events:
            event = read_event(raw)
            if isinstance(event, Stored | Removed) and event.group:
                index.distrust(instance, "several_cache_groups")
            elif isinstance(event, Stored):
                for piece in in_slices(event.blocks, most):
                    try:
                        index.store(instance, piece)
                    except ValueError:
                        self._unreadable()
                        break
                    done += len(piece.hashes)
                    if done >= most:
                        done = 0
                        yield
            elif isinstance(event, Removed):
                index.remove(instance, event.hashes)
                done += len(event.hashes)
            elif isinstance(event, Cleared):
                index.clear(instance)
            elif isinstance(event, Unreadable):
                self._unreadable()
            if done >= most:
                done = 0
                yield

    def _unreadable(self) -> None:
        self.counters.malformed += 1
        self._index.distrust(self._instance, "unreadable")

    def follow_restart(self) -> None:
        """The health monitor found a restart: numbers start at 0 again, and the state is reset."""
        epoch = self._index.epoch(self._instance)
        if epoch != self._epoch:
            self._epoch = epoch
            self.next, self._last_live = None, -1
