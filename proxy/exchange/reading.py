"""Reading of answers by their API: usage, and the ids of responses that an engine has stored."""

from __future__ import annotations

import time
from collections.abc import Callable

from proxy.core import Core
from proxy.engines.upstream import Answer, UpstreamError
from proxy.fleet.instances import Instance
from proxy.request.generation_body import ResponsesBody
from proxy.request.parse import Endpoint, Parsed
from proxy.request.stream_end import reported_error
from proxy.request.typed_events import MESSAGE_EVENTS, RESPONSE_EVENTS, TypedEvents
from proxy.request.typed_usage import read_typed_answer
from proxy.request.usage import Usage, UsageFilter, usage_of_answer

EventFilter = UsageFilter | TypedEvents
"""Filter of a stream that reads its usage."""

_TYPED = frozenset((Endpoint.MESSAGES, Endpoint.RESPONSES))
_ID_BYTES = 512
"""Beginning of an answer in which engines have its id."""


def event_filter(
    core: Core,
    parsed: Parsed,
    instance: Instance,
    drop: bool,
    cached_tokens: int | None,
    on_output: Callable[[], object] | None = None,
) -> EventFilter:
    """The filter for one stream of ``instance``; ``drop`` and ``cached_tokens`` as of ``UsageFilter``.

    ``on_output``: called at the first token, where the stream ``opens_early``.
    """
    if parsed.endpoint is Endpoint.MESSAGES:
        return TypedEvents(MESSAGE_EVENTS)
    if parsed.endpoint is Endpoint.RESPONSES:
        return TypedEvents(RESPONSE_EVENTS, lambda found: _learn(core, parsed, instance, found), on_output)
    return UsageFilter(drop=drop, cached_tokens=cached_tokens)


def echoed(endpoint: Endpoint, request_id: str, answer: Answer, first: bytes) -> bool | None:
    """True if the answer's id has the request's id, as vLLM makes it from ``x-request-id``; None: no such answer."""
    if answer.status != 200 or endpoint in _TYPED or answer.headers.encoded:
        return None
    return f"cmpl-{request_id}".encode("latin-1") in first[:_ID_BYTES]


_ENDS = frozenset({b"}", b"]"})
"""Last bytes of an object or a list."""
_MARGIN = 64
"""Bytes at the end of a body in which there may be white space."""


def check_first(answer: Answer, first: bytes, *, streamed: bool) -> None:
    """Check the first piece of an answer, of which nothing has been sent to the client, so that it may be retried.

    Raises:
        UpstreamError: a stream has none, or an engine's failure is in it: vLLM reports one so, with status 200; or a
            200 has a text that no generation endpoint gives, such as the page of a gateway before the engine, or no
            body, or JSON without its end.
    """
    if streamed:
        if not first:
            raise UpstreamError("closed its stream before the first byte")
        error = None if answer.headers.encoded else reported_error(first)
        if error is not None and not error.refusal:
            raise UpstreamError(f"reported an error: {error.message}")
    kind = answer.headers.content_type
    if answer.status == 200 and kind[:5].lower() == "text/" and not kind.lower().startswith("text/event-stream"):
        raise UpstreamError(
            f"answered 200 with {kind[:80]}, not JSON or events: {first[:200].decode('utf-8', 'replace')}"
        )
    if answer.status == 200 and not streamed and not answer.headers.encoded:
        end = first[-_MARGIN:].rstrip()[-1:]
        if not end:
            raise UpstreamError("answered 200 without a body")
        if end not in _ENDS and kind.lower().startswith("application/json"):
            raise UpstreamError(f"answered 200 with JSON that breaks off: …{first[-100:].decode('utf-8', 'replace')}")


def further_sequences(parsed: Parsed) -> int:
    """Sequences beyond the first that an engine runs for one request: several prompts, several choices."""
    fields = parsed.fields
    return max(parsed.prompt.prompts, 1) * max(fields.n or 1, fields.best_of or 1) - 1


def usage_of(core: Core, parsed: Parsed, instance: Instance, content: bytes) -> Usage | None:
    """Usage of a whole answer of ``instance``; the id of a stored response is remembered."""
    if parsed.endpoint not in _TYPED:
        return usage_of_answer(content)
    answer = read_typed_answer(content)
    if answer.id:
        _learn(core, parsed, instance, answer.id)
    return answer.usage.as_usage() if answer.usage is not None else None


def _learn(core: Core, parsed: Parsed, instance: Instance, response_id: str) -> None:
    fields = parsed.fields
    if isinstance(fields, ResponsesBody) and fields.store is not False:
        core.responses.learn(response_id, instance, parsed.prompt, time.monotonic(), parsed.chain)
