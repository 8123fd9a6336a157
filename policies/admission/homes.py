"""Contexts by instance: a session's context is where its last request was sent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from policies.admission.base import InstanceUse
from policies.types import InstanceView, RequestView

Contexts = tuple[int, int, int, int]
"""Sessions in flight, their tokens, kept sessions, their tokens."""
_NONE: Contexts = (0, 0, 0, 0)
POOL_FILL = 0.95
"""Of a KV pool, what contexts fill before one evicts another; partly filled blocks take the rest."""


class RemoteContexts(NamedTuple):
    """Sums of the other replicas' accounts; each session is in the account of the one that it ran through last."""

    active_sessions: int = 0
    active_tokens: int = 0
    kept_sessions: int = 0
    kept_tokens: int = 0
    lost_shares: Mapping[str, float] = MappingProxyType({})
    """Share of each instance's time that recomputing evicted contexts of their sessions took."""
    held: int = 0
    """Requests that their admission rules hold."""

    def beside(self, contexts: Contexts) -> Contexts:
        """Own contexts and theirs."""
        active_sessions, active, kept_sessions, kept = contexts
        return (
            self.active_sessions + active_sessions,
            self.active_tokens + active,
            self.kept_sessions + kept_sessions,
            self.kept_tokens + kept,
        )

    def lost_share(self, instances: int, among: Collection[str] = ()) -> float:
        """Share of the time of ``instances`` that was lost on those ``among`` them; empty: on all."""
        if not self.lost_shares or not instances:
            return 0.0
        lost = self.lost_shares
        return sum([lost.get(name, 0.0) for name in among] if among else lost.values()) / instances


class Home:
    """Contexts in flight and kept on one instance; sessions and tokens.

    Its numbers are changed by the sessions' owner; in flight in place, since that is part of every request.
    """

    __slots__ = ("active_sessions", "active_tokens", "kept_sessions", "kept_tokens")

    def __init__(self) -> None:
        self.active_sessions = 0
        self.active_tokens = 0
        self.kept_sessions = 0
        self.kept_tokens = 0

    def keep(self, tokens: int) -> None:
        """A session without a request in flight that may return."""
        self.kept_sessions += 1
        self.kept_tokens += tokens

    def drop(self, tokens: int) -> None:
        """It has returned, or is kept no longer."""
        self.kept_sessions -= 1
        self.kept_tokens -= tokens

    def contexts(self) -> Contexts:
        """Its four numbers."""
        return self.active_sessions, self.active_tokens, self.kept_sessions, self.kept_tokens


class Homes:
    """Homes of the fleet's instances. One that has left the fleet is counted to nobody's sight until it is empty."""

    def __init__(self) -> None:
        self.by_name: dict[str, Home] = {}
        self.elsewhere = Home()
        """Of sessions on instances that are not in the fleet; nobody reads it."""
        self._remote: dict[str, Contexts] = {}
        """Of other replicas of the proxy, by instance."""

    def add(self, instance: str) -> None:
        """Idempotent."""
        self.by_name.setdefault(instance, Home())

    def remove(self, instance: str) -> None:
        """Sessions of a removed instance are on none of the fleet's until their next request."""
        self.by_name.pop(instance, None)

    def contexts(self) -> dict[str, Contexts]:
        """Contexts of each instance that has any."""
        return {name: found for name, home in self.by_name.items() if any(found := home.contexts())}

    def set_elsewhere(self, replicas: Iterable[Mapping[str, Contexts]]) -> None:
        """Replace the contexts of other replicas of the proxy, each replica's by instance."""
        sums: dict[str, Contexts] = {}
        for replica in replicas:
            for name, (active_sessions, active, kept_sessions, kept) in replica.items():
                before = sums.get(name, _NONE)
                sums[name] = (
                    before[0] + active_sessions,
                    before[1] + active,
                    before[2] + kept_sessions,
                    before[3] + kept,
                )
        self._remote = sums

    def sums_elsewhere(self) -> Contexts:
        """Contexts of other replicas on all instances."""
        each = self._remote.values()
        return sum(c[0] for c in each), sum(c[1] for c in each), sum(c[2] for c in each), sum(c[3] for c in each)

    def evicted(
        self, request: RequestView, views: Iterable[InstanceView], own: Home | None, own_tokens: int
    ) -> dict[str, float]:
        """Tokens of kept contexts that a request's KV evicts, by instance; without those where it evicts none.

        Args:
            request: what it has cached on an instance takes no more room there.
            views: the instances, as the request sees them; a pool of unknown size counts as having room.
            own: where the context of its own session is kept, of ``own_tokens``; None: it is not kept.
        """
        evicted: dict[str, float] = {}
        for view in views:
            home = self.by_name.get(view.instance)
            if home is None or not view.kv_capacity_tokens:
                continue
            _, active, _, kept = self._remote.get(view.instance, _NONE)
            active, kept = active + home.active_tokens, kept + home.kept_tokens
            free = max(0.0, POOL_FILL * view.kv_capacity_tokens - active - kept)
            of_others = kept - own_tokens if home is own else kept
            tokens = min(request.prompt_tokens - view.cached_tokens - free, of_others)
            if tokens > 0:
                evicted[view.instance] = tokens
        return evicted

    def uses(self, each: Iterable[tuple[str, int, int]]) -> tuple[InstanceUse, ...]:
        """Contexts of instances given by name, pool and requests without a first token."""
        homes, remote, new = self.by_name, self._remote, tuple.__new__
        uses = []
        for name, pool, prefilling in each:
            home = homes.get(name, self.elsewhere)
            active_sessions, active = home.active_sessions, home.active_tokens
            kept_sessions, kept = home.kept_sessions, home.kept_tokens
            if remote and name in remote:
                more = remote[name]
                active_sessions, active = active_sessions + more[0], active + more[1]
                kept_sessions, kept = kept_sessions + more[2], kept + more[3]
            uses.append(new(InstanceUse, (name, pool, active_sessions, active, kept_sessions, kept, prefilling)))
        return tuple(uses)


def sums_of(uses: Iterable[InstanceUse]) -> Contexts:
    """Contexts on all of these instances."""
    active_sessions = active = kept_sessions = kept = 0
    for use in uses:
        active_sessions, active = active_sessions + use.active_sessions, active + use.active_tokens
        kept_sessions, kept = kept_sessions + use.kept_sessions, kept + use.kept_tokens
    return active_sessions, active, kept_sessions, kept
