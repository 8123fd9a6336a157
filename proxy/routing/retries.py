"""Retry budget: a bound on retries, so that a failing fleet does not receive its load twice.

Over a sliding window, retries may be a share of the requests that arrived, plus a small allowance per second for times
of few requests: Finagle's ``RetryBudget`` (twitter/finagle, ``finagle-core``), also used by Linkerd and tower. A
request whose connection was refused is retried outside the budget, like gRPC's transparent retries (gRFC A6): no engine
has seen it, so it costs no engine time, and an engine that disappears loses all its waiting requests at once.
"""

from __future__ import annotations

from proxy.fleet.sliding_count import SlidingCount
from proxy.settings import LimitSettings

NO_RETRY_HEADER = b"x-warmroute-no-retry"
"""A client's header that requests a single attempt, unless its value is 0."""


class RetryBudget:
    """Counts requests and retries of one proxy. Times are seconds of one monotonic clock."""

    def __init__(self, limits: LimitSettings) -> None:
        self._window_s = limits.retry_window_s
        self._requests = SlidingCount(limits.retry_window_s)
        self._retries = SlidingCount(limits.retry_window_s)
        self.apply(limits)
        self.made = 0
        """Retries since the start within the budget."""
        self.unbudgeted = 0
        """Retries since the start of requests that no engine had received."""
        self.exhausted = 0
        """Failures since the start that were passed on because the budget was exhausted."""

    def apply(self, limits: LimitSettings) -> None:
        """Apply other limits. A different window resets the counts."""
        if limits.retry_window_s != self._window_s:
            self._window_s = limits.retry_window_s
            self._requests = SlidingCount(limits.retry_window_s)
            self._retries = SlidingCount(limits.retry_window_s)
        self._ratio = limits.retry_ratio
        self._reserve = limits.retry_min_per_s * limits.retry_window_s

    def arrived(self, now_s: float) -> None:
        """Count a request that is sent for the first time."""
        self._requests.add(now_s)

    def take(self, now_s: float, *, seen: bool) -> bool:
        """True if a failed request may be retried, which is counted. ``seen``: an engine has received it."""
        if not seen:
            self.unbudgeted += 1
            return True
        if self._retries.total(now_s) + 1 > self.allowance(now_s):
            self.exhausted += 1
            return False
        self._retries.add(now_s)
        self.made += 1
        return True

    def allowance(self, now_s: float) -> float:
        """Number of retries that the window permits at this moment."""
        return self._ratio * self._requests.total(now_s) + self._reserve

    def as_dict(self, now_s: float) -> dict[str, float]:
        """JSON-ready totals."""
        return {
            "retried": self.made,
            "retried_unseen": self.unbudgeted,
            "budget_exhausted": self.exhausted,
            "left": round(self.left(now_s), 1),
        }

    def left(self, now_s: float) -> float:
        """Number of further retries permitted at this moment."""
        return max(0.0, self.allowance(now_s) - self._retries.total(now_s))
