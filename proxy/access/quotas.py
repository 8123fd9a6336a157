"""Limits of a client key: requests in flight, sessions, requests and tokens per minute."""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import StrEnum
from math import ceil, inf
from typing import Any, NamedTuple

import xxhash

from policies.row import RequestOutcome
from policies.types import Tenant
from proxy.errors import RequestError
from proxy.settings import ClientKey

SESSION_S = 60.0
"""Seconds after its last request for which a session counts: agents' tools usually answer within that time."""


class KeyLimit(StrEnum):
    """Limit of a key, by the name of its setting: closed set used in messages and as a metric's label."""

    CONCURRENT = "max_concurrent"
    SESSIONS = "max_sessions"
    REQUESTS = "max_requests_per_min"
    TOKENS = "max_tokens_per_min"


class KeyLimitError(RequestError):
    """429: a limit of the request's key is reached."""

    outcome = RequestOutcome.REJECTED

    def __init__(self, limit: KeyLimit, bound: int, what: str, retry_after_s: float) -> None:
        super().__init__(
            429,
            f"{what} with this API key: its maximum is {bound} ({limit.value})",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after_s=max(1, ceil(retry_after_s)),
        )


class KeyUse(NamedTuple):
    """Use of one key on one replica, as it is shared with the others."""

    in_flight: int = 0
    requests: int = 0
    """Requests counted since the start, if they are limited."""
    tokens: int = 0
    requests_left: float = inf
    """Left of the minute's requests; without a limit infinite."""
    tokens_left: float = inf
    sessions: frozenset[int] = frozenset()
    """Digests of the sessions that count."""


class UseElsewhere(NamedTuple):
    """Use of one key on all other replicas."""

    in_flight: int = 0
    sessions: frozenset[int] = frozenset()


_NOWHERE = UseElsewhere()


