"""Sessions whose requests several replicas serve: where each ran last, what to announce, and what is still to learn."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple


class Context(NamedTuple):
    """Last place of a session."""

    instance: str
    tokens: int
    """Length of its prompt."""
    at_s: float
    """Time of the decision, on this process's clock."""
    own: bool
    """True if it ran through this replica."""


class SharedSessions:
    """Last context of each session over all replicas, at most ``capacity``. The latest wins. O(1) per call."""

    def __init__(self, capacity: int = 100_000) -> None:
        self._capacity = capacity
        self._known: OrderedDict[str, Context] = OrderedDict()
        self._unlearned: set[str] = set()
        self._changed: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._known)

    def set_capacity(self, capacity: int) -> None:
        """Set the bound, effective from the next session on."""
        self._capacity = capacity

    def ran(self, session_id: str, instance: str, tokens: int, now_s: float) -> None:
        """Record a decision of this replica, to be announced."""
        self._keep(session_id, Context(instance, tokens, now_s, own=True))
        self._changed[session_id] = None
        self._unlearned.discard(session_id)

    def ran_elsewhere(self, session_id: str, instance: str, tokens: int, at_s: float) -> bool:
        """Record a decision of another replica; False, and no effect, if a later one is known."""
        known = self._known.get(session_id)
        if known is not None and known.at_s > at_s:
            return False
        self._keep(session_id, Context(instance, tokens, at_s, own=False))
        self._changed.pop(session_id, None)
        self._unlearned.add(session_id)
        return True

    def unlearned(self, session_id: str) -> Context | None:
        """Context of a session that last ran through another replica; None from the second call on."""
        if session_id not in self._unlearned:
            return None
        self._unlearned.discard(session_id)
        return self._known.get(session_id)

    def elsewhere(self, session_id: str, since_s: float) -> Context | None:
        """Context of a session that last ran through another replica, later than ``since_s``; else None."""
        known = self._known.get(session_id)
        return known if known is not None and not known.own and known.at_s > since_s else None

    def take_changes(self, most: int) -> list[tuple[str, Context]]:
        """At most ``most`` decisions of this replica that were not taken before, oldest first."""
        taken = []
        for session_id in list(islice(self._changed, most)):
            del self._changed[session_id]
            context = self._known.get(session_id)
            if context is not None and context.own:
                taken.append((session_id, context))
        return taken

    def announce_all(self) -> None:
        """Mark all sessions that last ran through this replica as changed."""
        self._changed = {session_id: None for session_id, context in self._known.items() if context.own}

    def forget(self, instance: str) -> None:
        """Drop the sessions of an instance that restarted or left. O(sessions)."""
        for session_id in [each for each, context in self._known.items() if context.instance == instance]:
            self._drop(session_id)

    def _keep(self, session_id: str, context: Context) -> None:
        self._known[session_id] = context
        self._known.move_to_end(session_id)
        while len(self._known) > self._capacity:
            self._drop(next(iter(self._known)))

    def _drop(self, session_id: str) -> None:
        del self._known[session_id]
        self._unlearned.discard(session_id)
        self._changed.pop(session_id, None)
