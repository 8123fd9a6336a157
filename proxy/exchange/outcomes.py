"""Outcomes of requests that were refused before they were sent to an engine, and of streams with an error in them."""

from __future__ import annotations

from policies.row import RequestOutcome, Row
from proxy.errors import RequestError
from proxy.request.stream_end import ReportedError


def outcome_of(error: RequestError) -> RequestOutcome:
    """``NO_INSTANCE`` if it was not the client's fault (503), else ``REJECTED``."""
    return RequestOutcome.NO_INSTANCE if error.status == 503 else RequestOutcome.REJECTED


def note_reported(row: Row, instance: str, error: ReportedError | None) -> None:
    """Record the error, if any, with which an engine has ended its own stream, and which the client has received."""
    if error is None:
        return
    row.error = f"reported an error: {error.message}"
    row.outcome = RequestOutcome.ENGINE_REFUSED if error.refusal else RequestOutcome.STREAM_BROKEN
    if not error.refusal:
        row.note_failed(instance, row.error)
