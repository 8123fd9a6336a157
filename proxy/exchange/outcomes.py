"""Outcome of a request that was refused before it was sent to an engine."""

from __future__ import annotations

from policies.row import RequestOutcome
from proxy.errors import RequestError


def outcome_of(error: RequestError) -> RequestOutcome:
    """``NO_INSTANCE`` if it was not the client's fault (503), else ``REJECTED``."""
    return RequestOutcome.NO_INSTANCE if error.status == 503 else RequestOutcome.REJECTED
