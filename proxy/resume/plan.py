"""Rules for resuming a broken answer on another instance. Pure: reads and writes request bodies.

There are two ways. *Continuing* gives the other engine the prompt and the tokens so far as one prompt of token ids.
*Repeating* sends it the same request again, and the part already sent is compared and cut off: more expensive, but
correct for requests that depend on the whole of the generated text (stop strings, penalties, grammars, parsers) or on a
seed.
"""

from __future__ import annotations

from enum import StrEnum
from math import isfinite
from typing import NamedTuple, TypeVar

import msgspec

from proxy.request.bodies import extended
from proxy.request.parse import Endpoint, Parsed
from proxy.resume.continuation import Cut, StreamSoFar
from proxy.routing.retries import NO_RETRY_HEADER
from proxy.settings.resume import ResumeSettings, ResumeWhen

HEADER = b"x-warmroute-resume"

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_number = msgspec.json.Decoder(float, strict=False).decode
_encode = msgspec.json.encode

_GREEDY_BELOW = 1e-5
"""vLLM treats a lower temperature (``_SAMPLING_EPS``) as greedy."""
_DEFAULT_COMPLETION_TOKENS = 16
"""vLLM's ``max_tokens`` of a completion without one."""
_TRUE = frozenset((b"true", b"1", b'"true"'))
_NEUTRAL = frozenset((b"null", b"false", b"0", b"0.0", b"[]", b"{}", b'""'))

_CARRIED = frozenset(
    (
        *("model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"),
        *("logit_bias", "allowed_token_ids", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("skip_special_tokens", "spaces_between_special_tokens", "priority", "request_id", "cache_salt"),
        *("user", "return_token_ids", "return_tokens_as_token_ids"),
    )
)
"""Fields with the same meaning after the cut as before it: they apply to each token alone, or to prompt and answer as
a whole (vLLM's repetition penalty counts both).
"""
_REPLACED = frozenset(("prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens"))
_SPENT = frozenset(
    (
        *("add_special_tokens", "truncate_prompt_tokens", "prompt_cache_key", "chat_template", "chat_template_kwargs"),
        *("continue_final_message", "add_generation_prompt", "documents", "reasoning_effort", "include_reasoning"),
        *("parallel_tool_calls", "tool_choice", "length_penalty", "top_logprobs", "metadata", "store", "service_tier"),
        *("safety_identifier", "verbosity", "session_id", "litellm_session_id"),
    )
)
"""Fields that shaped the prompt, or have no effect without a field that is not continued; omitted after the cut."""
_ONE_CHOICE = frozenset(("n", "best_of"))
_SHAPES = frozenset(("echo", "suffix", "use_beam_search", "prompt_embeds"))
_LOGPROBS = frozenset(("logprobs", "prompt_logprobs"))
_MAX_BODY_BYTES = 2 * 1024 * 1024
"""A larger body would hold the event loop while it is decoded."""
_RESUMED = frozenset((Endpoint.COMPLETIONS, Endpoint.CHAT))
"""Events of messages and responses carry no token ids."""
_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))


class ResumeResult(StrEnum):
    """Result of resuming a broken stream: closed set used in rows and metric labels."""

    RESUMED = "resumed"
    """Another engine continued it; the request's outcome shows if it completed."""
    COMPLETED = "completed"
    """Only the usage or the end mark was missing."""
    SHAPE = "shape"
    """Several choices or prompts, echo, suffix, beam search, embeddings: not a single text that can be continued.

    Also a body of over 2 MiB, and a message or response.
    """
    LOGPROBS = "logprobs"
    SAMPLED = "sampled"
    """Sampled at random: another engine would generate a different text."""
    TOOL_CALL = "tool_call"
    """A tool call was in progress."""
    UNREADABLE = "unreadable"
    """The stream is not framed or shaped as vLLM's."""
    TOO_LONG_TO_REPEAT = "too_long_to_repeat"
    """More than ``resume.repeat_tokens`` would have to be generated again."""
    NO_CLEAN_POSITION = "no_clean_position"
    """Sampled, and the text sent so far does not end with a complete character."""
    BUDGET = "budget"
    """The retry budget is exhausted."""
    EXHAUSTED = "exhausted"
    """``resume.max_resumes`` is reached."""
    POISON = "poison"
    """Two engines died while serving the request."""
    NO_INSTANCE = "no_instance"
    """No other healthy instance."""
    FAILED = "failed"
    """The other instance refused, or broke before its first byte."""
    DIVERGED = "diverged"
    """The other instance generated a different text than the one already sent."""


