"""Settings of an experiment: arms, trace, load, repeats, order and backend, from YAML; unknown keys are refused."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from launch.experiment.definition.sections import (
    ArmSettings,
    ComparisonSettings,
    LiveBackend,
    ReplaySettings,
    Section,
    SimulatedBackend,
    TraceSettings,
    is_recorded,
)
from launch.fleet.file import explain
from launch.fleet.overrides import apply_overrides
from launch.shipped import ShippedFileError, find_shipped
from warmroute_yaml import load_yaml

EXPERIMENTS = Path(__file__).resolve().parents[3] / "configs" / "experiments"
"""Folder of the shipped experiment files."""
_ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")
_LIVE_REPLAY = ("timeout_s", "prompt_mode", "token_low", "token_high")


class ExperimentError(ValueError):
    """An experiment that cannot be run, continued or read; the message names the remedy."""


class ExperimentSettings(Section):
    """All settings of an experiment."""

    name: str = Field(description="names the run directory")
    trace: TraceSettings = Field(description="a path, or a section")
    replay: ReplaySettings = Field(default_factory=ReplaySettings, description="replay settings")
    arms: dict[str, ArmSettings] = Field(
        min_length=1, description="arm name -> its settings, or the name of its routing policy"
    )
    baseline: str = Field(default="", description="arm the others are compared with; default: the first")
    repeats: int = Field(default=1, ge=1, description="runs of every arm (with each of `seeds`, where given)")
    seeds: tuple[int, ...] | None = Field(
        default=None, min_length=1, description="default: one for each repeat: 0, 1, 2, ..."
    )
    order: Literal["interleaved", "randomised"] = Field(
        default="interleaved",
        description="interleaved: each repeat runs all arms, beginning one arm later than the previous repeat; "
        "randomised: each repeat runs all arms in an order drawn from order_seed",
    )
    order_seed: int = Field(default=0, ge=0, description="for randomised order")
    backend: LiveBackend | SimulatedBackend = Field(discriminator="kind", description="live or simulated")
    on_stale: Literal["stop", "skip"] = Field(
        default="stop", description="after an arm refused for stale engines: stop, or continue without it"
    )
    on_failure: Literal["stop", "skip"] = Field(
        default="stop", description="after a fleet that did not start or a process that died: likewise"
    )
    comparison: ComparisonSettings = Field(default_factory=ComparisonSettings, description="comparison at the end")

    @field_validator("name")
    @classmethod
    def _a_folder(cls, value: str) -> str:
        if not _ARM_NAME.fullmatch(value):
            raise ValueError(f"{value!r} is used as a folder name: letters, digits and . _ + = - only")
        return value

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and (len(set(value)) < len(value) or min(value) < 0):
            raise ValueError("seeds must be different numbers from 0 up; use `repeats` to run one several times")
        return value

    @model_validator(mode="after")
    def _makes_sense(self, info: ValidationInfo) -> ExperimentSettings:
        for name in self.arms:
            if not _ARM_NAME.fullmatch(name):
                raise ValueError(f"arms: {name!r} is used as a folder name: letters, digits and . _ + = - only")
        if self.baseline and self.baseline not in self.arms:
            raise ValueError(f"baseline: {self.baseline!r} is none of the arms: {', '.join(self.arms)}")
        if not is_recorded(info):
            self._check_classes()
        if isinstance(self.backend, SimulatedBackend):
            self._check_simulated()
        return self

    def _check_classes(self) -> None:
        """Refuse classes that cannot be imported or built, and all where the proxy would have to import them."""
        for arm, settings in self.arms.items():
            for key, part in settings.parts.items():
                if ":" not in part.name:
                    continue
                if isinstance(self.backend, LiveBackend):
                    raise ValueError(
                        f"arms.{arm}.{key}: {part.name!r} is a class, and a running proxy takes names only: declare it "
                        "in an installed package (docs/policies.md) and give its name, or simulate (backend.kind: "
                        "simulated)"
                    )
                try:
                    part.make()
                except ValueError as error:
                    raise ValueError(f"arms.{arm}.{key}: {error}") from error

    def _check_simulated(self) -> None:
        given = [key for key in _LIVE_REPLAY if getattr(self.replay, key) != ReplaySettings.model_fields[key].default]
        if given:
            raise ValueError(f"replay.{given[0]}: the simulator sends no requests; remove the key")
        if self.replay.idle_gap_cap_s is None:
            raise ValueError("replay.idle_gap_cap_s: the simulator needs a number; give a large one for no cap")
        for name in self.arms:
            self.simulated(name)
        if self.seeds is not None and self.repeats > 1:
            raise ValueError(
                "repeats: the simulator gives the same records for the same seed; list more seeds instead of repeating"
            )
        noise = isinstance(self.backend, SimulatedBackend) and self.backend.noise.any
        if len(self.run_seeds) > 1 and not noise:
            raise ValueError(
                "repeats: without noise every repeat would be the same; set backend.noise.arrival_jitter_s or "
                "speed_sigma, or run once"
            )

    def simulated(self, name: str) -> SimulatedBackend:
        """The backend with the keys of one arm of a simulated experiment.

        Raises:
            ValueError: the arm changes a key that all arms must share, or has a wrong value.
        """
        assert isinstance(self.backend, SimulatedBackend)
        changes = self.arms[name].fleet
        shared = sorted({"kind", "noise"} & set(changes))
        if shared:
            raise ValueError(f"arms.{name}.fleet.{shared[0]}: must be the same in all arms; set it under `backend`")
        try:
            return SimulatedBackend(**{**self.backend.model_dump(), **changes})
        except ValidationError as error:
            raise ValueError(explain(error, f"arms.{name}.fleet", SimulatedBackend)) from error

    @property
    def baseline_arm(self) -> str:
        """The arm the others are compared with."""
        return self.baseline or next(iter(self.arms))

    @property
    def run_seeds(self) -> tuple[int, ...]:
        """The seed of each repeat, in order; its length is the number of repeats of every arm."""
        return tuple(range(self.repeats)) if self.seeds is None else self.seeds * self.repeats


class LoadedExperiment(BaseModel):
    """A checked experiment file."""

    model_config = ConfigDict(frozen=True)

    settings: ExperimentSettings
    source: Path
    text: str
    """The file's own text."""
    overrides: tuple[str, ...] = ()
    """`--set` arguments applied to it."""

    @property
    def config(self) -> dict[str, Any]:
        """Every setting as plain values with defaults; a resumed experiment must have the same."""
        return self.settings.model_dump(mode="json")

    @property
    def sha256(self) -> str:
        """SHA-256 of the file's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def resume_command(self, directory: Path) -> str:
        """Command line that continues the experiment in a directory; without the overrides it would be refused."""
        sets = [word for override in self.overrides for word in ("--set", override)]
        return shlex.join(
            ["warmroute", "experiment", "run", str(self.source), *sets, "--output", str(directory), "--resume"]
        )


def parse_experiment(values: Any, source: str = "experiment", *, recorded: bool = False) -> ExperimentSettings:
    """Checked settings from plain values.

    Args:
        values: the keys.
        source: names them in errors.
        recorded: they are those of a finished experiment: its policies need not exist any more, and what earlier
            versions accepted is accepted.

    Raises:
        ExperimentError: unknown key, wrong value, or keys that contradict each other.
    """
    if not isinstance(values, dict):
        raise ExperimentError(f"{source}: expected keys such as `name` and `arms`, found {type(values).__name__}")
    try:
        return ExperimentSettings.model_validate(values, context={"recorded": recorded})
    except ValidationError as error:
        raise ExperimentError(explain(error, source, ExperimentSettings)) from error


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> LoadedExperiment:
    """Read an experiment file; a bare name such as ``aa-simulated`` means the shipped one.

    Args:
        path: the file.
        overrides: ``dotted.key=value`` with a YAML value, applied in order after the file.

    Raises:
        ExperimentError: no such file, not YAML, or `parse_experiment` refuses it.
    """
    found = find_experiment(path)
    try:
        text = found.read_text(encoding="utf-8")
        values = load_yaml(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{found}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise ExperimentError(f"{found}: not YAML ({error})") from error
    if isinstance(values, dict) and overrides:
        try:
            values = apply_overrides(values, overrides, example="backend.instances=16")
        except ValueError as error:
            raise ExperimentError(f"{found}: {error}") from error
    settings = parse_experiment(values, str(found))
    return LoadedExperiment(settings=settings, source=found, text=text, overrides=tuple(overrides))


def find_experiment(path: Path) -> Path:
    """The file meant by a path or by the name of a shipped experiment.

    Raises:
        ExperimentError: neither exists.
    """
    try:
        return find_shipped(path, EXPERIMENTS)
    except ShippedFileError as error:
        raise ExperimentError(f"no experiment file at {path}; shipped experiments: {error}") from error
