"""Expected duration of an experiment: from its offered load before it runs, from its finished runs afterwards."""

from __future__ import annotations

from launch.experiment.definition.file import LoadedExperiment
from launch.experiment.records.state import ExperimentState
from launch.fleet.file import FleetFile
from replayer.replay.plan import OfferedLoad


def replay_s(experiment: LoadedExperiment, offered: OfferedLoad, clock_scale: float) -> float | None:
    """Least wall seconds for the replays of a live experiment; None for a simulated one.

    A replay cannot end before its last arrival; the additional time is what the experiment measures.
    """
    if experiment.settings.backend.kind != "live":
        return None
    runs = len(experiment.settings.arms) * len(experiment.settings.run_seeds)
    return runs * offered.span_s / clock_scale


def start_limit_s(experiment: LoadedExperiment, fleets: dict[str, FleetFile]) -> float:
    """Most wall seconds for starting all fleets."""
    return sum(fleet.ready_timeout_s for fleet in fleets.values()) * len(experiment.settings.run_seeds)


def left_s(state: ExperimentState, jobs: int = 1) -> float | None:
    """Wall seconds for the remaining runs, by the mean of the finished ones; None before the first."""
    took = [run.took_s for run in state.done() if run.took_s is not None]
    return len(state.left) * sum(took) / len(took) / jobs if took else None


def in_words(seconds: float) -> str:
    """12 s, 5 min, 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
