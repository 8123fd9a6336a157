"""Tables of the study: effects over all runs, by trace, and on the turns that moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bench.cells.placement import METRICS, PlacementRatios, beyond
from bench.cells.ratios import Interval
from bench.migration.cells import MigrationArm, MigrationCell

NAMES = {"rdma": "RDMA", "tcp": "TCP", "nvlink": "NVLink", "free": "free"}
RESAMPLES = 2000


class EffectOverRuns:
    """Geometric mean of a ratio over runs, with a 95 % interval by bootstrap over the runs."""

    def __init__(self, ratios: Sequence[float]) -> None:
        logs = np.log(np.array(ratios, dtype=np.float64))
        draw = np.random.default_rng(1)
        means = logs[draw.integers(0, logs.size, (RESAMPLES, logs.size))].mean(axis=1)
        low, high = np.quantile(means, (0.025, 0.975))
        self.mean, self.low, self.high = (float(np.exp(each)) for each in (logs.mean(), low, high))

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def _groups(
    cells: Sequence[MigrationCell], key: Callable[[MigrationCell, MigrationArm], tuple[object, ...]]
) -> dict[tuple[object, ...], list[MigrationArm]]:
    groups: dict[tuple[object, ...], list[MigrationArm]] = {}
    for cell in cells:
        for arm in cell.arms:
            groups.setdefault(key(cell, arm), []).append(arm)
    return groups


def effects(cells: Sequence[MigrationCell]) -> list[str]:
    """A Markdown table with a row per price and arm: ratios to ``warm`` over the runs in which it tried to move."""
    lines = [
        f"| transfer | arm | runs | with moves | hand-offs | {' | '.join(METRICS)} | better | worse |",
        f"| --- | --- | ---: | ---: | ---: |{' ---: |' * len(METRICS)} ---: | ---: |",
    ]
    for (price, name), arms in _groups(cells, lambda _, arm: (arm.price, arm.arm)).items():
        moving = [arm for arm in arms if arm.legs.hand_offs + arm.legs.fell_back]
        tried = sum(arm.legs.hand_offs + arm.legs.fell_back for arm in arms)
        better, worse = beyond(arm.ratios for arm in arms)
        lines.append(
            f"| {NAMES[str(price)]} | `{name}` | {len(arms)} | {len(moving)} | {tried} | {_shown(moving)} "
            f"| {better} | {worse} |"
        )
    return lines


def by_trace(cells: Sequence[MigrationCell], name: str) -> list[str]:
    """A Markdown table of one arm with a row per trace, pool and price; ratios over loads and seeds."""
    lines = [
        f"| trace | pool | transfer | runs | hand-offs | {' | '.join(METRICS)} | better | worse |",
        f"| --- | ---: | --- | ---: | ---: |{' ---: |' * len(METRICS)} ---: | ---: |",
    ]
    found = _groups(cells, lambda cell, arm: (cell.cell.trace, cell.cell.pool, arm.price, arm.arm))
    for (trace, pool, price, arm_name), arms in found.items():
        if arm_name != name:
            continue
        better, worse = beyond(arm.ratios for arm in arms)
        shown = [f"{EffectOverRuns([read(arm.ratios)[0] for arm in arms]).mean:.2f}" for read in METRICS.values()]
        tried = sum(arm.legs.hand_offs + arm.legs.fell_back for arm in arms)
        lines.append(
            f"| `{trace}` | {pool:g} | {NAMES[str(price)]} | {len(arms)} | {tried} | {' | '.join(shown)} "
            f"| {better} | {worse} |"
        )
    return lines


def moved_turns(cells: Sequence[MigrationCell]) -> list[str]:
    """A Markdown table of hand-offs, and of the turns that moved beside the same turns under ``warm``; means."""
    lines = [
        "| transfer | arm | done | fell back | home leg, s | queue expected, s | pull, s | GB/s | TTFT, s "
        "| under `warm` | E2E, s | under `warm` |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (price, name), arms in _groups(cells, lambda _, arm: (arm.price, arm.arm)).items():
        legs, moved = [arm.legs for arm in arms], [arm.moved for arm in arms]
        hand_offs = [each.hand_offs for each in legs]
        start = f"| {NAMES[str(price)]} | `{name}` | {sum(hand_offs)} | {sum(each.fell_back for each in legs)} |"
        turns = [each.turns for each in moved]
        if not sum(hand_offs) or not sum(turns):
            lines.append(f"{start}{' – |' * 8}")
            continue
        pull_s = _weighted([each.pull_s for each in legs], hand_offs)
        bytes_moved = sum(each.gb_per_s * each.pull_s * each.hand_offs for each in legs)
        shown = [
            _weighted([each.home_s for each in legs], hand_offs),
            _weighted([each.home_queue_s for each in legs], hand_offs),
            pull_s,
            bytes_moved / (pull_s * sum(hand_offs)),
            _weighted([each.ttft_s for each in moved], turns),
            _weighted([each.ttft_stayed_s for each in moved], turns),
            _weighted([each.e2e_s for each in moved], turns),
            _weighted([each.e2e_stayed_s for each in moved], turns),
        ]
        lines.append(f"{start} {' | '.join(f'{each:.2f}' for each in shown)} |")
    return lines


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    return float(np.average(values, weights=weights))


def _shown(arms: Sequence[MigrationArm]) -> str:
    def cell(read: Callable[[PlacementRatios], Interval]) -> str:
        return str(EffectOverRuns([read(arm.ratios)[0] for arm in arms])) if arms else "–"

    return " | ".join(cell(read) for read in METRICS.values())
