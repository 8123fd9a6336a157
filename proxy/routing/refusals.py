"""Answers to requests that admission does not send."""

from __future__ import annotations

from math import ceil

from policies.row import RequestOutcome
from proxy.errors import RequestError


class QueueError(RequestError):
    """A request that was not admitted."""

    def __init__(self, status: int, message: str, outcome: RequestOutcome, retry_after_s: int) -> None:
        kind = "rate_limit_error" if status == 429 else "service_unavailable"
        super().__init__(status, message, kind=kind, code=outcome.value, retry_after_s=retry_after_s)
        self.outcome = outcome


def queue_full(waiting: int, retry_after_s: int) -> QueueError:
    """429 for a request that finds the queue full, or that leaves it to one of a tenant that uses less of it."""
    return QueueError(
        429,
        "the fleet is at its limits (limits.max_in_flight, limits.max_in_flight_per_instance), and "
        f"{waiting} request(s) are queued (limits.queue_size)",
        RequestOutcome.QUEUE_FULL,
        retry_after_s,
    )


def queued_too_long(timeout_s: float, retry_after_s: int) -> QueueError:
    """503 for a request that waited in the queue for the maximum time."""
    return QueueError(
        503,
        f"no instance had room within {timeout_s:g} s (limits.queue_timeout_s)",
        RequestOutcome.QUEUE_TIMEOUT,
        retry_after_s,
    )


def wait_too_long(expected_s: float, limit_s: float) -> QueueError:
    """429 for a request that would be held for too long."""
    return QueueError(
        429,
        f"the fleet's KV pools are full: the expected wait is {expected_s:.0f} s, above {limit_s:g} s "
        "(admission.reject_above_s)",
        RequestOutcome.WAIT_TOO_LONG,
        max(1, ceil(expected_s)),
    )
