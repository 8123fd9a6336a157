"""The fleet of each live arm: the experiment's fleet, the arm's own keys, its policy and planner, free ports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.experiment.definition.file import ExperimentError, LoadedExperiment
from launch.experiment.definition.sections import ArmSettings, LiveBackend
from launch.fleet.file import FleetError, FleetFile, find_fleet, load_fleet, parse_fleet, ports_in_use
from launch.fleet.overrides import apply_environment, apply_overrides
from launch.fleet.wall_time import in_wall_time
from warmroute_yaml import load_yaml

_PORT_STEP = 50
_PORT_TRIES = 200
_LAST_PORT = 64000


def arm_fleets(experiment: LoadedExperiment) -> dict[str, FleetFile]:
    """The checked fleet of every arm; none for a simulated experiment.

    Raises:
        ExperimentError: a fleet is refused, arms would run at different clock speeds, or a fleet has peers.
    """
    backend = experiment.settings.backend
    if not isinstance(backend, LiveBackend):
        return {}
    fleets = {name: arm_fleet(experiment, name) for name in experiment.settings.arms}
    for name, fleet in fleets.items():
        if fleet.peers:
            raise ExperimentError(
                f"fleet of arm {name}: has peers, which this machine cannot restart for every run and so not prove "
                "fresh; remove `peers`"
            )
    speeds = {clock_scale(fleet) for fleet in fleets.values()}
    if len(speeds) > 1:
        scales = ", ".join(f"{name}: {clock_scale(fleet):g}" for name, fleet in fleets.items())
        raise ExperimentError(f"sim.time_scale differs between arms ({scales}); their times could not be compared")
    return fleets


def fleet_source(experiment: LoadedExperiment) -> Path | None:
    """The fleet file of a live experiment; None where the fleet is written into the experiment file.

    Raises:
        ExperimentError: there is no such file.
    """
    backend = experiment.settings.backend
    if not isinstance(backend, LiveBackend) or not isinstance(backend.fleet, str):
        return None
    beside = experiment.source.parent / backend.fleet
    try:
        return beside if beside.is_file() else find_fleet(Path(backend.fleet))
    except FleetError as error:
        raise ExperimentError(f"{experiment.source}: backend.fleet: {error}") from error


def arm_fleet(experiment: LoadedExperiment, name: str, base_port: int | None = None) -> FleetFile:
    """The fleet one arm runs on.

    Args:
        experiment: the experiment with the fleet.
        name: name of the arm.
        base_port: first of the ports to use instead of the file's.

    Raises:
        ExperimentError: the fleet or the arm's keys are refused.
    """
    backend, arm = experiment.settings.backend, experiment.settings.arms[name]
    assert isinstance(backend, LiveBackend)
    texts = [*_flat(backend.overrides), *_flat(arm.fleet)]
    source = fleet_source(experiment)
    try:
        if source is not None:
            # Read once for its own checks, so that a message names the file.
            load_fleet(source, texts)
            values = load_yaml(source.read_text(encoding="utf-8"))
        else:
            values = backend.fleet
        values = apply_overrides(apply_environment(dict(values)), texts)
        values = _with_arm(values, arm)
        if base_port is not None:
            values = _moved(values, base_port)
        return parse_fleet(values, f"fleet of arm {name}")
    except (FleetError, ValueError, OSError) as error:
        raise ExperimentError(str(error)) from error


def placed_fleet(experiment: LoadedExperiment, name: str) -> FleetFile:
    """The fleet of an arm on ports that are free now, where the experiment gives a ``base_port``.

    Raises:
        ExperimentError: no range of ports is free.
    """
    backend = experiment.settings.backend
    first = backend.base_port if isinstance(backend, LiveBackend) else None
    if first is None:
        return arm_fleet(experiment, name)
    step = max(_PORT_STEP, len(arm_fleet(experiment, name).ports()) + 2)
    for base in range(first, min(first + step * _PORT_TRIES, _LAST_PORT - step), step):
        fleet = arm_fleet(experiment, name, base)
        if not ports_in_use(fleet):
            return fleet
    raise ExperimentError(f"no free range of ports from {first} on; choose another backend.base_port")


def clock_scale(fleet: FleetFile) -> float:
    """Speed of the engines relative to real time."""
    return fleet.sim.time_scale if fleet.kind == "sim" else 1.0


def _with_arm(values: dict[str, Any], arm: ArmSettings) -> dict[str, Any]:
    proxy = dict(values.get("proxy") or {})
    proxy["policy"] = arm.policy.model_dump()
    proxy["offload"] = {**(proxy.get("offload") or {}), **arm.offload.model_dump()}
    proxy["admission"] = {**(proxy.get("admission") or {}), **arm.admission.model_dump()}
    scale = (values.get("sim") or {}).get("time_scale", 1.0) if values.get("kind") == "sim" else 1.0
    if isinstance(scale, int | float) and scale > 0:
        proxy = in_wall_time(proxy, scale)
    return {**values, "proxy": proxy}


def _moved(values: dict[str, Any], base_port: int) -> dict[str, Any]:
    """The same fleet on other ports: one block of ports for each kind, the proxy's after them."""
    fleet = parse_fleet(values)
    count, ranks = fleet.instances, sum(member.ranks for member in fleet.members)
    widths = {"base_port": count, "base_bootstrap_port": count}
    if values.get("kind") == "vllm":
        widths |= {"base_events_port": ranks, "base_events_replay_port": ranks, "base_master_port": count}
    moved, following = {}, base_port
    for key, width in widths.items():
        moved[key], following = following, following + width
    proxy = {**(values.get("proxy") or {}), "port": following}
    if isinstance(proxy.get("admin"), dict):
        proxy["admin"] = {**proxy["admin"], "port": proxy["port"] + 1}
    return {**values, **moved, "proxy": proxy}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Nested or dotted keys as the ``key=value`` texts that `apply_overrides` takes."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"