class ResumePlan(NamedTuple):
    """Permitted ways to resume a request."""

    endpoint: Endpoint
    may_continue: bool
    may_repeat: bool
    returns_ids: bool
    """The client requested token ids itself."""
    max_tokens: int | None
    """The client's limit; None: up to the model's context."""
    min_tokens: int


def resume_enabled(settings: ResumeSettings, headers: dict[bytes, bytes]) -> bool:
    """True if a request with these headers is to be resumed when it breaks."""
    if settings.enabled is ResumeWhen.NEVER:
        return False
    asked = headers.get(HEADER, b"").strip().lower()
    if asked or settings.enabled is ResumeWhen.ON_REQUEST:
        return asked in {b"1", b"true", b"yes"}
    return headers.get(NO_RETRY_HEADER, b"0") == b"0"


def plan_resume(parsed: Parsed, *, sampled: bool) -> ResumePlan | ResumeResult:
    """Permitted ways to resume this request, or the reason for none.

    ``sampled``: answers sampled without a seed may be continued.
    """
    if parsed.endpoint not in _RESUMED or parsed.prompt.prompts > 1 or len(parsed.body) > _MAX_BODY_BYTES:
        return ResumeResult.SHAPE
    fields = _decode_fields(parsed.body)
    stateful = False
    for name, raw in fields.items():
        if name in _CARRIED or name in _REPLACED or name in _SPENT or bytes(raw) == b"null":
            continue
        value = bytes(raw)
        if name in _LOGPROBS and (name == "prompt_logprobs" or value != b"false"):
            # In a completion `logprobs: 0` requests those of the chosen tokens.
            return ResumeResult.LOGPROBS
        if (name in _ONE_CHOICE and value != b"1") or (name in _SHAPES and value not in _NEUTRAL):
            return ResumeResult.SHAPE
        stateful = stateful or not (name in _ONE_CHOICE or value in _NEUTRAL)
    greedy = _number(fields.get("temperature"), 1.0) < _GREEDY_BELOW
    seeded = _number(fields.get("seed"), None) is not None
    if not (greedy or seeded) and (stateful or not sampled):
        return ResumeResult.SAMPLED
    limit = _number(fields.get("max_completion_tokens"), None) if parsed.endpoint is Endpoint.CHAT else None
    limit = limit if limit is not None else _number(fields.get("max_tokens"), None)
    if limit is None and parsed.endpoint is Endpoint.COMPLETIONS:
        limit = _DEFAULT_COMPLETION_TOKENS
    return ResumePlan(
        parsed.endpoint,
        may_continue=not stateful and (greedy or not seeded),
        may_repeat=greedy or seeded,
        returns_ids=bytes(fields.get("return_token_ids", b"")) in _TRUE,
        max_tokens=None if limit is None else int(limit),
        min_tokens=int(_number(fields.get("min_tokens"), 0)),
    )


def request_token_ids(body: bytes) -> bytes:
    """The request with ``return_token_ids``."""
    if b"return_token_ids" not in body:
        return body.rstrip()[:-1] + b',"return_token_ids":true}'
    return _encode({**_decode_fields(body), "return_token_ids": True})


