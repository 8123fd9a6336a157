"""Order of an experiment's runs: a pure function of its settings.

Machines drift: they warm up, throttle, get other load. So every repeat runs all arms (a complete block), and no arm
keeps the same place in it:

- interleaved: repeat r begins with arm r mod k and continues cyclically;
- randomised: for every k repeats a Latin square with its arms, and the order of its rows, drawn from ``order_seed``.

In both, the number of times an arm has a given place in its repeat differs by at most one between arms.
Source: Montgomery, Design and Analysis of Experiments, on randomised complete blocks and Latin squares.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from launch.experiment.definition.file import ExperimentSettings
from launch.experiment.definition.sections import LiveBackend


@dataclass(frozen=True, slots=True)
class Slot:
    """One run of the plan."""

    order: int
    """Place in time, from 0."""
    arm: str
    repeat: int
    """From 1."""
    seed: int
    """The same for all arms of a repeat."""

    @property
    def path(self) -> str:
        """Folder of its records, relative to the experiment's directory."""
        return f"arms/{self.arm}/{self.repeat}"


def plan_runs(settings: ExperimentSettings) -> list[Slot]:
    """Every run of the experiment, in order."""
    arms = list(settings.arms)
    seeds = settings.run_seeds
    if settings.order == "randomised":
        rows = randomised_rows(arms, len(seeds), settings.order_seed)
    else:
        rows = interleaved_rows(arms, len(seeds))
    runs = [(repeat, arm) for repeat, row in enumerate(rows, 1) for arm in row]
    return [
        Slot(order=order, arm=arm, repeat=repeat, seed=seeds[repeat - 1]) for order, (repeat, arm) in enumerate(runs)
    ]


def interleaved_rows(arms: Sequence[str], repeats: int) -> list[list[str]]:
    """The arms of each repeat, each repeat beginning one arm later."""
    return [_rotated(arms, repeat) for repeat in range(repeats)]


def randomised_rows(arms: Sequence[str], repeats: int, order_seed: int) -> list[list[str]]:
    """The arms of each repeat, drawn; the same seed gives the same rows, and more repeats begin with fewer's rows."""
    draw = random.Random(order_seed)
    rows: list[list[str]] = []
    while len(rows) < repeats:
        shuffled = draw.sample(list(arms), len(arms))
        rows += [_rotated(shuffled, turn) for turn in draw.sample(range(len(arms)), len(arms))]
    return rows[:repeats]


def _rotated(arms: Sequence[str], by: int) -> list[str]:
    return [arms[(by + place) % len(arms)] for place in range(len(arms))]


def noise_seed(settings: ExperimentSettings, slot: Slot) -> int:
    """Seed of a run: its repeat's, or a separate one where each arm draws its own noise."""
    backend = settings.backend
    if isinstance(backend, LiveBackend) or backend.noise.common or not backend.noise.any:
        return slot.seed
    return int.from_bytes(hashlib.sha256(f"{slot.seed}:{slot.arm}".encode()).digest()[:4])
