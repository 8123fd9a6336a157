"""Circuit breaker of one engine: a pure state machine over request results, with the time as an argument.

Closed permits all requests, open none, half-open a few trial requests. The breaker opens after consecutive failures, or
when too large a share of the requests within a sliding window failed, or at once when a connection is refused. A
successful probe after the open time only makes it half-open, because an engine whose scheduler hangs still answers
``/health``; only an answer to a request sent since then closes it.

Every opening soon after a closing doubles the open time (flap damping); time spent closed reverses the doublings.
The states and the trial requests are those of the circuit breaker in M. Nygard, Release It!, 2nd ed., ch. 5.
"""

from __future__ import annotations

from enum import StrEnum

from proxy.fleet.sliding_count import SlidingCount
from proxy.settings import HealthSettings

_MOST_DOUBLINGS = 30


class BreakerState(StrEnum):
    """State of the breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Trial:
    """Slot of one trial request on a half-open engine; ``end`` frees it."""

    __slots__ = ("_breaker", "_half_opened")

    def __init__(self, breaker: Breaker, half_opened: int) -> None:
        self._breaker = breaker
        self._half_opened = half_opened

    def end(self) -> None:
        """Free the slot, with or without a result. Later calls do nothing."""
        self._breaker._end_trial(self._half_opened)
        self._half_opened = -1


class Breaker:
    """One engine's breaker. Times are seconds of one monotonic clock."""

    __slots__ = (
        "_broken_off",
        "_closed_s",
        "_doubted_until_s",
        "_failures",
        "_half_opened",
        "_judged_since_s",
        "_not_begun",
        "_requests",
        "_settings",
        "_undone",
        "doublings",
        "openings",
        "state",
        "trials",
        "until_s",
        "why",
    )

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._requests = SlidingCount(settings.window_s)
        self._failures = SlidingCount(settings.window_s)
        self._not_begun = 0
        self._broken_off = 0
        self._closed_s: float | None = None
        self._half_opened = 0
        self._doubted_until_s = float("-inf")
        self._undone: int | None = None
        """While open because of counted failures: the doublings before; else None."""
        # Results of requests sent earlier do not describe the current engine.
        self._judged_since_s = float("-inf")
        self.state = BreakerState.CLOSED
        self.why: str | None = None
        """Reason of the last opening; None while closed."""
        self.until_s = 0.0
        """While open: probes are ignored before this time."""
        self.openings = 0
        self.doublings = 0
        """Number of doublings of the open time now in effect."""
        self.trials = 0
        """Trial requests in flight; 0 unless half-open."""

    @property
    def failures_in_a_row(self) -> int:
        """Failures since the last success: those before the first byte since the last first byte, plus broken streams.

        A broken stream is only cleared by a complete answer: an engine that breaks all its streams also begins them.
        """
        return self._not_begun + self._broken_off

    def apply(self, settings: HealthSettings) -> None:
        """Apply other settings. A different window resets its counts."""
        if settings.window_s != self._settings.window_s:
            self._requests = SlidingCount(settings.window_s)
            self._failures = SlidingCount(settings.window_s)
        self._settings = settings

    @property
    def permits(self) -> bool:
        """True if one more request may be sent."""
        if self.state is BreakerState.CLOSED:
            return True
        return self.state is BreakerState.HALF_OPEN and self.trials < self._settings.trial_requests

    def begin_trial(self) -> Trial | None:
        """Count a request that is sent now as a trial; None unless the breaker is half-open."""
        if self.state is not BreakerState.HALF_OPEN:
            return None
        self.trials += 1
        return Trial(self, self._half_opened)

    def succeeded(self, now_s: float, sent_s: float) -> bool:
        """Record the first byte of a request that was sent at ``sent_s``. True if that closed the breaker."""
        if self.state is BreakerState.CLOSED:
            self._not_begun = 0
            self._requests.add(now_s)
            return False
        if self.state is BreakerState.HALF_OPEN and sent_s >= self._judged_since_s:
            self._close(now_s)
            return True
        return False

    def completed(self) -> None:
        """Record the end of an answer that was reported to ``succeeded``."""
        self._broken_off = 0

    def counts(self, sent_s: float) -> bool:
        """True if a failure of a request that was sent at ``sent_s`` would be counted, its connection not refused."""
        return self.state is not BreakerState.OPEN and sent_s >= self._judged_since_s

    def failed(self, now_s: float, why: str, sent_s: float, *, refused: bool = False, answered: bool = False) -> bool:
        """Record the failure of a request that was sent at ``sent_s``. True if that opened the breaker.

        Args:
            now_s: current time.
            why: description of the failure, for display.
            sent_s: when the request was sent. A request sent before the last trial began, or before the engine
                restarted, is ignored.
            refused: the connection was refused.
            answered: its answer had begun, as reported to ``succeeded``, and broke off.
        """
        if self.state is BreakerState.OPEN or not (refused or self.counts(sent_s)):
            return False
        if self.state is BreakerState.HALF_OPEN:
            self._open(now_s, why, refused)
            return True
        self._failures.add(now_s)
        if answered:
            self._broken_off += 1
        else:
            self._not_begun += 1
            self._requests.add(now_s)
        reason = why if refused else self._too_many(now_s, why)
        if reason is None:
            return False
        before = None if refused else self.doublings
        self._open(now_s, reason, refused)
        self._undone = before
        return True

    def forgive(self, now_s: float) -> bool:
        """Take back one counted failure before the first byte, whose cause was the request.

        True if that closed the breaker: it had opened for too many failures, which are no longer too many. Requests
        that all engines fail at may come at once, so that each breaker has opened before any of them has been repeated.
        """
        if not self._not_begun or self.state is BreakerState.HALF_OPEN:
            return False
        self._not_begun -= 1
        self._failures.add(now_s, -1)
        self._requests.add(now_s, -1)
        if self._undone is None or (self.failures_in_a_row and self._too_many(now_s, "") is not None):
            return False
        self.state, self.why, self.doublings, self._undone = BreakerState.CLOSED, None, self._undone, None
        return True

    def stop(self, now_s: float, why: str) -> bool:
        """Open for a reason that counts of failures do not show. True unless it was open."""
        if self.state is BreakerState.OPEN:
            return False
        self._open(now_s, why, refused=False)
        return True

    def doubt(self, now_s: float) -> None:
        """Another replica's breaker of this engine has opened: for ``open_s``, the next failure opens this one too."""
        self._doubted_until_s = now_s + self._settings.open_s

    def probed(self, now_s: float) -> bool:
        """Record a successful probe. True if it made the breaker half-open."""
        if self.state is not BreakerState.OPEN or now_s < self.until_s:
            return False
        self.state, self._undone = BreakerState.HALF_OPEN, None
        self._half_opened += 1
        self._judged_since_s = now_s
        self.trials = 0
        return True

    def restarted(self, now_s: float) -> None:
        """Record that the engine is a new process: counts are reset, and the next successful probe counts."""
        self._not_begun = self._broken_off = 0
        self._doubted_until_s = float("-inf")
        self.doublings = 0
        self._requests.clear()
        self._failures.clear()
        self._closed_s = None
        self._judged_since_s = now_s
        if self.state is BreakerState.OPEN:
            self.until_s = now_s

    def _too_many(self, now_s: float, why: str) -> str | None:
        settings = self._settings
        if now_s < self._doubted_until_s:
            return f"a request failed after another replica stopped using it: {why}"
        if self.failures_in_a_row >= settings.unhealthy_after:
            if self.failures_in_a_row == 1:
                return f"a request failed: {why}"
            return f"{self.failures_in_a_row} requests in a row failed, the last: {why}"
        failures, requests = self._failures.total(now_s), self._requests.total(now_s)
        if requests >= settings.window_min_requests and failures >= settings.failure_ratio * requests:
            return f"{failures} of {requests} requests failed within {settings.window_s:g} s, the last: {why}"
        return None

    def _open(self, now_s: float, why: str, refused: bool) -> None:
        settings = self._settings
        if self.state is BreakerState.HALF_OPEN:
            self.doublings += 1
        elif self._closed_s is not None:
            self.doublings = max(0, self.doublings + 1 - int((now_s - self._closed_s) // settings.flap_window_s))
        self.doublings = min(self.doublings, _MOST_DOUBLINGS)
        # A refused engine is detected by probes once it is back; only a flapping one must wait.
        doublings = self.doublings - 1 if refused else self.doublings
        wait_s = min(settings.open_max_s, settings.open_s * 2.0**doublings) if doublings >= 0 else 0.0
        self.state = BreakerState.OPEN
        self._undone = None
        self.why = why
        self.until_s = now_s + wait_s
        self.openings += 1
        self.trials = 0

    def _close(self, now_s: float) -> None:
        self.state = BreakerState.CLOSED
        self.why = None
        self._not_begun = self._broken_off = 0
        self.trials = 0
        self._closed_s = now_s
        self._requests.clear()
        self._failures.clear()

    def _end_trial(self, half_opened: int) -> None:
        if self.state is BreakerState.HALF_OPEN and half_opened == self._half_opened:
            self.trials -= 1
