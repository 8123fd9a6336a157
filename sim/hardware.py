"""Hardware profiles: step times, transfer times and KV pool of one kind of instance, read from YAML.

A profile is written by ``warmroute sim fit`` from a file of measured points; ``sim/fit.py`` says how.
"""

from __future__ import annotations

from bisect import bisect_left
from math import exp, log
from operator import attrgetter, itemgetter
from pathlib import Path
from random import Random
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from policies.costs.constants import CostConstants, constants_of
from sim.core.timing import StepTiming
from sim.core.types import TransferSeconds
from warmroute_yaml import hardware_file, hardware_names, load_yaml, problems_of


class ProfileError(Exception):
    """A hardware profile or points file that cannot be used; the message says why."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StepCosts(_Strict):
    """Fitted coefficients, in seconds; ``sim.core.timing.StepTiming`` documents what each one multiplies."""

    frontend_s: float = Field(ge=0)
    frontend_token_s: float = Field(ge=0)
    decode_s: float = Field(gt=0)
    decode_experts_s: float = Field(ge=0)
    expert_miss: float = Field(ge=0, lt=1)
    decode_context_s: float = Field(ge=0)
    prefill_s: float = Field(ge=0)
    prefill_token_s: float = Field(gt=0)
    prefill_context_s: float = Field(ge=0)
    prefill_floor_s: float = Field(ge=0)
    mixed_stream_s: float = Field(ge=0)


class KvPool(_Strict):
    """An instance's KV memory."""

    pool_tokens: int = Field(gt=0)
    bytes_per_token: int = Field(gt=0)
    connector_fraction: float = Field(ge=0, lt=1)
    """Share of the pool that a KV connector (any role but ``none``) takes away."""


_SIZE, _STREAMS = itemgetter(0), attrgetter("streams")


