"""Check of the simulated engines of all arms before anything starts, by the simulator itself in a child process.

The simulator owns the rules of an engine's configuration, and this folder does not import it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from launch.engines.flags import refused_flags
from launch.experiment.definition.file import ExperimentError, LoadedExperiment
from launch.experiment.definition.sections import SimulatedBackend
from launch.fleet.file import FleetFile

_TIMEOUT_S = 120.0
"""Far above the second that the child needs: a loaded machine must not fail an experiment."""
_OF_ENGINES = (
    "instances",
    "prefill_instances",
    "role",
    "profile",
    "pool_tokens",
    "max_num_batched_tokens",
    "max_num_seqs",
    "scheduling_policy",
    "long_prefill_token_threshold",
    "transport",
    "speeds",
)
"""Keys of the backend that decide on its engines; a setup of the simulator has the same."""


def check_engines(experiment: LoadedExperiment, block_tokens: int, fleets: Mapping[str, FleetFile]) -> None:
    """Refuse arms whose simulated engines cannot exist; real engines are not checked.

    Args:
        experiment: the checked file.
        block_tokens: tokens per block id of the replayed trace.
        fleets: fleet of each live arm.

    Raises:
        ExperimentError: names each such arm with the simulator's reason.
    """
    settings = experiment.settings
    if not isinstance(settings.backend, SimulatedBackend):
        # Arms mostly differ by their policies, which engines do not know: each child takes half a second.
        reasons: dict[str, list[str]] = {}
        checked: dict[tuple[str, ...], list[str]] = {}
        for name, fleet in fleets.items():
            engines = (fleet.sim.model_dump_json(), *sorted({member.role for member in fleet.members}))
            if engines not in checked:
                checked[engines] = refused_flags(fleet)
            for reason in checked[engines]:
                reasons.setdefault(reason, []).append(name)
        _refuse(reasons)
        return
    setups = [
        _setup(settings.simulated(name), settings.arms[name].offload.planner, block_tokens) for name in settings.arms
    ]
    refused: dict[str, list[str]] = {}
    for name, why in zip(settings.arms, engine_errors(setups), strict=True):
        if why is not None:
            refused.setdefault(why, []).append(name)
    _refuse(refused)


def engine_errors(setups: Sequence[dict[str, Any]]) -> list[str | None]:
    """The simulator's reason why each setup's engines cannot exist, None where they can, from one child process.

    Raises:
        ExperimentError: the child failed.
    """
    command = [sys.executable, "-m", "sim", "check"]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(setups), check=True, capture_output=True, timeout=_TIMEOUT_S
        )
        return msgspec.json.decode(done.stdout, type=list[str | None])
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ExperimentError(f"the engines could not be checked: {' '.join(last) or error}") from error
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        raise ExperimentError(f"the engines could not be checked: {error}") from error


def _refuse(refused: Mapping[str, list[str]]) -> None:
    """Raise for arms by their reasons, if there are any."""
    if refused:
        raise ExperimentError(
            "\n".join(f"arm{'s' * (len(names) > 1)} {', '.join(names)}: {reason}" for reason, names in refused.items())
        )


def _setup(backend: SimulatedBackend, planner: str, block_tokens: int) -> dict[str, Any]:
    """A `sim.offline.setup.Setup` as far as engines are concerned."""
    values = backend.model_dump(mode="json")
    return {"trace": "", "planner": planner, "block_tokens": block_tokens} | {
        name: values[name] for name in _OF_ENGINES
    }
