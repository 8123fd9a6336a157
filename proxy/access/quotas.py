"""Limits of a client key: requests in flight, sessions, requests and tokens per minute."""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import StrEnum
from math import ceil
from typing import Any

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


class Quota:
    """Use of one client key against its limits. Requests in flight, at most ``max_sessions`` sessions, two numbers."""

    def __init__(self, key: ClientKey, now_s: float) -> None:
        self.in_flight = 0
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

    def enter(self, now_s: float) -> None:
        """Count a request as in flight; ``leave`` must follow.

        Raises:
            KeyLimitError: a limit is reached; the request is not counted.
        """
        bound = self._max_concurrent
        if bound is not None and self.in_flight >= bound:
            raise self._refusal(KeyLimit.CONCURRENT, bound, f"{bound} requests are in flight", 1.0)
        requests, tokens = self._requests, self._tokens
        if requests is not None and (wait_s := requests.wait_s(now_s)):
            raise self._refusal(KeyLimit.REQUESTS, requests.per_min, "too many requests per minute", wait_s)
        if tokens is not None and (wait_s := tokens.wait_s(now_s)):
            raise self._refusal(KeyLimit.TOKENS, tokens.per_min, "too many tokens per minute", wait_s)
        if requests is not None:
            requests.spend(1)
        self.in_flight += 1

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
            if len(self._active) + len(self._idle) >= bound:
                # With all in flight nobody knows when one ends.
                wait_s = next(iter(self._idle.values())) + SESSION_S - now_s if self._idle else 5.0
                raise self._refusal(KeyLimit.SESSIONS, bound, f"{bound} sessions are active", wait_s)
        self._active[session] += 1
        return True

    def end(self, session: str, now_s: float, *, keep: bool) -> None:
        """End a request of a session; ``keep``: the session counts for ``SESSION_S`` seconds more."""
        self._active[session] -= 1
        if self._active[session] > 0:
            return
        del self._active[session]
        if keep and self._max_sessions is not None:
            self._idle[session] = now_s

    def spend(self, tokens: int, now_s: float) -> None:
        """Count tokens of a prompt or of an answer."""
        if self._tokens is not None:
            self._tokens.wait_s(now_s)
            self._tokens.spend(tokens)

    def leave(self) -> None:
        """End a request counted by ``enter``."""
        self.in_flight -= 1

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

    def _refusal(self, limit: KeyLimit, bound: int, what: str, retry_after_s: float) -> KeyLimitError:
        self.refused[limit] += 1
        return KeyLimitError(limit, bound, what, retry_after_s)


def _allowance(old: Allowance | None, per_min: int | None, now_s: float) -> Allowance | None:
    if per_min is None or (old is not None and old.per_min == per_min):
        return None if per_min is None else old
    return Allowance(per_min, now_s)
