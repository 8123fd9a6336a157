"""Tables of the comparison, and the cells in which ``joint`` is worse."""

from __future__ import annotations

from collections.abc import Sequence

from bench.cells.placement import METRICS, beyond, means_of
from bench.cells.ratios import BEYOND, with_interval
from bench.joint.cells import JointCell

CHOSEN_ON = frozenset({"glm_2h", "kct_raw", "mooncake"})
"""Traces on which the parameters and constants were chosen; the others are held out."""


def summary_of(cells: Sequence[JointCell], *, chosen_on: bool) -> list[str]:
    """A Markdown table of one kind of traces, a row per trace and pool: geometric means over the other dimensions.

    ``better`` and ``worse`` count figures whose interval excludes 1 on that side by more than 3 %.
    """
    lines = [
        f"| trace | pool | runs | hand-offs in | {' | '.join(METRICS)} | better | worse |",
        f"| --- | ---: | ---: | ---: |{' ---: |' * len(METRICS)} ---: | ---: |",
    ]
    groups: dict[tuple[str, float], list[JointCell]] = {}
    for each in cells:
        if (each.cell.trace in CHOSEN_ON) is chosen_on:
            groups.setdefault((each.cell.trace, each.cell.pool), []).append(each)
    for (trace, pool), found in sorted(groups.items()):
        handing = sum(each.joint.handed_off > 0 for each in found)
        ratios = [each.ratios for each in found]
        better, worse = beyond(ratios)
        lines.append(f"| `{trace}` | {pool:g} | {len(found)} | {handing} | {means_of(ratios)} | {better} | {worse} |")
    return lines


def harmed(cells: Sequence[JointCell]) -> list[str]:
    """Figures that are more than 3 % worse beyond their interval."""
    return [
        f"{each.cell}, seed {each.seed}: {name} {with_interval(read(each.ratios))}"
        for each in cells
        for name, read in METRICS.items()
        if read(each.ratios)[1] > BEYOND
    ]
