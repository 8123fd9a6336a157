"""Measured points of one kind of instance, the input of ``warmroute sim fit``: the file format."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sim.hardware import KvPool, ProfileError, read_yaml
from warmroute_yaml import HARDWARE_FOLDER, problems_of


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DecodePoint(_Strict):
    """A step that decodes one token for each of ``streams`` with ``context`` tokens each."""

    streams: int = Field(gt=0)
    context: int = Field(ge=0)
    seconds: float = Field(gt=0)


class PrefillPoint(_Strict):
    """Time to first token of ``new`` tokens after ``cached`` ones on an idle instance."""

    new: int = Field(gt=0)
    cached: int = Field(ge=0)
    seconds: float = Field(gt=0)


class InterferencePoint(_Strict):
    """A prefill that arrives while ``streams`` decode."""

    streams: int = Field(gt=0)
    prefill: int = Field(gt=0)
    ttft_s: float = Field(gt=0)
    tpot_s: float = Field(gt=0)
    """Burst average: ttft_s over the tokens that each stream got meanwhile."""
    gap_s: float | None = None
    """Longest time between two tokens of a stream."""
    skip: str | None = None
    """Reason for which the point is left out; None if it is not."""


class TransferPoint(_Strict):
    """``tokens`` of KV moved, ``streams`` decoding on each side, ``transfers`` at a time."""

    tokens: int = Field(gt=0)
    streams: int = Field(default=0, ge=0)
    transfers: int = Field(default=1, ge=1)
    seconds: float = Field(gt=0)


class LoadFactor(_Strict):
    """Factor on a transfer's time with ``streams`` decoding on each side."""

    streams: int = Field(gt=0)
    factor: float = Field(gt=0)


class TransportPoints(_Strict):
    """Measurements of one transport: bare transfers, or whole D legs from which the rest is subtracted."""

    published: bool = False
    """The bare transfers, slowdowns and spread are those of ``policies.costs.published``; the file gives none."""
    transfers: tuple[TransferPoint, ...] = ()
    legs: tuple[TransferPoint, ...] = ()
    raw_gb_per_s: float | None = None
    """With legs: peak bandwidth, below which no transfer's time is put."""
    load_factors: tuple[LoadFactor, ...] = ()
    contention: float | None = None
    """Set, not fitted (see ``sim.hardware.Transport``)."""

    @model_validator(mode="after")
    def _one_kind(self) -> TransportPoints:
        if self.published + bool(self.transfers) + bool(self.legs) != 1:
            raise ValueError("a transport has either transfers or legs, or says published: true")
        if self.published and self.load_factors:
            raise ValueError("published transfers have published load_factors; remove the file's")
        if self.legs and self.raw_gb_per_s is None:
            raise ValueError("legs need raw_gb_per_s")
        if not self.legs and self.contention is None:
            raise ValueError("bare transfers need a contention")
        return self


class Points(_Strict):
    """All points of one kind of instance and the values that are copied into its profile unchanged."""

    name: str
    source: str
    max_num_batched_tokens: int = Field(gt=0)
    max_num_seqs: int = Field(gt=0)
    max_model_len: int = Field(gt=0)
    kv: KvPool
    fixed: dict[str, float]
    background_context_tokens: int = Field(ge=0)
    decode: tuple[DecodePoint, ...] = Field(min_length=2)
    prefill: tuple[PrefillPoint, ...]
    interference: tuple[InterferencePoint, ...]
    default_transport: str | None = None
    transports: dict[str, TransportPoints] = {}


def load_points(path: Path) -> Points:
    """Read a points file.

    Raises:
        ProfileError: it cannot be read or does not fit the format.
    """
    try:
        return Points.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ProfileError(f"{path} is not a points file: {problems_of(error, Points)}") from error


def points_path(name: str) -> Path:
    """Points file of a profile: a path to a YAML file unchanged, a name looked up in configs/hardware.

    Raises:
        ProfileError: there are no points of this name; the text names the profiles that have some.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else HARDWARE_FOLDER / f"{name}_points.yaml"
    if not path.exists():
        known = sorted(each.stem.removesuffix("_points") for each in HARDWARE_FOLDER.glob("*_points.yaml"))
        raise ProfileError(f"no points file {path}; profiles with one: {', '.join(known)}")
    return path
