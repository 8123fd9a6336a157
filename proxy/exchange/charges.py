"""Output tokens of an answer for the limits of its key, also where the engine has not reported them."""

from __future__ import annotations

from policies.row import Row
from proxy.exchange.reading import further_sequences
from proxy.request.parse import Endpoint, Parsed

_BOUND_BY_MAX_TOKENS = frozenset((Endpoint.COMPLETIONS, Endpoint.MESSAGES))
"""APIs that ignore ``max_completion_tokens``: a small one beside a large ``max_tokens`` must not lower the charge."""


def output_tokens(row: Row, parsed: Parsed, whole_tokens: float) -> int:
    """The engine's count; without one, as of a stream that its client left, an estimate of what was relayed.

    A stream counts by its events, a whole answer by ``whole_tokens``; neither above the client's bound on the output.

    Args:
        row: the record of the request, which has ended.
        parsed: the request.
        whole_tokens: length of a whole answer as text, in tokens; 0: nothing of one was relayed.
    """
    if row.completion_tokens is not None:
        return row.completion_tokens
    relayed = row.events or round(whole_tokens)
    fields = parsed.fields
    bound = fields.max_tokens if parsed.endpoint in _BOUND_BY_MAX_TOKENS else fields.asked_tokens
    return relayed if bound is None else min(relayed, max(0, bound) * (1 + further_sequences(parsed)))
