"""Settings of the demonstration: arms, trace, load, fleet. Read from configs/demo.yaml; flags override keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from launch.fleet.file import FleetError, FleetFile, explain, parse_fleet, ports_in_use
from launch.fleet.wall_time import in_wall_time
from warmroute_yaml import load_yaml

DEMO_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "demo.yaml"
_PORT_STEP = 50
_PORT_TRIES = 100


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DemoArmSettings(_Section):
    """One arm: a routing policy and, if wanted, an offload planner."""

    policy: str = Field(description="registered routing policy")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that policy")
    planner: str = Field(default="never", description="registered offload planner")
    planner_params: dict[str, Any] = Field(default_factory=dict, description="parameters of that planner")
    label: str = Field(default="", description="name of the arm; default: the policy's")

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, str) else value

    @property
    def name(self) -> str:
        """Label, or the policy's name."""
        return self.label or self.policy


class LoadSettings(_Section):
    """Replay settings of the trace, as for `warmroute replay`."""

    time_scale: float = Field(default=1.0, gt=0, description="arrivals come this many times faster than in the trace")
    think_scale: float | None = Field(default=None, gt=0, description="think times likewise; default: time_scale")
    max_inflight_sessions: int | None = Field(default=None, ge=1, description="most sessions in progress at once")
    timeout_s: float = Field(default=600.0, gt=0, description="engine seconds one request may take")
    seed: int = Field(default=0, description="chooses the tokens that block ids stand for")


class DemoTraceSettings(_Section):
    """The generated trace; see `warmroute trace synth`."""

    requests: int = Field(default=500, ge=10, description="requests")
    seed: int = Field(default=0, description="seed")
    rate_per_s: float = Field(default=1.0, gt=0, description="mean arrivals per engine second")
    length_scale: float = Field(default=1.0, gt=0, description="multiplies all lengths, prompts and outputs")


class DemoSettings(_Section):
    """All settings of ``warmroute demo``."""

    arms: tuple[DemoArmSettings, ...] = Field(min_length=1, description="the first is the baseline")
    clock_scale: float = Field(gt=0, description="speed of engines and replay relative to real time")
    trace: DemoTraceSettings = Field(default_factory=DemoTraceSettings)
    load: LoadSettings = Field(default_factory=LoadSettings)
    fleet: dict[str, Any] = Field(
        description="a fleet file without the keys that arms set (policy, offload, time_scale)"
    )
    resamples: int = Field(default=2000, ge=1000, description="bootstrap resamples of the comparison")

    @field_validator("arms")
    @classmethod
    def _distinct(cls, value: tuple[DemoArmSettings, ...]) -> tuple[DemoArmSettings, ...]:
        names = [arm.name for arm in value]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"arms share the name {', '.join(twice)}; give each a label of its own")
        if any("/" in name or name.startswith(".") for name in names):
            raise ValueError("an arm's name becomes a folder: no '/' and no leading '.'")
        return value

    def fleet_of(self, arm: DemoArmSettings, base_port: int | None = None) -> FleetFile:
        """The fleet an arm runs on.

        Args:
            arm: the arm with policy and planner.
            base_port: first of the ports to use instead of the file's: engines, then bootstrap servers, then the proxy.

        Raises:
            FleetError: the fleet's settings or the policy's are wrong.
        """
        values = dict(self.fleet)
        proxy = dict(values.get("proxy") or {})
        proxy["policy"] = {"name": arm.policy, "params": arm.params}
        proxy["offload"] = {**(proxy.get("offload") or {}), "planner": arm.planner, "params": arm.planner_params}
        values["sim"] = {**(values.get("sim") or {}), "time_scale": self.clock_scale}
        if base_port is not None:
            count = int(values.get("count", 1))
            values |= {"base_port": base_port, "base_bootstrap_port": base_port + count}
            proxy["port"] = base_port + 2 * count
        values["proxy"] = in_wall_time(proxy, self.clock_scale)
        return parse_fleet(values, f"fleet of arm {arm.name}")


def load_demo(path: Path, **overrides: Any) -> DemoSettings:
    """Read the demonstration's settings; ``overrides`` that are not None replace keys.

    Args:
        path: YAML file.
        overrides: new values by key; ``trace__requests`` means ``requests`` under ``trace``.

    Raises:
        FleetError: the file cannot be read, a key is unknown, or a value (the fleets' included) is refused.
    """
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(f"{path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise FleetError(f"{path}: not YAML ({error})") from error
    if not isinstance(values, dict):
        raise FleetError(f"{path}: expected keys such as `arms` and `fleet`")
    for name, value in overrides.items():
        if value is not None:
            section, _, key = name.partition("__")
            values[section] = {**(values.get(section) or {}), key: value} if key else value
    try:
        settings = DemoSettings(**values)
    except ValidationError as error:
        raise FleetError(explain(error, str(path), DemoSettings)) from error
    for arm in settings.arms:
        settings.fleet_of(arm)
    return settings


def choose_base_port(settings: DemoSettings, first: int) -> int:
    """The first port from ``first`` on, in steps, from which the whole fleet's ports are free.

    Raises:
        FleetError: none is.
    """
    for base in range(first, min(first + _PORT_STEP * _PORT_TRIES, 65000), _PORT_STEP):
        if not ports_in_use(settings.fleet_of(settings.arms[0], base)):
            return base
    raise FleetError(f"no free range of ports from {first} on; choose another with --base-port")
