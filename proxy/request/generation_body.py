"""Fields of a generation request: one decoding of a small body, a walk over the structure of a large one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple, cast

import msgspec

from proxy.errors import RequestError
from proxy.request.bodies import invalid_json
from proxy.request.fields import REFUSED_FIELDS, check_fields
from proxy.request.outline import fields_of
from proxy.request.steps import Steps

_DECODED_BYTES = 2 * 1024 * 1024
"""Bodies up to this size are decoded in one call: 10 ms in the worst case."""
_LONGEST_BYTES = 64 * 1024
"""Longest field of a large body besides its prompt."""


class StreamOptions(msgspec.Struct):
    """The fields of ``stream_options`` that are read."""

    include_usage: bool | None = None


class GenerationBody(msgspec.Struct):
    """The fields of an OpenAI generation request that routing reads; all others are forwarded as bytes."""

    named_model: str | None = msgspec.field(default=None, name="model")
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()
    session_id: msgspec.Raw = msgspec.Raw()
    litellm_session_id: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()
    cache_salt: str | None = None
    priority: msgspec.Raw = msgspec.Raw()
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    use_beam_search: msgspec.Raw = msgspec.Raw()
    prompt_embeds: msgspec.Raw = msgspec.Raw()

    @property
    def model(self) -> str:
        """The model; empty if the body names none."""
        return self.named_model or ""

    @property
    def asked_tokens(self) -> int | None:
        """The client's bound on output tokens; None if it gave none."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def embedded_prompts(self) -> int:
        """Number of prompts that are embeddings (vLLM's ``prompt_embeds``): a string of base64, or a list of them."""
        given = memoryview(self.prompt_embeds)
        if not given or bytes(given[:5]) in _NO_EMBEDDINGS:
            return 0
        return bytes(given).count(b'"') // 2 if given[0] == ord("[") else 1

    def only_d_refuses(self, default_tokens: int | None) -> bool:
        """True for values that an engine refuses and that the P leg of a hand-off does not have.

        Args:
            default_tokens: the engine's bound on output tokens where the client gives none; None: its context length.
        """
        bounds = (self.max_tokens, self.max_completion_tokens)
        if any(bound is not None and bound < 1 for bound in bounds):
            return True
        if self.stream_options is not None and not self.stream:
            return True
        if not memoryview(self.min_tokens):
            return False
        try:
            least = _whole(self.min_tokens)
        except msgspec.DecodeError:
            return True
        most = default_tokens if self.asked_tokens is None else self.asked_tokens
        return least < 0 or (most is not None and least > most)


class MessagesBody(GenerationBody):
    """The fields of a request to Anthropic's Messages API that routing reads."""

    system: msgspec.Raw = msgspec.Raw()


class ResponsesBody(GenerationBody):
    """The fields of a request to OpenAI's Responses API that routing reads; ``prompt`` is a template there."""

    input: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_output_tokens


_NO_EMBEDDINGS = frozenset((b"null", b'""', b"[]", b"{}", b"0"))
_SESSION_FIELDS = frozenset(("prompt_cache_key", "user", "session_id", "litellm_session_id", "metadata"))
_NOTHING = msgspec.Raw()
_GUARDED = tuple(sorted(REFUSED_FIELDS))
_NONE_GIVEN = (_NOTHING,) * len(_GUARDED)
_guarded_values = attrgetter(*_GUARDED)

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_FLAGS = MappingProxyType(
    {**dict.fromkeys(("on", "t", "y", "yes", 1.0), b"true"), **dict.fromkeys(("off", "f", "n", "no", 0.0), b"false")}
)
"""Values that pydantic takes for a flag, and msgspec does not; texts in any case."""
_LONGEST_FLAG_BYTES = 32

_encode = msgspec.json.encode
_whole = msgspec.json.Decoder(int, strict=False).decode
_decode_top = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_flag = msgspec.json.Decoder(str | float | None).decode


class _Reading(NamedTuple):
    """Decoders of one kind of body."""

    decode: Callable[[bytes], GenerationBody]
    decode_guarded: Callable[[bytes], GenerationBody]
    """One pass finds the guarded fields as well, however their names are escaped."""
    decode_lax: Callable[[bytes], GenerationBody]
    """As ``decode_guarded``, for bodies that one of the others refuses: values may be written in other types."""
    prompts: frozenset[str]
    """Fields that are left as they are."""
    short: frozenset[str]
    """Fields whose length is bounded in large bodies."""
    flags: frozenset[str]


