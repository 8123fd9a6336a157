"""Requests of the trace that an arm's engines refuse for their length: said before the first run, not after it."""

from __future__ import annotations

from dataclasses import dataclass

from launch.experiment.definition.file import LoadedExperiment
from launch.experiment.definition.sections import SimulatedBackend
from launch.fleet.file import FleetFile
from replayer.replay.plan import Plan
from warmroute_yaml import hardware_file, load_yaml


@dataclass(frozen=True)
class TooLong:
    """Arms whose engines take the same length, and the requests of a run that need more."""

    arms: tuple[str, ...]
    limit_tokens: int
    """Most tokens of a prompt with its answer."""
    requests: int


def too_long(experiment: LoadedExperiment, fleets: dict[str, FleetFile], plan: Plan) -> list[TooLong]:
    """The arms with such requests, shortest limit first; arms whose limit is not known here are left out.

    Simulated runs shorten an answer that does not fit, as an engine does without ``max_tokens``, so that there only
    the prompt counts.
    """
    simulated = isinstance(experiment.settings.backend, SimulatedBackend)
    arms: dict[int, list[str]] = {}
    for name in experiment.settings.arms:
        limit = _simulated_limit(experiment, name) if simulated else _fleet_limit(fleets[name])
        if limit is not None:
            arms.setdefault(limit, []).append(name)
    requests = [step.request for session in plan.sessions for step in session.steps]
    needed = [one.input_length + (1 if simulated else max(one.output_length, 1)) for one in requests]
    counts = ((limit, sum(tokens > limit for tokens in needed)) for limit in sorted(arms))
    return [TooLong(tuple(arms[limit]), limit, count) for limit, count in counts if count]


def _simulated_limit(experiment: LoadedExperiment, arm: str) -> int:
    backend = experiment.settings.simulated(arm)
    return _of_profile(backend.profile, backend.pool_tokens)


def _fleet_limit(fleet: FleetFile) -> int | None:
    if fleet.kind == "sim":
        return fleet.sim.max_model_len or _of_profile(fleet.sim.profile, fleet.sim.kv_capacity_tokens)
    return fleet.vllm.max_model_len


def _of_profile(name: str, pool_tokens: int | None) -> int:
    """As the engines take it from a profile, which the checks before this have read."""
    profile = load_yaml(hardware_file(name).read_text(encoding="utf-8"))
    pool = profile["kv"]["pool_tokens"] if pool_tokens is None else pool_tokens
    return min(int(profile["max_model_len"]), int(pool))
