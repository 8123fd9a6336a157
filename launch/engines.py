"""What it takes to run an engine, by kind: command line, environment, and the URLs that say it is ready.

A further kind is one more class here and one more section in the fleet file; everything else in the launcher sees only
`ProcessSpec`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from launch.fleet import FleetFile


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start."""

    name: str
    kind: str
    """An engine kind, or "proxy"."""
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the launcher's own environment."""
    drop_environment_prefix: str | None = None
    """Variables of the launcher's environment that the process must not see."""
    ready_urls: tuple[str, ...] = ()
    """All must answer 200 before the process counts as ready."""
    url: str = ""
    bootstrap_url: str | None = None


class EngineKind(Protocol):
    """How one kind of engine is run."""

    def command(self, fleet: FleetFile, index: int) -> tuple[str, ...]:
        """Command line of instance ``index``."""
        ...

    def environment(self, fleet: FleetFile, index: int) -> dict[str, str]:
        """Variables instance ``index`` needs beyond the fleet file's own."""
        ...

    def ready_urls(self, fleet: FleetFile, index: int) -> tuple[str, ...]:
        """URLs that answer 200 once instance ``index`` can serve."""
        ...


class SimEngine:
    """The simulated engine, ``python -m sim``."""

    def command(self, fleet: FleetFile, index: int) -> tuple[str, ...]:
        """Command line of instance ``index``."""
        sim = fleet.sim
        options: dict[str, object] = {
            "host": fleet.host,
            "port": fleet.base_port + index,
            "bootstrap-port": fleet.base_bootstrap_port + index if fleet.has_bootstrap else None,
            "role": fleet.role.value,
            "model": fleet.model,
            "profile": sim.profile,
            **{name.replace("_", "-"): value for name, value in sim.model_dump(exclude={"profile"}).items()},
        }
        flags = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
        return (sys.executable, "-m", "sim", *flags)

    def environment(self, fleet: FleetFile, index: int) -> dict[str, str]:
        """Nothing: flags say it all."""
        return {}

    def ready_urls(self, fleet: FleetFile, index: int) -> tuple[str, ...]:
        """Health, and the bootstrap server where there is one."""
        bootstrap = fleet.bootstrap_url(index)
        return (f"{fleet.url(index)}/health", *((f"{bootstrap}/query",) if bootstrap else ()))


KINDS: dict[str, EngineKind] = {"sim": SimEngine()}
"""Engine kind of a fleet file -> how to run it."""


def engine_specs(fleet: FleetFile) -> list[ProcessSpec]:
    """The fleet's engines, in order."""
    kind = KINDS[fleet.kind]
    return [
        ProcessSpec(
            name=fleet.name(index),
            kind=fleet.kind,
            command=kind.command(fleet, index),
            environment={**kind.environment(fleet, index), **fleet.env},
            ready_urls=kind.ready_urls(fleet, index),
            url=fleet.url(index),
            bootstrap_url=fleet.bootstrap_url(index),
        )
        for index in range(fleet.count)
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