def _reading(kind: type[GenerationBody]) -> _Reading:
    guarded = msgspec.defstruct(
        f"_Guarded{kind.__name__}", [(name, msgspec.Raw, _NOTHING) for name in _GUARDED], bases=(kind,)
    )
    fields = msgspec.structs.fields(kind)
    prompts = frozenset(field.encode_name for field in fields if field.type is msgspec.Raw) - _SESSION_FIELDS
    return _Reading(
        msgspec.json.Decoder(kind).decode,
        msgspec.json.Decoder(cast(type[GenerationBody], guarded)).decode,
        msgspec.json.Decoder(cast(type[GenerationBody], guarded), strict=False).decode,
        prompts,
        frozenset(field.encode_name for field in fields) - prompts,
        frozenset(field.encode_name for field in fields if field.type == bool | None),
    )


_READINGS = MappingProxyType({kind: _reading(kind) for kind in (GenerationBody, MessagesBody, ResponsesBody)})


def decode_fields(body: bytes, allowed: Set[str], kind: type[GenerationBody] = GenerationBody) -> GenerationBody:
    """Fields of a small body; ``allowed`` are the guarded fields that clients may send. Raises RequestError."""
    try:
        fields = _READINGS[kind].decode_guarded(body)
    except _UNREADABLE as error:
        fields = _read_as_engines_do(body, _READINGS[kind], error)
    guarded = _guarded_values(fields)
    if guarded != _NONE_GIVEN:
        given = {name: raw for name, raw in zip(_GUARDED, guarded, strict=True) if raw != _NOTHING}
        check_fields(given, allowed)
    return fields


def large_fields(body: bytes, allowed: Set[str], kind: type[GenerationBody] = GenerationBody) -> Steps[GenerationBody]:
    """Fields of a large body, as ``decode_fields``: its prompts are not decoded, other long fields are refused."""
    reading = _READINGS[kind]
    try:
        given = (yield from fields_of(body)) if len(body) > _DECODED_BYTES else _decode_top(body)
        check_fields(given, allowed)
        short = _encode(_bounded({name: raw for name, raw in given.items() if name in reading.short}))
    except _UNREADABLE as error:
        raise _problem(body, error) from error
    try:
        fields = reading.decode(short)
    except _UNREADABLE as error:
        fields = _read_as_engines_do(short, reading, error)
    for name in reading.prompts:
        setattr(fields, name, given.get(name, _NOTHING))
    return fields


def _read_as_engines_do(body: bytes, reading: _Reading, error: Exception) -> GenerationBody:
    """Decode a body again with the values that vLLM converts: ``"10"``, ``10.0``, ``"yes"`` or ``1`` for true.

    Raises RequestError as ``_problem``; ``error`` is that of the first reading.
    """
    if not isinstance(error, msgspec.ValidationError):
        raise _problem(body, error) from error
    try:
        return reading.decode_lax(body)
    except msgspec.ValidationError:
        pass  # the next reading converts more
    except _UNREADABLE as second:
        raise _problem(body, second) from error
    try:
        return reading.decode_lax(_with_plain_flags(body, reading.flags))
    except _UNREADABLE as last:
        raise _problem(body, last) from error


def _with_plain_flags(body: bytes, flags: Iterable[str]) -> bytes:
    """The body with true and false for the flags that are written in the other ways of pydantic."""
    given = _decode_top(body)
    _plain(given, flags)
    options = given.get("stream_options")
    if options is not None and bytes(memoryview(options)[:1]) == b"{":
        read = _decode_top(options)
        _plain(read, ("include_usage",))
        given["stream_options"] = msgspec.Raw(_encode(read))
    return _encode(given)


def _plain(given: dict[str, msgspec.Raw], flags: Iterable[str]) -> None:
    for name in flags:
        if (raw := given.get(name)) is None or len(memoryview(raw)) > _LONGEST_FLAG_BYTES:
            continue
        try:
            value = _decode_flag(raw)
        except msgspec.ValidationError:
            continue
        if (plain := _FLAGS.get(value.lower() if isinstance(value, str) else value)) is not None:
            given[name] = msgspec.Raw(plain)


def _bounded(known: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """The fields without those too long to be a session's id; any other one that long is refused."""
    long = {name for name, raw in known.items() if len(memoryview(raw)) > _LONGEST_BYTES}
    for name in long - _SESSION_FIELDS:
        raise RequestError(400, f"'{name}' is longer than {_LONGEST_BYTES} bytes", param=name)
    return {name: raw for name, raw in known.items() if name not in long}


def _problem(body: bytes, error: Exception) -> RequestError:
    """Answer for a body that cannot be decoded."""
    return _invalid(error) if isinstance(error, msgspec.ValidationError) else invalid_json(body, error)


def _invalid(error: msgspec.ValidationError) -> RequestError:
    text = str(error)
    param = text.rsplit("`$.", 1)[1].rstrip("`") if "`$." in text else None
    if "missing required field" in text:
        param = text.split("`")[1]
    return RequestError(400, text, param=param, code="invalid_type" if param else None)
