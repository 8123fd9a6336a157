"""Headers of an answer to a client: the engine's that are passed on, and the proxy's own."""

from __future__ import annotations

from policies.row import Row
from policies.types import Decision
from proxy.engines.upstream import Answer
from proxy.paths import COUNT_TOKENS

_ANTHROPIC_PATHS = frozenset(("/v1/messages", COUNT_TOKENS))


def id_headers(row: Row) -> list[tuple[bytes, bytes]]:
    """The request's id, for Anthropic's API also by the name that its clients read."""
    value = row.request_id.encode("latin-1")
    if row.endpoint in _ANTHROPIC_PATHS:
        return [(b"x-request-id", value), (b"request-id", value)]
    return [(b"x-request-id", value)]


def answer_headers(answer: Answer, row: Row, decision: Decision) -> list[tuple[bytes, bytes]]:
    """The headers of a generation's answer."""
    headers = [
        (b"content-type", answer.headers.content_type.encode("latin-1")),
        *answer.headers.passed,
        *id_headers(row),
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
