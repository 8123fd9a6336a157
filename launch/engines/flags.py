"""Check of the flags of simulated engines against each other, by the engine itself in a child process.

The simulator owns the rules of an engine's configuration, and this folder does not import it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from launch.engines.commands import KINDS, SimEngine
from launch.fleet.file import FleetFile

_TIMEOUT_S = 120.0
"""Far above the second that the child needs: a loaded machine must not fail a check."""


def start_problems(fleet: FleetFile, inherited: Mapping[str, str] | None = None) -> list[str]:
    """Sentences on what would stop the engines at their start; ``inherited`` replaces this process's environment."""
    machine = KINDS[fleet.kind].problems(fleet, os.environ if inherited is None else inherited)
    return [*machine, *refused_flags(fleet)]


def refused_flags(fleet: FleetFile) -> list[str]:
    """Sentences on flags that the fleet's simulated engines would refuse at their start; none for other kinds."""
    if fleet.kind != "sim":
        return []
    found: dict[str, None] = {}
    # All flags but the ports are the fleet's, and the role decides on the connector's share of the pool.
    for index in {member.role: member.index for member in fleet.members}.values():
        command = [*SimEngine().command(fleet, index), "--check"]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return [f"the engines could not be checked: {error}"]
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            found[f"sim: {said[-1].removeprefix('engine: ') if said else f'exit code {done.returncode}'}"] = None
    return list(found)