def choose_cut(
    plan: ResumePlan, so_far: StreamSoFar, body: bytes, repeat_tokens: int, model_tokens: int | None
) -> Cut | ResumeResult:
    """Position at which another engine continues, or the reason why it cannot.

    Args:
        plan: of the request.
        so_far: the part of the stream sent to the client.
        body: the client's request.
        repeat_tokens: how many tokens may be generated again.
        model_tokens: the model's context, None if unknown.
    """
    if not so_far.readable:
        return ResumeResult.UNREADABLE
    if so_far.tool_calls:
        return ResumeResult.TOOL_CALL
    if not so_far.begun:
        return Cut(0, 0)
    again = len(so_far.ids) - so_far.clean.ids
    if _may_continue(plan, so_far, body, model_tokens):
        shown = len(so_far.content) > so_far.clean.content or (plan.returns_ids and again > 0)
        if again <= repeat_tokens and (plan.may_repeat or not shown):
            return so_far.clean
        return ResumeResult.TOO_LONG_TO_REPEAT if plan.may_repeat else ResumeResult.NO_CLEAN_POSITION
    if not plan.may_repeat:
        return ResumeResult.NO_CLEAN_POSITION if plan.may_continue else ResumeResult.SAMPLED
    return Cut(0, 0) if so_far.tokens <= repeat_tokens else ResumeResult.TOO_LONG_TO_REPEAT


def continuation_body(
    plan: ResumePlan, so_far: StreamSoFar, cut: Cut, body: bytes, model_tokens: int | None
) -> tuple[Endpoint, bytes]:
    """Endpoint and body of the request that makes another engine continue from ``cut``.

    Args:
        plan: of the request.
        so_far: the part of the stream sent to the client.
        cut: result of ``choose_cut``.
        body: the request as sent to the first engine, with usage and token ids requested.
        model_tokens: the model's context length, None if unknown.
    """
    if not cut.ids:
        return plan.endpoint, body
    fields = {name: raw for name, raw in _decode_fields(body).items() if name in _CARRIED}
    ids = so_far.prompt_ids.rstrip()[:-1] + b"," + _encode(so_far.ids[: cut.ids])[1:]
    limit = _tokens_left(plan, so_far, model_tokens)
    assert limit is not None
    changes: dict[str, object] = {"prompt": msgspec.Raw(ids), "max_tokens": limit}
    if plan.min_tokens > cut.ids:
        changes["min_tokens"] = plan.min_tokens - cut.ids
    # A chat's prompt is known by its ids only, and only a completion accepts ids.
    return Endpoint.COMPLETIONS, _encode({**fields, **changes})


def body_to_send(body: bytes, plan: ResumePlan, *, with_usage: bool) -> bytes:
    """The client's request with token ids requested for resuming, and with ``with_usage`` the usage."""
    asked = body if plan.returns_ids else request_token_ids(body)
    return extended(asked, usage=with_usage)


def _may_continue(plan: ResumePlan, so_far: StreamSoFar, body: bytes, model_tokens: int | None) -> bool:
    if not (plan.may_continue and so_far.exact and so_far.prompt_ids and so_far.clean.ids):
        return False
    left = _tokens_left(plan, so_far, model_tokens)
    if left is None or left < 1:
        return False
    # With a reasoning parser, a completion would return its markers as text; an image has no token ids.
    return plan.endpoint is Endpoint.COMPLETIONS or not (so_far.reasoning or _has_media(body))


def _tokens_left(plan: ResumePlan, so_far: StreamSoFar, model_tokens: int | None) -> int | None:
    if plan.max_tokens is not None:
        return plan.max_tokens - so_far.clean.ids
    if model_tokens is None:
        return None
    return model_tokens - (so_far.prompt_ids.count(b",") + 1) - so_far.clean.ids


class _Part(msgspec.Struct):
    type: str | None = None


class _Message(msgspec.Struct):
    content: str | list[str | _Part] | None = None


class _Chat(msgspec.Struct):
    messages: list[_Message]


_decode_chat = msgspec.json.Decoder(_Chat).decode


def _has_media(body: bytes) -> bool:
    """True if a chat contains anything but text, or cannot be decoded."""
    try:
        messages = _decode_chat(body).messages
    except msgspec.DecodeError:
        return True
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    return any(isinstance(part, _Part) and part.type not in _TEXT_PARTS for part in parts)


_Default = TypeVar("_Default", float, None)


def _number(raw: msgspec.Raw | None, default: _Default) -> float | _Default:
    if raw is None:
        return default
    try:
        number = _decode_number(raw)
    except msgspec.DecodeError:
        return default
    return number if isfinite(number) else default
