"""Check of the engines of simulated arms before anything starts, by the simulator itself in a child process.

The simulator owns the rules of an engine's configuration, and this folder does not import it.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec

from launch.experiment.definition.file import ExperimentError, LoadedExperiment
from launch.experiment.definition.sections import SimulatedBackend

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
    "transport",
)
"""Keys of the backend that decide on its engines; a setup of the simulator has the same."""


def check_engines(experiment: LoadedExperiment, block_tokens: int) -> None:
    """Refuse arms whose simulated engines cannot exist; of a live experiment nothing is checked.

    Args:
        experiment: the checked file.
        block_tokens: tokens per block id of the replayed trace.

    Raises:
        ExperimentError: names each such arm with the simulator's reason.
    """
    settings = experiment.settings
    if not isinstance(settings.backend, SimulatedBackend):
        return
    setups = [
        _setup(settings.simulated(name), settings.arms[name].offload.planner, block_tokens) for name in settings.arms
    ]
    command = [sys.executable, "-m", "sim", "check"]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(setups), check=True, capture_output=True, timeout=_TIMEOUT_S
        )
        errors = msgspec.json.decode(done.stdout, type=list[str | None])
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ExperimentError(f"the engines could not be checked: {' '.join(last) or error}") from error
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        raise ExperimentError(f"the engines could not be checked: {error}") from error
    refused: dict[str, list[str]] = {}
    for name, why in zip(settings.arms, errors, strict=True):
        if why is not None:
            refused.setdefault(why, []).append(name)
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
