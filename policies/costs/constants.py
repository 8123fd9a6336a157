"""Constants of one kind of hardware from which the cost models start: the section ``costs`` of a hardware profile."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from types import MappingProxyType
from typing import Any, NamedTuple

from policies.costs.book import CostBook
from policies.costs.formulas import PrefillModel, TransferModel
from policies.costs.transfer_constants import (
    KV_BYTES_PER_TOKEN,
    REGIMES,
    TRANSFER_FORMULAS,
    TransferConstants,
    TransferFormula,
)
from policies.types import Transport


class PrefillConstants(NamedTuple):
    """``fixed_s + s_per_token * new + s_per_token_squared * new * (cached + new / 2)`` seconds (`PrefillModel`)."""

    fixed_s: float
    s_per_token: float
    s_per_token_squared: float


class CostConstants(NamedTuple):
    """Starting constants of both cost models."""

    prefill: PrefillConstants
    transfers: Mapping[Transport, TransferFormula] = MappingProxyType({})
    """Of the transports that were measured. Their published regimes do not apply; other transports keep theirs."""
    kv_bytes_per_token: float = KV_BYTES_PER_TOKEN

    def book(self) -> CostBook:
        """Cost models that have observed nothing yet."""
        regimes = {transport: each for transport, each in REGIMES.items() if transport not in self.transfers}
        return CostBook(
            PrefillModel(*self.prefill),
            TransferModel(_constants=TransferConstants({**TRANSFER_FORMULAS, **self.transfers}, regimes)),
            self.kv_bytes_per_token,
        )

    def as_mapping(self) -> dict[str, Any]:
        """Plain values, as `constants_of` reads them."""
        return {
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "prefill": self.prefill._asdict(),
            "transfers": {transport.value: formula._asdict() for transport, formula in self.transfers.items()},
        }


def constants_of(values: object) -> CostConstants:
    """Constants from the plain values of a profile's section.

    Raises:
        ValueError: a key is missing or unknown, or a value is not usable; the message names it.
    """
    section = _section(values, "costs", {"kv_bytes_per_token", "prefill", "transfers"})
    prefill = _numbers(section["prefill"], "costs.prefill", PrefillConstants._fields)
    transfers = {}
    measured = section["transfers"]
    if not isinstance(measured, Mapping):
        raise ValueError("costs.transfers: expected transports with their constants")
    for name, formula in measured.items():
        if name not in set(Transport):
            raise ValueError(f"costs.transfers.{name}: choose among {', '.join(Transport)}")
        found = TransferFormula(*_numbers(formula, f"costs.transfers.{name}", TransferFormula._fields))
        if found.bytes_per_s <= 0:
            raise ValueError(f"costs.transfers.{name}.bytes_per_s: must be above 0")
        transfers[Transport(name)] = found
    (size,) = _numbers({"kv_bytes_per_token": section["kv_bytes_per_token"]}, "costs", ("kv_bytes_per_token",))
    if size <= 0 or max(prefill) <= 0:
        raise ValueError("costs: kv_bytes_per_token and one of costs.prefill must be above 0")
    return CostConstants(PrefillConstants(*prefill), transfers, size)


def _section(values: object, where: str, keys: set[str]) -> Mapping[str, Any]:
    if not isinstance(values, Mapping) or set(values) != keys:
        raise ValueError(f"{where}: expected the keys {', '.join(sorted(keys))}")
    return values


def _numbers(values: object, where: str, names: tuple[str, ...]) -> list[float]:
    section = _section(values, where, set(names))
    for name in names:
        value = section[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
            raise ValueError(f"{where}.{name}: {value!r} is not a number of at least 0")
    return [float(section[name]) for name in names]
