"""Session pins: the instance that each session's context was last on, bounded in number and in time."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping


class SessionTable:
    """Instance by context (`RequestView.context_id`), least recently used first. O(1) per call, amortised."""

    def __init__(self, capacity: int = 100_000, ttl_s: float = 3600.0) -> None:
        """At most ``capacity`` sessions; one idle for ``ttl_s`` seconds is dropped."""
        self.set_bounds(capacity, ttl_s)
        self._pins: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._per_instance: Counter[str] = Counter()

    def set_bounds(self, capacity: int, ttl_s: float) -> None:
        """Set the bounds, effective from the next pin on. Raises ValueError unless both are positive."""
        if capacity < 1 or ttl_s <= 0:
            raise ValueError(f"capacity and ttl_s must be positive, got {capacity} and {ttl_s}")
        self._capacity = capacity
        self._ttl_s = ttl_s

    def __len__(self) -> int:
        return len(self._pins)

    def instance_of(self, context_id: str, now_s: float) -> str | None:
        """Instance the session is pinned to, or None. Does not refresh the pin."""
        self._expire(now_s)
        pin = self._pins.get(context_id)
        return pin[0] if pin else None

    def pin(self, context_id: str, instance: str, now_s: float) -> None:
        """Pin a session, or move and refresh its pin."""
        self._expire(now_s)
        old = self._pins.pop(context_id, None)
        if old:
            self._uncount(old[0])
        self._pins[context_id] = (instance, now_s)
        self._per_instance[instance] += 1
        while len(self._pins) > self._capacity:
            self._drop_oldest()

    def pins(self, now_s: float) -> Iterator[tuple[str, str, float]]:
        """Yield a context's key, its instance and idle seconds, most recently used first; the table may change."""
        # Pins are removed and inserted again, so a dict's own order is that of use; listing it is 10 times as fast.
        for session in reversed(list(dict.keys(self._pins))):
            pin = self._pins.get(session)
            if pin is not None:
                yield session, pin[0], max(0.0, now_s - pin[1])

    def remove_instance(self, instance: str) -> int:
        """Unpin every session of a removed instance; returns their number. O(sessions)."""
        gone = [session for session, pin in self._pins.items() if pin[0] == instance]
        for session in gone:
            del self._pins[session]
        del self._per_instance[instance]
        return len(gone)

    def count(self, instance: str) -> int:
        """Live sessions pinned to an instance."""
        return self._per_instance.get(instance, 0)  # a Counter's own default is a Python-level call

    @property
    def counts(self) -> Mapping[str, int]:
        """Live sessions per instance, for readers; instances without sessions are left out."""
        return self._per_instance

    def _expire(self, now_s: float) -> None:
        while self._pins:
            _, touched_s = next(iter(self._pins.values()))
            if now_s - touched_s < self._ttl_s:
                return
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (instance, _) = self._pins.popitem(last=False)
        self._uncount(instance)

    def _uncount(self, instance: str) -> None:
        self._per_instance[instance] -= 1
        if not self._per_instance[instance]:
            del self._per_instance[instance]
