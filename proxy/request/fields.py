"""Fields of a request that reach into an engine: refused unless the operator allows them (``fields.allow``).

vLLM turns ``vllm_xargs`` into the sampling parameters' ``extra_args``, whose ``kv_transfer_params`` become the
request's transfer parameters: a wrong one raises in the connector's scheduler and ends the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from proxy.errors import RequestError
from proxy.settings.fields import GUARDED_FIELDS

_TRANSFER = "kv_transfer_params"
REFUSED_FIELDS = frozenset((_TRANSFER, *GUARDED_FIELDS))
_NEUTRAL = frozenset((b"null", b"{}", b"[]", b"0"))
"""Values that engines treat as absent; clients that serialize every field send them."""
_CONTAINERS = frozenset(("vllm_xargs", "extra_args", "sampling_params"))
_MAX_CONTAINER_BYTES = 64 * 1024

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def check_fields(fields: Mapping[str, msgspec.Raw], allowed: Set[str]) -> None:
    """Raise RequestError for a guarded field that is not allowed; names are compared exactly, as engines do.

    Names inside an allowed container (``vllm_xargs``) are checked as well.
    """
    for name in REFUSED_FIELDS.intersection(fields):
        raw = fields[name]
        if bytes(memoryview(raw)[:5]) in _NEUTRAL:
            continue
        if name == _TRANSFER:
            raise RequestError(
                400, f"'{_TRANSFER}' may be set by the proxy only: a wrong value can crash an engine", param=_TRANSFER
            )
        if name not in allowed:
            raise RequestError(
                400,
                f"'{name}' reaches into the engine and is not allowed (fields.allow)",
                param=name,
                code="field_not_allowed",
            )
        if name in _CONTAINERS:
            # A container within itself would be decoded once per level.
            check_fields(_members(name, raw), allowed - {name})


def _members(name: str, raw: msgspec.Raw) -> dict[str, msgspec.Raw]:
    if len(memoryview(raw)) > _MAX_CONTAINER_BYTES:
        raise RequestError(400, f"'{name}' is longer than {_MAX_CONTAINER_BYTES} bytes", param=name)
    try:
        return _decode_fields(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(400, f"'{name}' must be an object", param=name) from error
