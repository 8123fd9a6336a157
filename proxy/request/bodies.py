"""Changes to a request body on its way to an engine; everything else is forwarded unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.request.outline import fields_of
from proxy.request.steps import Steps

_DECODED_BYTES = 2 * 1024 * 1024
"""Bodies up to this size are decoded in one call: 10 ms in the worst case."""

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.encode


class _TransferAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_decode_transfer = msgspec.json.Decoder(_TransferAnswer).decode


def request_usage(body: bytes) -> bytes:
    """Add ``stream_options.include_usage``; the body must not have ``stream_options``."""
    end = body.rindex(b"}")  # one copy of a long body, not two
    return b"".join((memoryview(body)[:end], b',"stream_options":{"include_usage":true}}'))


def with_model(body: bytes, model: str) -> Steps[bytes]:
    """The body for another model."""
    fields = (yield from fields_of(body)) if len(body) > _DECODED_BYTES else _decode_fields(body)
    return _encode({**fields, "model": model})


def prefill_leg(body: bytes, transfer_params: Mapping[str, Any]) -> bytes:
    """Body of the P leg: one token, not streamed, KV kept for D.

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
    return _encode({**fields, **changes})


def decode_leg(body: bytes, transfer_params: Mapping[str, Any]) -> bytes:
    """Body of the D leg: pull the KV that P kept, then answer the client."""
    return _encode({**_decode_fields(body), "kv_transfer_params": transfer_params})


def transfer_params_of(answer: bytes) -> dict[str, Any] | None:
    """``kv_transfer_params`` of P's answer; None if it has none (Mooncake's is null)."""
    try:
        return _decode_transfer(answer).kv_transfer_params
    except (msgspec.DecodeError, RecursionError):
        return None
