"""Messages between replicas, in MessagePack. Unknown fields are ignored, so that versions may differ in an upgrade."""

from __future__ import annotations

from math import inf

import msgspec

from policies.admission.homes import Contexts


class LoadReport(msgspec.Struct, array_like=True, frozen=True):
    """Work of one replica on one instance, as in `policies.ledger.Account`."""

    requests: int = 0
    prefilling: int = 0
    pending_prefill_tokens: int = 0
    decoding_tokens: int = 0
    promised_tokens: int = 0
    """KV that its requests need, held KV of hand-offs included."""
    recent_tokens: float = 0.0
    """As of ``recent_age_s`` before the message was sent."""
    recent_age_s: float = 0.0


class KeyReport(msgspec.Struct, array_like=True, frozen=True):
    """Use of one key on one replica, as in `proxy.access.quotas.KeyUse`."""

    in_flight: int = 0
    requests: int = 0
    tokens: int = 0
    requests_left: float = inf
    tokens_left: float = inf
    sessions: tuple[int, ...] = ()


class DrainMark(msgspec.Struct, array_like=True, frozen=True):
    """An operator's last word about one instance."""

    draining: bool
    unix_s: float
    replica: str


class Pin(msgspec.Struct, array_like=True, frozen=True):
    """Last place of a session."""

    session: bytes
    """Key of its context (`RequestView.context_id`) in UTF-8, lone surrogates kept."""
    instance: str
    tokens: int
    """Length of its prompt."""
    unix_s: float
    run: int = 0
    """Number of the process that decided."""


class SharedResponse(msgspec.Struct, array_like=True, frozen=True):
    """A response that an engine has stored, as in `proxy.routing.stored_responses`."""

    response_id: str
    instance: str
    url: str
    started_unix_s: float | None
    """Start of the engine's process; None: unknown."""
    hashes: bytes
    """Of its prompt's blocks, packed."""
    text_bytes: int
    chain: str = ""
    """Id of the first response of its conversation; empty: unknown."""


class HeldReport(msgspec.Struct, array_like=True, frozen=True):
    """A request that one replica's admission rule holds, as in `policies.admission.elsewhere.HeldElsewhere`."""

    number: int
    tokens: int
    waited_s: float
    """When the message was sent."""
    kept: bool = False
    tenant: str = ""
    model: str | None = None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Changes of one replica since its last message; ``full``: all of its state, except the pins."""

    replica: str
    run: int
    """Random number of the process."""
    full: bool = False
    gone: bool = False
    """It has shut down."""
    loads: dict[str, LoadReport] = {}
    keys: dict[str, KeyReport] = {}
    drains: dict[str, DrainMark] = {}
    open: tuple[str, ...] = ()
    """Instances whose breaker is open; in every message."""
    contexts: dict[str, Contexts] = {}
    """Of the working set by instance, in every message."""
    lost_shares: dict[str, float] = {}
    """Share of each instance's time that recomputation took, in every message."""
    held: int = 0
    """Requests that the admission rule holds, in every message."""
    line: tuple[HeldReport, ...] = ()
    """The first of them, in every message."""
    pins: tuple[Pin, ...] = ()
    responses: tuple[SharedResponse, ...] = ()
    """Stored by engines since the last message."""


class WireError(ValueError):
    """Bytes that are no message."""


_decoder = msgspec.msgpack.Decoder(Message)
_pin_decoder = msgspec.msgpack.Decoder(Pin)


def encode(message: Message | Pin) -> bytes:
    """Encode a message, or one pin for late joiners."""
    return msgspec.msgpack.encode(message)


def decode(raw: bytes) -> Message:
    """Decode a message. Raises WireError."""
    try:
        return _decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise WireError(str(error)) from error


def decode_pin(raw: bytes) -> Pin:
    """Decode a pin. Raises WireError."""
    try:
        return _pin_decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise WireError(str(error)) from error
