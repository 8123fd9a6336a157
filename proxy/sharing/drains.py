"""Drain marks of all replicas: an operator's last word about each instance wins, on whichever replica it was given."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.sharing.wire import DrainMark

_STEP_S = 1e-3


class DrainMarks:
    """Last mark of every instance that was ever drained. Times are Unix seconds."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._marks: dict[str, DrainMark] = {}
        self._changed: set[str] = set()
        self._removed: dict[str, float] = {}
        """Unix times at which instances with a mark were removed here."""
        self.repeating = False
        """Changes of the past are repeated: the present marks are no older than the removals among them."""

    def mark(self, instance: str, *, draining: bool, unix_s: float) -> None:
        """Record a word given on this replica; it is later than those known, whatever the hosts' clocks say."""
        before = self._marks.get(instance)
        if before is not None:
            unix_s = max(unix_s, before.unix_s + _STEP_S)
        self._marks[instance] = DrainMark(draining, unix_s, self._replica)
        self._changed.add(instance)

    def merge(self, marks: Mapping[str, DrainMark]) -> dict[str, bool]:
        """Take another replica's marks; returns the instances whose mark changed, and if they are to drain."""
        news = {}
        for instance, mark in marks.items():
            known = self._marks.get(instance)
            if known is None or (mark.unix_s, mark.replica) > (known.unix_s, known.replica):
                self._marks[instance] = mark
                self._changed.discard(instance)
                news[instance] = mark.draining
        return news

    def draining(self, instance: str) -> bool:
        """True if the last word about an instance is to drain it."""
        mark = self._marks.get(instance)
        return mark is not None and mark.draining

    def removed(self, instance: str, unix_s: float) -> None:
        """The instance is no longer here: its mark is not meant for another one under its name.

        Others that still have the instance keep it drained, so the mark itself stays.
        """
        mark = self._marks.get(instance)
        if mark is not None and not self.repeating:
            # A time, not the mark: those that other workers give for the same request are still on their way.
            self._removed[instance] = max(unix_s, mark.unix_s)

    def ended(self, instance: str) -> bool:
        """True if the last word is to drain an instance that has been removed here since."""
        mark = self._marks.get(instance)
        return mark is not None and mark.draining and mark.unix_s <= self._removed.get(instance, 0.0)

    @property
    def changed(self) -> bool:
        """True if a mark given on this replica has not been taken."""
        return bool(self._changed)

    def all(self) -> dict[str, DrainMark]:
        """Every mark, by instance."""
        return dict(self._marks)

    def take_changed(self) -> dict[str, DrainMark]:
        """Marks given on this replica since the last call."""
        changed, self._changed = self._changed, set()
        return {instance: self._marks[instance] for instance in changed}
