"""The few changes a request body may need on its way to an engine; everything else is forwarded as it came."""

from __future__ import annotations

from typing import Any

import msgspec

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.encode


def ask_for_usage(body: bytes) -> bytes:
    """Add ``stream_options.include_usage``; the caller has seen that the body has no ``stream_options``."""
    return body.rstrip()[:-1] + b',"stream_options":{"include_usage":true}}'


def prefill_leg(body: bytes, transfer_id: str) -> bytes:
    """The P leg: one token, not streamed, KV kept for ``transfer_id``.

    ``min_tokens`` 1 because an engine sends the KV only of a request that ended *by length*: an end-of-sequence as the
    first token would leave D waiting for minutes.
    """
    changes: dict[str, Any] = {
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        },
    }
    fields = _decode_fields(body)
    fields.pop("stream_options", None)
    if "max_completion_tokens" in fields:
        changes["max_completion_tokens"] = 1
    return _encode({**fields, **changes})


def decode_leg(body: bytes, transfer_id: str, engine_id: str, bootstrap_url: str) -> bytes:
    """The D leg: pull the KV that P kept, then answer the client."""
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": bootstrap_url,
    }
    return _encode({**_decode_fields(body), "kv_transfer_params": params})
