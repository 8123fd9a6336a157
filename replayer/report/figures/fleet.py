"""Figures of the fleet: where prefix hits went, how much each instance carried, and how evenly, over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import PercentFormatter

from replayer.compare.statistics.tests import FloatArray
from replayer.report.anatomy import Anatomy
from replayer.report.figures.style import SMALL, WIDE, Drawing, bar, line, natural, printable, short_name, slug, style
from replayer.report.load_over_time import LoadOverTime, over_time

_MAX_BARS = 96
_MAX_ROWS = 48
_RANKS = 24
_LABELLED_SHARE = 0.045
_LINE_BINS = 40
"""A line of 40 points can be followed among others."""
_MAP_BINS = 60
PARTS = (
    "actual",
    "not delivered",
    "eviction and not delivered",
    "routing",
    "routing, knowingly",
    "routing, prediction error",
    "routing, belief not recorded",
    "eviction",
)
"""From the hits there were to those that could have been, in the order of the bars."""


def hits(arms: Mapping[str, Anatomy]) -> Drawing | None:
    """Share of prompt tokens: cached, lost by each cause, and never computed before; a tick marks the ideal finite."""
    arms = {label: found for label, found in arms.items() if found.tokens.prompt}
    if not arms:
        return None
    present = [name for name in PARTS if any(_shares(found).get(name, 0.0) > 0 for found in arms.values())]
    with style():
        figure = Figure(figsize=(WIDE, 1.1 + 0.42 * len(arms)))
        axes = figure.add_subplot()
        for row, found in enumerate(arms.values()):
            shares = _shares(found)
            # From the right, where the ideal is: an engine that had more than the model holds covers some of the loss.
            right = found.tokens.ideal_infinite / found.tokens.prompt
            for position, name in reversed(list(enumerate(present))):
                width = max(0.0, shares.get(name, 0.0))
                left = 0.0 if name == "actual" else right - width
                shown = axes.barh(row, width, left=left, height=0.6, **bar(position))
                shown.set_label(name if row == 0 else "_")
                if width >= _LABELLED_SHARE:
                    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                    axes.text(left + width / 2, row, f"{width:.1%}", ha="center", va="center", fontsize=7, bbox=box)
                right = left
            if found.tokens.ideal_finite is not None:
                level = found.tokens.ideal_finite / found.tokens.prompt
                axes.plot([level, level], [row - 0.42, row + 0.42], color="black", linewidth=2)
        axes.set_yticks(range(len(arms)), [printable(label) for label in arms])
        axes.set_ylim(len(arms) - 0.4, -0.6)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("share of prompt tokens (to the right of the bars: never computed before)")
        axes.grid(axis="y", visible=False)
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], names[::-1], loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    values = "; ".join(
        f"{label}: " + ", ".join(f"{name} {share:.1%}" for name, share in _shares(found).items())
        for label, found in arms.items()
    )
    return Drawing(
        "hits",
        f"Hit-rate anatomy. {values}.",
        figure,
        "Where the prompt tokens' prefix hits went. Thick line: what one LRU cache as large as the fleet would hold.",
    )


def _shares(found: Anatomy) -> dict[str, float]:
    tokens = found.tokens
    shares = {} if tokens.actual is None else {"actual": tokens.actual / tokens.prompt}
    return shares | {part.name: part.tokens / tokens.prompt for part in found.losses}


def instance_load(arms: Mapping[str, Mapping[str, float]], *, title: str) -> Drawing | None:
    """Share of the load each instance carried, a bar for each arm; the dashed line is an even share.

    With many instances a line for each arm instead: the shares by rank, largest first.
    """
    arms = {label: loads for label, loads in arms.items() if sum(loads.values()) > 0}
    instances = sorted({instance for loads in arms.values() for instance in loads}, key=natural)
    if not instances:
        return None
    by_rank = len(instances) * len(arms) > _MAX_BARS
    with style():
        figure = Figure(figsize=SMALL)
        axes = figure.add_subplot()
        for position, (label, loads) in enumerate(arms.items()):
            total = sum(loads.values())
            shares = [loads.get(instance, 0.0) / total for instance in instances]
            if by_rank:
                axes.plot(
                    range(1, len(shares) + 1), sorted(shares, reverse=True), label=printable(label), **line(position)
                )
                continue
            width = 0.84 / len(arms)
            offsets = np.arange(len(instances)) + (position - (len(arms) - 1) / 2) * width
            axes.bar(offsets, shares, width * 0.95, label=printable(label), **bar(position))
        axes.axhline(1 / len(instances), color="black", linewidth=0.8, linestyle="--")
        if by_rank:
            axes.set_xlabel(f"instances by rank (of {len(instances)})")
        else:
            names = [printable(short_name(name)) for name in instances]
            axes.set_xticks(np.arange(len(instances)), names, fontsize=8 if len(names) <= 16 else 6)
            axes.set_xlabel("instance")
        axes.grid(axis="x", visible=False)
        axes.set_ylabel(title)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        figure.legend(fontsize=8, ncols=min(4, len(arms)), loc="outside upper center", frameon=False)
    return Drawing(
        slug("instances", title),
        f"{title} by instance: {', '.join(arms)}.",
        figure,
        f"{title.capitalize()} by instance.",
    )


def load_map(label: str, load: LoadOverTime, largest: tuple[float, float]) -> Drawing:
    """Requests in flight and pending prefill tokens of every instance over time, in shades of grey.

    Args:
        label: the arm.
        load: of one run.
        largest: upper ends of the two scales (requests, tokens), the same for every arm of a page.
    """
    ranked = len(load.instances) > _MAX_ROWS
    rows = _RANKS if ranked else len(load.instances)
    with style():
        figure = Figure(figsize=(WIDE, 0.9 + min(3.4, 0.2 * rows + 0.3)))
        panels = figure.subplots(1, 2, sharey=True)
        for axes, matrix, top, title in (
            (panels[0], load.requests, largest[0], "requests in flight"),
            (panels[1], load.pending_tokens / 1000, largest[1] / 1000, "pending prefill tokens [thousands]"),
        ):
            edges, coarse = _coarse(load.edges_s, matrix, _MAP_BINS)
            _shades(figure, axes, edges, _by_rank(coarse) if ranked else coarse, top, title)
        if ranked:
            panels[0].set_yticks([0, rows - 1], ["most loaded", "least loaded"])
        else:
            names = [printable(short_name(name)) for name in load.instances]
            panels[0].set_yticks(range(rows), names, fontsize=7 if rows <= 16 else 5)
            panels[0].set_ylabel("instance")
    means = ", ".join(
        f"{printable(name)} {mean:.2g}" for name, mean in zip(load.instances, load.requests.mean(axis=1), strict=True)
    )
    return Drawing(
        slug("load", label),
        f"Load of every instance over time in {label}. Mean requests in flight: {means if not ranked else 'by rank'}.",
        figure,
        f"{label}: requests in flight and pending prefill tokens of every instance; white is none."
        + (" Instances by rank at each moment." if ranked else ""),
    )


def _by_rank(matrix: FloatArray) -> FloatArray:
    """The loads at each moment in descending order, as `_RANKS` quantiles."""
    return np.quantile(matrix, np.linspace(1, 0, _RANKS), axis=0)


def _bounds(top: float) -> list[float]:
    """0 and the last seven of 1, 2, 5, 10, 20, ... up to ``top``: light loads differ as visibly as heavy ones."""
    top = max(top, 1e-3)
    highest = int(np.ceil(np.log10(top)))
    steps = [factor * 10.0**exponent for exponent in range(highest - 4, highest + 1) for factor in (1, 2, 5)]
    last = int(np.searchsorted(steps, top * (1 - 1e-9)))
    return [0.0, *steps[last - 6 : last + 1]]


def _shades(figure: Figure, axes: Any, edges: FloatArray, matrix: FloatArray, top: float, title: str) -> None:
    """A matrix in a few greys. One path for each grey and neighbouring equal cells as one: a tenth of a mesh's size."""
    bounds = _bounds(top)
    greys = ListedColormap([str(0.93 - 0.88 * level / (len(bounds) - 2)) for level in range(len(bounds) - 1)])
    levels = np.clip(np.searchsorted(bounds, matrix, side="right") - 1, 0, len(bounds) - 2)
    levels[matrix <= 1e-9] = -1
    for level in range(len(bounds) - 1):
        corners: list[tuple[float, float]] = []
        for row in range(len(levels)):
            here = np.concatenate(([0], (levels[row] == level).astype(np.int8), [0]))
            turns = np.flatnonzero(np.diff(here))
            for begin, end in zip(edges[turns[::2]], edges[turns[1::2]], strict=True):
                corners += [(begin, row - 0.45), (end, row - 0.45), (end, row + 0.45), (begin, row + 0.45), (begin, 0)]
        if corners:
            codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * (len(corners) // 5)
            axes.add_patch(PathPatch(Path(corners, codes), facecolor=greys(level), linewidth=0))
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(len(levels) - 0.4, -0.6)
    axes.grid(visible=False)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("engine seconds since the run began")
    shades = ScalarMappable(norm=BoundaryNorm(bounds, greys.N), cmap=greys)
    figure.colorbar(shades, ax=axes, ticks=bounds, spacing="uniform", format="%g", aspect=12, pad=0.01)


def fleet_load(arms: Mapping[str, LoadOverTime]) -> Drawing | None:
    """Requests in flight in the whole fleet over time."""
    series = {}
    for label, load in arms.items():
        edges, requests = _coarse(load.edges_s, load.requests, _LINE_BINS)
        series[label] = (edges, requests.sum(axis=0))
    caption = "Requests in flight in the whole fleet."
    return _lines(series, "fleet-load", "requests in flight, whole fleet", caption)


def unevenness(arms: Mapping[str, LoadOverTime], figure: str) -> Drawing | None:
    """Imbalance of the requests in flight over time.

    Args:
        arms: loads by arm.
        figure: "largest over mean" or "coefficient of variation".
    """
    series = {}
    for label, load in arms.items():
        edges, requests = _coarse(load.edges_s, load.requests, _LINE_BINS)
        series[label] = (edges, over_time(requests)[0 if figure == "largest over mean" else 1])
    caption = f"Imbalance of requests in flight: {figure} across instances."
    return _lines(series, slug("imbalance", figure), f"{figure}, across instances", caption)


def _coarse(edges: FloatArray, matrix: FloatArray, bins: int) -> tuple[FloatArray, FloatArray]:
    """Edges and means of groups of neighbouring bins, about ``bins`` of them; a rest is left off."""
    group = max(1, matrix.shape[1] // bins)
    count = matrix.shape[1] // group
    means = matrix[:, : count * group].reshape(len(matrix), count, group).mean(axis=2)
    return edges[: count * group + 1 : group], np.asarray(means, dtype=np.float64)


def _lines(series: Mapping[str, tuple[FloatArray, FloatArray]], name: str, title: str, caption: str) -> Drawing | None:
    drawn = {label: (edges, values) for label, (edges, values) in series.items() if np.isfinite(values).any()}
    if not drawn:
        return None
    with style():
        figure = Figure(figsize=SMALL)
        axes = figure.add_subplot()
        for position, (label, (edges, values)) in enumerate(drawn.items()):
            width = (edges[-1] - edges[0]) / len(values)
            axes.plot(
                edges[0] + width * (np.arange(len(values)) + 0.5), values, label=printable(label), **line(position)
            )
        axes.set_xlabel("engine seconds since the run began")
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    means = "; ".join(f"{label}: mean {np.nanmean(values):.2f}" for label, (_, values) in drawn.items())
    return Drawing(name, f"{caption} {means}.", figure, caption)
