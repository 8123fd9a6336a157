"""Recent contexts: the working set of the last minutes, weighted by the share used again, and where they were sent."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

WINDOW_S = 900.0
"""The time for which an unused context counts. Of the waits for the next turn in 150 sessions of Claude Code
(kv-cache-tester) 97 % are shorter, in ``mooncake`` 98 %.
"""
EXTRAPOLATED_S = 500.0
"""Until so much time has passed, the contexts that it will bring are estimated from those seen. With 400 and 450 fleets
with small pools thrashed, and 550 gave up a gain (docs/decisions/0020-joint-placement.md).
"""
CAPACITY = 100_000
"""Most sessions that are remembered."""


class _Sent(NamedTuple):
    """The last request of a session."""

    instance: str
    """Instance that it decodes on; empty if that has lost its KV since."""
    tokens: int
    """Of its prompt."""
    at_s: float
    request_id: str | None
    heavy: bool
    """An attempt at it was HEAVY."""


class RecentContexts:
    """Sessions whose last request was sent within ``WINDOW_S``. Single writer; O(1) per call, amortised."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _Sent] = OrderedDict()
        """The last request of each, the oldest first."""
        self._tokens = 0
        self._by_instance: dict[str, int] = {}
        self._began_s: float | None = None
        self.return_share = 1.0
        """Share of requests that another one of their session follows within the window, lately. Begins at 1: what is
        not known yet may return.
        """

    def __len__(self) -> int:
        return len(self._sessions)

    def sent(
        self,
        session: str,
        instance: str,
        prompt_tokens: int,
        now_s: float,
        memory: int,
        request_id: str | None = None,
        *,
        heavy: bool = False,
    ) -> bool:
        """A request of the session is sent to ``instance``, where it decodes.

        The share of returns is averaged over the last ``memory`` of them. A further attempt at the session's last
        request, by its id, moves the context but is no return.

        Returns:
            True if the attempt is HEAVY, and the first one of its request that is.
        """
        if self._began_s is None:
            self._began_s = now_s
        self._expire(now_s, memory)
        before, counted = self._sessions.pop(session, None), False
        if before is not None:
            self._uncount(before)
            if request_id is None or before.request_id != request_id:
                self._followed(1.0, memory)
            else:
                counted = before.heavy
        self._sessions[session] = _Sent(instance, prompt_tokens, now_s, request_id, heavy or counted)
        self._tokens += prompt_tokens
        self._by_instance[instance] = self._by_instance.get(instance, 0) + prompt_tokens
        if len(self._sessions) > CAPACITY:
            self._drop_oldest()
        return heavy and not counted

    def by_instance(self, session: str) -> dict[str, int]:
        """Tokens by the instance that their session's last request was sent to, without those of ``session``.

        O(n) in instances. Instances without any may be missing.
        """
        tokens, own = self._by_instance.copy(), self._sessions.get(session)
        if own is not None and own.instance in tokens:
            tokens[own.instance] -= own.tokens
        return tokens

    def lost(self, instance: str) -> None:
        """The instance has lost its KV: no context is there any more, though each still counts. O(n) in sessions."""
        if self._by_instance.pop(instance, None) is not None:
            for session, each in self._sessions.items():
                if each.instance == instance:
                    self._sessions[session] = each._replace(instance="")

    def working_set_tokens(self, active_tokens: int, now_s: float) -> int:
        """Tokens in use and, weighted by the share that returns, those used within the window.

        In the first ``EXTRAPOLATED_S``, those not in use are extrapolated to it from the time known so far: caches that
        fill up look roomy.

        Args:
            active_tokens: Contexts in flight.
            now_s: The time.
        """
        if self._began_s is None:
            return active_tokens
        known_s = max(1.0, min(EXTRAPOLATED_S, now_s - self._began_s))
        idle = max(0, self._tokens - active_tokens)
        return active_tokens + int(self.return_share * idle * EXTRAPOLATED_S / known_s)

    def _expire(self, now_s: float, memory: int) -> None:
        sessions, oldest_s = self._sessions, now_s - WINDOW_S
        while sessions and next(iter(sessions.values())).at_s <= oldest_s:
            self._drop_oldest()
            self._followed(0.0, memory)

    def _drop_oldest(self) -> None:
        _, oldest = self._sessions.popitem(last=False)
        self._uncount(oldest)

    def _uncount(self, sent: _Sent) -> None:
        self._tokens -= sent.tokens
        if sent.instance in self._by_instance:
            self._by_instance[sent.instance] -= sent.tokens

    def _followed(self, followed: float, memory: int) -> None:
        self.return_share += (followed - self.return_share) / memory
