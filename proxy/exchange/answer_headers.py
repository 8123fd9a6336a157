"""Headers of an answer to a client: the engine's that are passed on, and the proxy's own."""

from __future__ import annotations

from policies.row import Row
from policies.types import Decision
from proxy.engines.upstream import Answer


def answer_headers(answer: Answer, row: Row, decision: Decision) -> list[tuple[bytes, bytes]]:
    """The headers of a generation's answer."""
    headers = [
        (b"content-type", answer.headers.content_type.encode("latin-1")),
        *answer.headers.passed,
        (b"x-request-id", row.request_id.encode("latin-1")),
        (b"x-warmroute-instance", decision.decode_on.encode("latin-1")),
        (b"x-warmroute-class", decision.request_class.encode()),
        (b"x-warmroute-reason", decision.reason.encode()),
        (b"x-warmroute-predicted-cached-tokens", str(row.predicted_cached_tokens).encode()),
    ]
    if row.normalized:
        headers.append((b"x-warmroute-normalized", ",".join(row.normalized).encode()))
    if row.held_s:
        headers.append((b"x-warmroute-held-s", b"%.3f" % row.held_s))
    if row.prefill_instance:
        headers.append((b"x-warmroute-prefill-instance", row.prefill_instance.encode("latin-1")))
    return headers
