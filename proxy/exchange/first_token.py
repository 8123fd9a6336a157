"""The first token of an answer: counted when it comes, and learned from."""

from __future__ import annotations

import time

from policies.row import Row
from policies.session import RoutingSession
from policies.state import Commitment
from proxy.engines.upstream import Answer
from proxy.request.parse import Endpoint, Parsed


def opens_early(parsed: Parsed, answer: Answer) -> bool:
    """True if a stream may begin before the prefill, and its filter finds the first token (``TypedEvents``)."""
    return parsed.endpoint is Endpoint.RESPONSES and not answer.headers.encoded


class FirstTokenWatch:
    """Of one request on D. Most engines send nothing before it; vLLM opens a stream of the Responses API at once.

    Args:
        started_s: ``time.perf_counter`` when D was asked for the whole request; None: it is part of a hand-off.
    """

    __slots__ = ("_commitment", "_routing", "_row", "_seconds", "_started_s")

    def __init__(self, routing: RoutingSession, row: Row, commitment: Commitment, started_s: float | None) -> None:
        self._routing = routing
        self._row = row
        self._commitment = commitment
        self._started_s = started_s
        self._seconds: float | None = None

    def came(self, *, streamed: bool) -> None:
        """Count it; without ``streamed`` it may be the whole answer."""
        if self._started_s is not None:
            self._seconds = time.perf_counter() - self._started_s
        self._routing.began(self._commitment, time.monotonic(), streamed=streamed)

    def learn(self) -> None:
        """Learn from its time, if it has come."""
        if self._seconds is not None:
            self._row.note_leg("first_token", *self._routing.prefilled(self._commitment, self._seconds))

    def late(self) -> None:
        """It has come in a stream that was opened before."""
        self.came(streamed=True)
        self.learn()
