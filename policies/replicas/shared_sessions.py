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
    """Contexts of all replicas by key (`RequestView.context_id`), at most ``capacity``. O(1) per call.

    The latest of a key counts.
    """

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

    def ran(self, context_id: str, instance: str, tokens: int, now_s: float) -> None:
        """Record a decision of this replica, to be announced."""
        self._keep(context_id, Context(instance, tokens, now_s, own=True))
        self._changed[context_id] = None
        self._unlearned.discard(context_id)

    def ran_elsewhere(self, context_id: str, instance: str, tokens: int, at_s: float) -> bool:
        """Record a decision of another replica; False, and no effect, if a later one is known."""
        known = self._known.get(context_id)
        if known is not None and known.at_s > at_s:
            return False
        self._keep(context_id, Context(instance, tokens, at_s, own=False))
        self._changed.pop(context_id, None)
        self._unlearned.add(context_id)
        return True

    def unlearned(self, context_id: str) -> Context | None:
        """Context of a session that last ran through another replica; None from the second call on."""
        if context_id not in self._unlearned:
            return None
        self._unlearned.discard(context_id)
        return self._known.get(context_id)

    def elsewhere(self, context_id: str, since_s: float) -> Context | None:
        """Context of a session that last ran through another replica, later than ``since_s``; else None."""
        known = self._known.get(context_id)
        return known if known is not None and not known.own and known.at_s > since_s else None

    def take_changes(self, most: int) -> list[tuple[str, Context]]:
        """At most ``most`` decisions of this replica that were not taken before, oldest first."""
        taken = []
        for context_id in list(islice(self._changed, most)):
            del self._changed[context_id]
            context = self._known.get(context_id)
            if context is not None and context.own:
                taken.append((context_id, context))
        return taken

    def announce_all(self) -> None:
        """Mark all sessions that last ran through this replica as changed."""
        self._changed = {context_id: None for context_id, context in self._known.items() if context.own}

    def forget(self, instance: str) -> None:
        """Drop the sessions of an instance that restarted or left. O(sessions)."""
        for context_id in [each for each, context in self._known.items() if context.instance == instance]:
            self._drop(context_id)

    def _keep(self, context_id: str, context: Context) -> None:
        self._known[context_id] = context
        self._known.move_to_end(context_id)
        while len(self._known) > self._capacity:
            self._drop(next(iter(self._known)))

    def _drop(self, context_id: str) -> None:
        del self._known[context_id]
        self._unlearned.discard(context_id)
        self._changed.pop(context_id, None)
