"""The retry budget: how many requests may be tried again, so that a fleet in trouble is not sent its load twice.

Over a sliding window, retries may be a share of the requests that arrived, plus a small allowance per second for times
of few requests: Finagle's ``RetryBudget`` (twitter/finagle, ``finagle-core``), which Linkerd and tower have too. A
request whose connection was refused is tried again outside the budget, as gRPC's transparent retries are (gRFC A6): no
engine has seen it, so it costs none anything, and an engine that is gone loses its waiting requests all at once.
"""

from __future__ import annotations

from proxy.fleet.sliding_count import SlidingCount
from proxy.settings import LimitSettings

NO_RETRY_HEADER = b"x-warmroute-no-retry"
"""A client's header that asks for one attempt only, unless it says 0."""


class RetryBudget:
    """Counts requests and retries of one proxy. Times are seconds of one monotonic clock."""

    def __init__(self, limits: LimitSettings) -> None:
        self._window_s = limits.retry_window_s
        self._requests = SlidingCount(limits.retry_window_s)
        self._retries = SlidingCount(limits.retry_window_s)
        self.apply(limits)
        self.made = 0
        """Retries since the start that came out of the budget."""
        self.unbudgeted = 0
        """Retries since the start of requests that no engine had seen."""
        self.exhausted = 0
        """Failures since the start that were passed on because nothing was left."""

    def apply(self, limits: LimitSettings) -> None:
        """Take over other limits. With another window the counts start anew."""
        if limits.retry_window_s != self._window_s:
            self._window_s = limits.retry_window_s
            self._requests = SlidingCount(limits.retry_window_s)
            self._retries = SlidingCount(limits.retry_window_s)
        self._ratio = limits.retry_ratio
        self._reserve = limits.retry_min_per_s * limits.retry_window_s

    def arrived(self, now_s: float) -> None:
        """A request is sent for the first time."""
        self._requests.add(now_s)

    def take(self, now_s: float, *, seen: bool) -> bool:
        """Whether a request that failed may be tried again; counts it if so. ``seen``: an engine has had it."""
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
        """Retries that the window may hold at this moment."""
        return self._ratio * self._requests.total(now_s) + self._reserve

    def as_dict(self, now_s: float) -> dict[str, float]:
        """JSON-ready."""
        return {
            "retried": self.made,
            "retried_unseen": self.unbudgeted,
            "budget_exhausted": self.exhausted,
            "left": round(self.left(now_s), 1),
        }

    def left(self, now_s: float) -> float:
        """Retries that may be made at this moment."""
        return max(0.0, self.allowance(now_s) - self._retries.total(now_s))
