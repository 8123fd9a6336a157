"""Changes to a request body on its way to an engine; everything else is forwarded unchanged."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from proxy.errors import RequestError
from proxy.request.outline import fields_of
from proxy.request.steps import Steps

_DECODED_BYTES = 2 * 1024 * 1024
"""Bodies up to this size are decoded in one call: 10 ms in the worst case."""

_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u)")
"""First half of a surrogate pair without the second."""
_HALF_AT_END = re.compile(_HALF_PAIR.pattern + rb"(?s:.){0,5}\}\s*\Z")
"""One so close to the end of a whole object that msgspec takes the body for truncated: it reads the next 6 bytes."""
_PLACE = re.compile(r"\(byte (\d+)\)")

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.encode


def as_utf8(body: bytes) -> bytes:
    """JSON as plain UTF-8. Engines also read it with a byte order mark and in UTF-16 or UTF-32, which is converted.

    Raises:
        RequestError: 400, it is not valid in the encoding that it begins in.
    """
    if body.startswith(b'{"'):  # almost all are
        return body
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    if encoding == "utf-8-sig":
        return body[len(BOM_UTF8) :]
    try:
        return body.decode(encoding).encode()
    except UnicodeError as error:
        raise RequestError(
            400, f"the body is not valid {encoding.upper()}: {error}; send UTF-8", code="invalid_json"
        ) from error


def invalid_json(body: bytes, error: Exception) -> RequestError:
    """Error for a body that cannot be decoded, by its cause where the decoder only finds that something is missing."""
    if isinstance(error, RecursionError):
        problem = "the body's JSON is nested too deeply"
    elif not body or body.isspace():
        problem = "the body is empty: send a JSON object"
    elif _has_half_pair(body, str(error)):
        problem = (
            "the body is not valid JSON: a string has one half of a surrogate pair, such as \\ud83d alone, which is no "
            "character: cut texts between characters, not between UTF-16 units"
        )
    else:
        problem = f"the body is not valid JSON: {error}"
    return RequestError(400, problem, code="invalid_json")


def _has_half_pair(body: bytes, problem: str) -> bool:
    """True if the decoder's problem is half a surrogate pair, for which it has several names."""
    place = _PLACE.search(problem)
    if place is None:
        return _HALF_AT_END.search(body[-64:]) is not None
    at = int(place[1])
    return "surrogate" in problem or _HALF_PAIR.search(body[max(0, at - 12) : at + 2]) is not None


class Priorities(NamedTuple):
    """Priority of each leg; None: the body stays as it is."""

    prefill: int | None = None
    """Of the P leg."""
    decode: int | None = None
    """Of the request to D, also after a failed hand-off."""


NO_PRIORITIES = Priorities()


class _TransferAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Choices(msgspec.Struct):
    choices: list[_Choice] = []


_decode_choices = msgspec.json.Decoder(_Choices).decode
_decode_transfer = msgspec.json.Decoder(_TransferAnswer).decode


def extended(body: bytes, *, usage: bool = False, priority: int | None = None) -> bytes:
    """The body with further fields at its end, not decoded and copied once; itself without any.

    Args:
        body: a JSON object with at least one field.
        usage: add ``stream_options.include_usage``.
        priority: add ``priority``. Of two fields of one name, engines read the last.
    """
    if not usage and priority is None:
        return body
    fields = b',"stream_options":{"include_usage":true}' if usage else b""
    if priority is not None:
        fields += b',"priority":%d' % priority
    end = body.rindex(b"}")
    return b"".join((memoryview(body)[:end], fields, b"}"))


def with_model(body: bytes, model: str) -> Steps[bytes]:
    """The body for another model."""
    fields = (yield from fields_of(body)) if len(body) > _DECODED_BYTES else _decode_fields(body)
    return _encode({**fields, "model": model})


def prefill_leg(body: bytes, transfer_params: Mapping[str, Any], priority: int | None = None) -> bytes:
    """Body of the P leg: one token, not streamed, KV kept for D; ``priority``: replaces the client's.

    ``min_tokens`` is 1 because an engine sends the KV only of a request that ended *by length*: an end-of-sequence as
    the first token would leave D waiting for minutes.
    """
    changes: dict[str, Any] = {
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "kv_transfer_params": transfer_params,
    }
    fields = _decode_fields(body)
    fields.pop("stream_options", None)
    if "max_completion_tokens" in fields:
        changes["max_completion_tokens"] = 1
    if priority is not None:
        changes["priority"] = priority
    return _encode({**fields, **changes})


def decode_leg(body: bytes, transfer_params: Mapping[str, Any], priority: int | None = None) -> bytes:
    """Body of the D leg: pull the KV that P kept, then answer the client; ``priority``: replaces the client's."""
    changes: dict[str, Any] = {"kv_transfer_params": transfer_params}
    if priority is not None:
        changes["priority"] = priority
    return _encode({**_decode_fields(body), **changes})


def finish_reason_of(answer: bytes) -> str | None:
    """``finish_reason`` of the first choice of P's answer; None if it has none."""
    try:
        choices = _decode_choices(answer).choices
    except (msgspec.DecodeError, RecursionError):
        return None
    return choices[0].finish_reason if choices else None


def transfer_params_of(answer: bytes) -> dict[str, Any] | None:
    """``kv_transfer_params`` of P's answer; None if it has none (Mooncake's is null)."""
    try:
        return _decode_transfer(answer).kv_transfer_params
    except (msgspec.DecodeError, RecursionError):
        return None
