"""The line of held requests: who is sent when room appears, and after how long at the latest."""

from __future__ import annotations

from collections import deque

from policies.admission.accounts import SessionAccounts
from policies.admission.base import AdmissionReason, AdmissionRule, AdmissionView, Admit, Hold
from policies.admission.never_hold import NeverHold
from policies.types import RequestView

AGING_S = 30.0
"""A request that waited for this long counts half its tokens in the order of the line."""
RATE_WINDOW_S = 60.0
"""Seconds over which the flow of admitted tokens is measured."""
LEAST_WINDOW_S = 15.0
"""Seconds after which the flow is known."""


class Held:
    """A held request."""

    __slots__ = ("admitted", "hold", "request", "since_s")

    def __init__(self, request: RequestView, since_s: float, hold: Hold) -> None:
        self.request = request
        self.since_s = since_s
        self.hold = hold
        """Reason for waiting, as of the last look at the line."""
        self.admitted: Admit | None = None
        """Set when it may be sent."""


class AdmissionGate:
    """Decides with a rule and keeps the line. Synchronous; the caller sends what ``examine`` returns.

    Order: fewest tokens first, since short ones take little room and their sessions are served sooner on average; a
    request that has waited ``w`` seconds counts ``tokens / (1 + w / AGING_S)``. One that does not fit does not block
    the others. After ``max_hold_s`` it is sent regardless, so no request waits longer.
    """

    def __init__(self, rule: AdmissionRule, accounts: SessionAccounts, max_hold_s: float = 300.0) -> None:
        self.accounts = accounts
        self.sent_at_once = Admit(AdmissionReason.NEVER_HOLDS)
        self._line: dict[Held, None] = {}
        self._flow: deque[tuple[float, int]] = deque()
        self._held_since_s = 0.0
        self.set_rule(rule, max_hold_s, 0.0)

    def set_rule(self, rule: AdmissionRule, max_hold_s: float, now_s: float) -> None:
        """Another rule and bound; held requests stay in line and are judged by it at the next look."""
        self.rule = rule
        self.never_holds = isinstance(rule, NeverHold)
        self.max_hold_s = max_hold_s
        self.accounts.set_keep(rule.keep_s, now_s)

    def __len__(self) -> int:
        return len(self._line)

    def offer(self, request: RequestView, pool_tokens: int, instances: int, now_s: float) -> Admit | Held:
        """A new request: send it now, or hold it."""
        answer = self.answer(request, pool_tokens, instances, now_s)
        if isinstance(answer, Admit):
            self._passed(answer, request, now_s)
            return answer
        if not self._line:
            self._held_since_s = now_s
            self._flow.clear()
        held = Held(request, now_s, answer)
        self._line[held] = None
        return held

    def answer(self, request: RequestView, pool_tokens: int, instances: int, now_s: float) -> Admit | Hold:
        """Decision of ``offer`` without its effects."""
        ahead = [held for held in self._line if _rank(held, now_s) <= request.prompt_tokens]
        return self._ask(request, 0.0, ahead, len(self._line), pool_tokens, instances, now_s)

    def leave(self, held: Held) -> None:
        """The client of a held request has left."""
        self._line.pop(held, None)

    def examine(self, pool_tokens: int, instances: int, now_s: float) -> Held | None:
        """The next request that may be sent, taken out of the line; the caller sends it and asks again."""
        ahead: list[Held] = []
        for held in sorted(self._line, key=lambda each: _rank(each, now_s)):
            waited_s = now_s - held.since_s
            if waited_s >= self.max_hold_s:
                answer: Admit | Hold = Admit(AdmissionReason.HELD_LONG_ENOUGH)
            else:
                answer = self._ask(held.request, waited_s, ahead, len(self._line) - 1, pool_tokens, instances, now_s)
            if isinstance(answer, Admit):
                self._passed(answer, held.request, now_s)
                del self._line[held]
                held.admitted = answer
                return held
            held.hold = answer
            ahead.append(held)
        return None

    def _ask(
        self,
        request: RequestView,
        waited_s: float,
        ahead: list[Held],
        held: int,
        pool_tokens: int,
        instances: int,
        now_s: float,
    ) -> Admit | Hold:
        accounts = self.accounts
        accounts.expire(now_s)
        expected_s = self._expected_wait_s(
            request.prompt_tokens + sum(each.request.prompt_tokens for each in ahead), now_s
        )
        fleet = AdmissionView(
            pool_tokens,
            accounts.active_sessions,
            accounts.active_tokens,
            accounts.kept_sessions,
            accounts.kept_tokens,
            accounts.lost_share(instances, now_s),
            accounts.return_share,
            instances,
            held,
            expected_s,
            self.max_hold_s,
        )
        answer = self.rule.admit(request, accounts.view(request.session_id, now_s, waited_s), fleet)
        return answer if isinstance(answer, Admit) else answer._replace(expected_wait_s=expected_s, behind=len(ahead))

    def _passed(self, answer: Admit, request: RequestView, now_s: float) -> None:
        if self._line and answer.reason is not AdmissionReason.RESIDENT:
            self._flow.append((now_s, request.prompt_tokens))

    def _expected_wait_s(self, tokens: int, now_s: float) -> float:
        """Seconds until ``tokens`` have been admitted at the flow of the last minute; 0 while that is unknown."""
        if not self._line:
            return 0.0
        flow, oldest_s = self._flow, now_s - RATE_WINDOW_S
        while flow and flow[0][0] < oldest_s:
            flow.popleft()
        window_s = min(RATE_WINDOW_S, now_s - self._held_since_s)
        if window_s < LEAST_WINDOW_S:
            return 0.0
        return tokens * window_s / max(1, sum(each for _, each in flow))


def _rank(held: Held, now_s: float) -> float:
    return held.request.prompt_tokens / (1.0 + (now_s - held.since_s) / AGING_S)