class Allowance:
    """One minute's amount that refills evenly; full at first. What is spent may overdraw it."""

    __slots__ = ("_left", "_seen_s", "per_min")

    def __init__(self, per_min: int, now_s: float) -> None:
        self.per_min = per_min
        self._left = float(per_min)
        self._seen_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until one unit is left; 0: it is."""
        self._left = min(self.per_min, self._left + (now_s - self._seen_s) * self.per_min / 60.0)
        self._seen_s = now_s
        return max(0.0, (1.0 - self._left) * 60.0 / self.per_min)

    def spend(self, amount: int) -> None:
        """Take an amount; the time is that of the last ``wait_s``."""
        self._left -= amount

    def left(self, now_s: float) -> float:
        """Amount that is left; negative if overdrawn."""
        self.wait_s(now_s)
        return self._left

    def change(self, per_min: int, now_s: float) -> None:
        """Apply another amount per minute. What is spent stays spent, but a lower amount overdraws nothing."""
        left = self.left(now_s)
        self._left = max(left + per_min - self.per_min, min(left, 0.0))
        self.per_min = per_min

    def lower(self, left: float) -> None:
        """Leave at most this much."""
        self._left = min(self._left, left)


class Quota:
    """Use of one client key against its limits. Requests in flight, at most ``max_sessions`` sessions, two numbers."""

    def __init__(self, key: ClientKey, now_s: float) -> None:
        self.in_flight = 0
        self.elsewhere = _NOWHERE
        """Use on other replicas, kept by their reader."""
        self._digested: frozenset[int] | None = None
        """Digests of the sessions; None: one has come or gone."""
        self.changes = 0
        """Number of changes of the use."""
        self._requests_counted = 0
        self._tokens_counted = 0
        self.refused: Counter[KeyLimit] = Counter()
        self._active: Counter[str] = Counter()
        """Sessions with requests in flight, and how many."""
        self._idle: OrderedDict[str, float] = OrderedDict()
        """Other sessions and the ends of their last requests, oldest first."""
        self._requests: Allowance | None = None
        self._tokens: Allowance | None = None
        self.apply(key, now_s)

    def apply(self, key: ClientKey, now_s: float) -> None:
        """Apply other limits of the same key; what is in flight stays counted."""
        self.tenant = Tenant(key.name, key.weight, key.priority)
        self.allow_priority = key.allow_priority
        self.names_tenant = key.names_tenant
        self._max_concurrent = key.max_concurrent
        self._max_sessions = key.max_sessions
        self._requests = _allowance(self._requests, key.max_requests_per_min, now_s)
        self._tokens = _allowance(self._tokens, key.max_tokens_per_min, now_s)
        if key.max_sessions is None:
            self._active.clear()
            self._idle.clear()
            self._digested = None

    def enter(self, now_s: float) -> None:
        """Count a request as in flight; ``leave`` must follow.

        Raises:
            KeyLimitError: a limit is reached; the request is not counted.
        """
        bound = self._max_concurrent
        if bound is not None and self.in_flight + self.elsewhere.in_flight >= bound:
            raise self._refusal(
                KeyLimit.CONCURRENT,
                bound,
                "1 request is in flight" if bound == 1 else f"{bound} requests are in flight",
                1.0,
            )
        requests, tokens = self._requests, self._tokens
        if requests is not None and (wait_s := requests.wait_s(now_s)):
            raise self._refusal(KeyLimit.REQUESTS, requests.per_min, "too many requests per minute", wait_s)
        if tokens is not None and (wait_s := tokens.wait_s(now_s)):
            raise self._refusal(KeyLimit.TOKENS, tokens.per_min, "too many tokens per minute", wait_s)
        if requests is not None:
            requests.spend(1)
            self._requests_counted += 1
        self.in_flight += 1
        self.changes += 1

    def begin(self, session: str, now_s: float) -> bool:
        """Count a request of a session; True: ``end`` must follow.

        Raises:
            KeyLimitError: it is a new session, and there are as many as permitted.
        """
        bound = self._max_sessions
        if bound is None:
            return False
        if session not in self._active and self._idle.pop(session, None) is None:
            self._expire(now_s)
            if self._sessions_beside(session) >= bound:
                # With all in flight nobody knows when one ends.
                wait_s = next(iter(self._idle.values())) + SESSION_S - now_s if self._idle else 5.0
                raise self._refusal(
                    KeyLimit.SESSIONS,
                    bound,
                    "1 session is active" if bound == 1 else f"{bound} sessions are active",
                    wait_s,
                )
            self._digested = None
        self._active[session] += 1
        self.changes += 1
        return True

    def end(self, session: str, now_s: float, *, keep: bool) -> None:
        """End a request of a session; ``keep``: the session counts for ``SESSION_S`` seconds more."""
        self.changes += 1
        self._active[session] -= 1
        if self._active[session] > 0:
            return
        del self._active[session]
        if keep and self._max_sessions is not None:
            self._idle[session] = now_s
        else:
            self._digested = None

    def spend(self, tokens: int, now_s: float) -> None:
        """Count tokens of a prompt or of an answer; negative: give back what an estimate was too high by."""
        if self._tokens is not None:
            self._tokens.wait_s(now_s)
            self._tokens.spend(tokens)
            self._tokens_counted += tokens
            self.changes += 1

    def leave(self) -> None:
        """End a request counted by ``enter``."""
        self.in_flight -= 1
        self.changes += 1

    @property
    def limited(self) -> bool:
        """True if the key has a limit."""
        limits = (self._max_concurrent, self._max_sessions, self._requests, self._tokens)
        return any(limit is not None for limit in limits)

    def use(self, now_s: float) -> KeyUse:
        """Use of the key on this replica."""
        self._expire(now_s)
        return KeyUse(
            self.in_flight,
            self._requests_counted,
            self._tokens_counted,
            inf if self._requests is None else self._requests.left(now_s),
            inf if self._tokens is None else self._tokens.left(now_s),
            self._digests(),
        )

    def spent_elsewhere(self, requests: int, tokens: int, now_s: float) -> None:
        """Take from this minute's amounts what another replica has counted."""
        for allowance, amount in ((self._requests, requests), (self._tokens, tokens)):
            if allowance is not None and amount:
                allowance.wait_s(now_s)
                allowance.spend(amount)

    def begin_at(self, use: KeyUse, now_s: float) -> None:
        """Leave no more of this minute's amounts than another replica has, which has counted for longer."""
        for allowance, left in ((self._requests, use.requests_left), (self._tokens, use.tokens_left)):
            if allowance is not None:
                allowance.wait_s(now_s)
                allowance.lower(left)

    def as_dict(self, now_s: float) -> dict[str, Any]:
        """JSON-ready."""
        self._expire(now_s)
        return {
            "weight": self.tenant.weight,
            "priority": self.tenant.priority,
            "requests": self.in_flight,
            "sessions": len(self._active) + len(self._idle) if self._max_sessions is not None else None,
            "refused": {limit.value: count for limit, count in self.refused.items()},
        }

    def _expire(self, now_s: float) -> None:
        while self._idle and next(iter(self._idle.values())) <= now_s - SESSION_S:
            self._idle.popitem(last=False)
            self._digested = None

    def _sessions_beside(self, session: str) -> int:
        """Sessions that count, on all replicas; a bound is no obstacle for one that another replica counts: -1."""
        elsewhere = self.elsewhere.sessions
        if not elsewhere:
            return len(self._active) + len(self._idle)
        return -1 if _digest(session) in elsewhere else len(elsewhere | self._digests())

    def _digests(self) -> frozenset[int]:
        if self._digested is None:
            self._digested = frozenset(_digest(session) for session in (*self._active, *self._idle))
        return self._digested

    def _refusal(self, limit: KeyLimit, bound: int, what: str, retry_after_s: float) -> KeyLimitError:
        self.refused[limit] += 1
        return KeyLimitError(limit, bound, what, retry_after_s)


def _digest(session: str) -> int:
    return xxhash.xxh3_64_intdigest(session.encode("utf-8", "surrogatepass"))


def _allowance(old: Allowance | None, per_min: int | None, now_s: float) -> Allowance | None:
    if per_min is None:
        return None
    if old is None:
        return Allowance(per_min, now_s)
    old.change(per_min, now_s)
    return old