class LoadedTransferRow(_Strict):
    """Transfer times with ``streams`` decode streams running on each side: (bytes, seconds), bytes increasing."""

    streams: float = Field(ge=0)
    points: tuple[tuple[float, float], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _increasing(self) -> LoadedTransferRow:
        sizes = [size for size, _ in self.points]
        if sizes != sorted(set(sizes)) or sizes[0] <= 0:
            raise ValueError("transfer points need increasing sizes above 0")
        return self

    def seconds(self, size_bytes: float) -> float:
        """Time to move ``size_bytes``: linear from 0 through the points, beyond the last at its bandwidth."""
        points = self.points
        index = bisect_left(points, size_bytes, key=_SIZE)
        if index == 0:
            return points[0][1] * size_bytes / points[0][0]
        if index == len(points):
            return points[-1][1] * size_bytes / points[-1][0]
        (low, low_s), (high, high_s) = points[index - 1 : index + 1]
        return low_s + (high_s - low_s) * (size_bytes - low) / (high - low)


class SpreadPoint(_Strict):
    """Spread of repeated transfers of one size, as multiples of the median."""

    size_bytes: float = Field(gt=0)
    fastest: float = Field(gt=0, le=1)
    slowest: float = Field(ge=1)


class TransportProfile(_Strict):
    """One way to move KV between instances: measured times by size and by load on both sides."""

    contention: float = Field(ge=0)
    """Each further transfer in flight adds this share of the unshared time (1: they share one link fairly)."""
    rows: tuple[LoadedTransferRow, ...] = Field(min_length=1)
    spread: tuple[SpreadPoint, ...] = ()
    """By size; none below the first, none at all without any."""

    @model_validator(mode="after")
    def _increasing(self) -> TransportProfile:
        loads = [row.streams for row in self.rows]
        if loads != sorted(set(loads)):
            raise ValueError("transfer rows need increasing numbers of streams")
        sizes = [point.size_bytes for point in self.spread]
        if sizes != sorted(set(sizes)):
            raise ValueError("spread points need increasing sizes")
        return self

    def seconds(self, size_bytes: int, streams: float, transfers: int) -> float:
        """Seconds to move ``size_bytes`` with ``streams`` decoding on each side, the ``transfers``-th one in flight.

        Linear between the rows; beyond the last row it stays at the last row. The median, where times vary.
        """
        rows = self.rows
        index = bisect_left(rows, streams, key=_STREAMS)
        if index == 0:
            alone = rows[0].seconds(size_bytes)
        elif index == len(rows):
            alone = rows[-1].seconds(size_bytes)
        else:
            low, high = rows[index - 1 : index + 1]
            share = (streams - low.streams) / (high.streams - low.streams)
            alone = low.seconds(size_bytes) * (1 - share) + high.seconds(size_bytes) * share
        return alone * (1 + self.contention * max(transfers - 1, 0))

    def drawn(self, seed: str) -> TransferSeconds:
        """``seconds``, with a draw for every transfer of a size whose times vary: the same draws for the same seed."""
        if not self.spread:
            return self.seconds
        draw = Random(seed)

        def seconds(size_bytes: int, streams: float, transfers: int) -> float:
            return self.seconds(size_bytes, streams, transfers) * self._varied(size_bytes, draw.random())

        return seconds

    def _varied(self, size_bytes: float, quantile: float) -> float:
        """A quantile of time / median: linear in its logarithm from the fastest by the median to the slowest."""
        points = self.spread
        index = bisect_left(points, size_bytes, key=lambda point: point.size_bytes)
        high = points[min(index, len(points) - 1)]
        bound = high.fastest if quantile < 0.5 else high.slowest
        logarithm = log(bound)
        if index == 0:
            logarithm = 0.0 if size_bytes < high.size_bytes else logarithm
        elif index < len(points):
            low = points[index - 1]
            low_log = log(low.fastest if quantile < 0.5 else low.slowest)
            share = (size_bytes - low.size_bytes) / (high.size_bytes - low.size_bytes)
            logarithm = low_log + share * (logarithm - low_log)
        return exp(logarithm * abs(2 * quantile - 1))


class HardwareProfile(_Strict):
    """All hardware parameters of one kind of instance."""

    name: str
    source: str
    max_num_batched_tokens: int = Field(gt=0)
    max_num_seqs: int = Field(gt=0)
    max_model_len: int = Field(gt=0)
    step: StepCosts
    kv: KvPool
    default_transport: str | None = None
    """None only without transports: no transfer was measured."""
    transports: dict[str, TransportProfile] = {}
    costs: dict[str, Any] | None = None
    """Starting constants of the cost models, from a calibration (`policies.costs.constants`)."""

    @field_validator("costs")
    @classmethod
    def _usable(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            constants_of(value)
        return value

    @model_validator(mode="after")
    def _default_exists(self) -> HardwareProfile:
        if self.transports and self.default_transport not in self.transports:
            raise ValueError(f"default_transport {self.default_transport!r} is not in transports")
        return self

    @property
    def cost_constants(self) -> CostConstants | None:
        """Starting constants of the cost models; None: the built-in ones."""
        return None if self.costs is None else constants_of(self.costs)

    @property
    def timing(self) -> StepTiming:
        """The step coefficients as the engine core takes them."""
        return StepTiming(**self.step.model_dump())

    def transport(self, name: str | None = None) -> TransportProfile:
        """The named transport, or the default one.

        Raises:
            ProfileError: the profile has no such transport.
        """
        return self.transports[self.transport_name(name)]

    def transport_name(self, name: str | None = None) -> str:
        """A name for `transport`, the default one's if it is None.

        Raises:
            ProfileError: the profile has no such transport.
        """
        chosen = name or self.default_transport
        if chosen is None:
            raise ProfileError(f"profile {self.name} has no KV transport: calibrate a pair, or choose role none")
        if chosen not in self.transports:
            known = ", ".join(sorted(self.transports))
            raise ProfileError(f"profile {self.name} has no transport {chosen!r}; it has: {known}")
        return chosen

    def transfer_seconds(self, transport: str | None, seed: str) -> TransferSeconds:
        """Times of transfers, drawn with a seed where they vary; without transports, for engines that move no KV.

        Raises:
            ProfileError: the profile has no such transport.
        """
        if transport is None and not self.transports:
            return _no_transfer
        return self.transport(transport).drawn(seed)


def _no_transfer(size_bytes: int, streams: float, transfers: int) -> float:
    raise ProfileError("this profile has no KV transport")


def read_yaml(path: Path) -> object:
    """The content of a YAML file.

    Raises:
        ProfileError: the file is missing or not YAML.
    """
    try:
        return load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path} is not YAML: {error}") from error


def load_profile(name: str) -> HardwareProfile:
    """Read a profile by name (``h20``, ``h200``) or path.

    Raises:
        ProfileError: it does not exist or does not fit the model; the text names the known profiles.
    """
    path = hardware_file(name)
    if not path.exists():
        raise ProfileError(f"no hardware profile {path}; known: {', '.join(hardware_names())}")
    try:
        return HardwareProfile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ProfileError(f"{path} is not a hardware profile: {problems_of(error, HardwareProfile)}") from error
