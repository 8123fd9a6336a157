"""Engine kinds: command line, environment and readiness URLs of each.

A further kind is one more class here and one more section in the fleet file; the rest of the launcher uses only
`ProcessSpec`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from launch.engines.vllm import VllmEngine
from launch.fleet.file import FleetFile
from launch.fleet.members import Member


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start."""

    name: str
    kind: str
    """An engine kind, or "proxy"."""
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the launcher's own environment."""
    default_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added where the launcher's own environment does not have them."""
    drop_environment_prefix: str | None = None
    """Variables of the launcher's environment that the process must not see, by the start of their names."""
    drop_environment: tuple[str, ...] = ()
    """The same by whole names."""
    search_paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Variable with a list of directories -> those that come before its others."""
    ready_urls: tuple[str, ...] = ()
    """All must answer 200 before the process counts as ready."""
    url: str = ""
    bootstrap_url: str | None = None
    member: Member | None = None
    """The fleet's instance; None for the proxy."""

    def complete_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """All variables of the process: the inherited ones that it may see, its own, its search paths."""
        prefix = self.drop_environment_prefix
        seen = {
            name: value
            for name, value in inherited.items()
            if name not in self.drop_environment and not (prefix and name.startswith(prefix))
        }
        variables = {**self.default_environment, **seen}
        variables.update(self.environment)
        for name, directories in self.search_paths.items():
            variables[name] = ":".join([*directories, *filter(None, [variables.get(name)])])
        return variables


class EngineKind(Protocol):
    """Interface of one engine kind."""

    def command(self, fleet: FleetFile, index: int) -> tuple[str, ...]:
        """Command line of instance ``index``."""
        ...

    def environment(self, fleet: FleetFile, index: int) -> dict[str, str]:
        """Variables instance ``index`` needs beyond the fleet file's own."""
        ...

    def default_environment(self, fleet: FleetFile, index: int) -> Mapping[str, str]:
        """Variables of instance ``index`` where neither the fleet file nor the inherited environment has them."""
        ...

    def dropped_environment(self, fleet: FleetFile, index: int) -> tuple[str, ...]:
        """Inherited variables that instance ``index`` must not see."""
        ...

    def search_paths(self, fleet: FleetFile, index: int) -> dict[str, tuple[str, ...]]:
        """Variable with a list of directories -> those that instance ``index`` needs before its others."""
        ...

    def ready_urls(self, fleet: FleetFile, index: int) -> tuple[str, ...]:
        """URLs that answer 200 once instance ``index`` can serve."""
        ...

    def problems(self, fleet: FleetFile, inherited: Mapping[str, str]) -> list[str]:
        """Sentences on what this machine lacks to start the fleet; ``inherited`` is the launcher's environment."""
        ...


class SimEngine:
    """The simulated engine, ``python -m sim``."""

    def command(self, fleet: FleetFile, index: int) -> tuple[str, ...]:
        """Command line of instance ``index``."""
        sim, member = fleet.sim, fleet.members[index]
        options: dict[str, object] = {
            "host": fleet.host,
            "port": member.port,
            "bootstrap-port": member.bootstrap_port,
            "role": member.role.value,
            "model": fleet.model,
            "profile": sim.profile,
            "engine-speed": sim.time_scale,
            **{
                name.replace("_", "-"): value
                for name, value in sim.model_dump(exclude={"profile", "time_scale"}).items()
            },
        }
        flags = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
        return (sys.executable, "-m", "sim", *flags)

    def environment(self, fleet: FleetFile, index: int) -> dict[str, str]:
        """No variables: flags carry all settings."""
        return {}

    def default_environment(self, fleet: FleetFile, index: int) -> Mapping[str, str]:
        """None."""
        return {}

    def dropped_environment(self, fleet: FleetFile, index: int) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def search_paths(self, fleet: FleetFile, index: int) -> dict[str, tuple[str, ...]]:
        """None."""
        return {}

    def ready_urls(self, fleet: FleetFile, index: int) -> tuple[str, ...]:
        """Health, and the bootstrap server where there is one."""
        bootstrap = fleet.bootstrap_url(index)
        return (f"{fleet.url(index)}/health", *((f"{bootstrap}/query",) if bootstrap else ()))

    def problems(self, fleet: FleetFile, inherited: Mapping[str, str]) -> list[str]:
        """No requirements: the engine is part of this project."""
        return []


KINDS: dict[str, EngineKind] = {"sim": SimEngine(), "vllm": VllmEngine()}
"""Engine kind of a fleet file -> its implementation."""


def engine_specs(fleet: FleetFile) -> list[ProcessSpec]:
    """The fleet's engines, in order."""
    kind = KINDS[fleet.kind]
    return [
        ProcessSpec(
            name=member.name,
            kind=fleet.kind,
            command=kind.command(fleet, member.index),
            environment={**kind.environment(fleet, member.index), **member.env},
            default_environment=kind.default_environment(fleet, member.index),
            drop_environment=kind.dropped_environment(fleet, member.index),
            search_paths=kind.search_paths(fleet, member.index),
            ready_urls=kind.ready_urls(fleet, member.index),
            url=fleet.url(member.index),
            bootstrap_url=fleet.bootstrap_url(member.index),
            member=member,
        )
        for member in fleet.members
    ]


def proxy_spec(fleet: FleetFile, config: Path) -> ProcessSpec:
    """The proxy in front of the fleet, reading the generated settings file.

    Variables called ``WARMROUTE_...`` would override that file, so the proxy does not get them.
    """
    return ProcessSpec(
        name="proxy",
        kind="proxy",
        command=(sys.executable, "-m", "proxy", "--config", str(config)),
        drop_environment_prefix="WARMROUTE_",
        ready_urls=(f"{fleet.proxy_url()}/ready",),
        url=fleet.proxy_url(),
    )
