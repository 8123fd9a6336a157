"""Contexts by instance: a session's context is where its last request was sent."""

from __future__ import annotations

from collections.abc import Iterable

from policies.admission.base import InstanceUse


class Home:
    """Contexts in flight and kept on one instance; sessions and tokens."""

    __slots__ = ("active_sessions", "active_tokens", "kept_sessions", "kept_tokens")

    def __init__(self) -> None:
        self.active_sessions = 0
        self.active_tokens = 0
        self.kept_sessions = 0
        self.kept_tokens = 0

    def activate(self, tokens: int) -> None:
        """A session's first request in flight."""
        self.active_sessions += 1
        self.active_tokens += tokens

    def deactivate(self, tokens: int) -> None:
        """Its last one in flight has ended, or it moved to another instance."""
        self.active_sessions -= 1
        self.active_tokens -= tokens

    def keep(self, tokens: int) -> None:
        """A session without a request in flight that may return."""
        self.kept_sessions += 1
        self.kept_tokens += tokens

    def drop(self, tokens: int) -> None:
        """It has returned, or is kept no longer."""
        self.kept_sessions -= 1
        self.kept_tokens -= tokens


class Homes:
    """Homes of the fleet's instances. One that has left the fleet is counted to nobody's sight until it is empty."""

    def __init__(self) -> None:
        self._homes: dict[str, Home] = {}
        self._elsewhere = Home()

    def add(self, instance: str) -> None:
        """Idempotent."""
        self._homes.setdefault(instance, Home())

    def remove(self, instance: str) -> None:
        """Sessions of a removed instance are on none of the fleet's until their next request."""
        self._homes.pop(instance, None)

    def of(self, instance: str) -> Home:
        """The instance's; for an unknown one, one that nobody sees."""
        return self._homes.get(instance, self._elsewhere)

    def uses(self, each: Iterable[tuple[str, int, int]]) -> tuple[InstanceUse, ...]:
        """Contexts of instances given by name, pool and requests without a first token."""
        homes, new = self._homes, tuple.__new__
        uses = []
        for name, pool, prefilling in each:
            home = homes.get(name, self._elsewhere)
            uses.append(
                new(
                    InstanceUse,
                    (
                        name,
                        pool,
                        home.active_sessions,
                        home.active_tokens,
                        home.kept_sessions,
                        home.kept_tokens,
                        prefilling,
                    ),
                )
            )
        return tuple(uses)
