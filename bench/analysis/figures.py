"""Figures of the analyses as SVG files: lines, distributions, bars. Equal input gives equal bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.ticker
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from replayer.report.figures.style import COLOURS, style

_MAX_POINTS = 600


class Line(NamedTuple):
    """A named curve."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    points: bool = False
    """Markers only."""


def lines(
    to: Path,
    curves: Sequence[Line],
    *,
    x: str,
    y: str,
    title: str = "",
    log_x: bool = False,
    log_y: bool = False,
    step: bool = False,
    levels: Mapping[str, float] | None = None,
    marks: Mapping[str, float] | None = None,
) -> None:
    """Curves on common axes; ``levels`` are dashed horizontals, ``marks`` dotted verticals with their names."""
    with style():
        figure = Figure(figsize=(5.6, 3.6))
        axes = figure.add_subplot()
        for index, curve in enumerate(curves):
            colour = COLOURS[index % len(COLOURS)]
            drawn: dict[str, Any] = {"color": colour, "label": curve.name}
            if curve.points:
                axes.plot(curve.x, curve.y, linestyle="none", marker="osD^vx"[index % 6], markersize=5, **drawn)
            elif step:
                axes.step(curve.x, curve.y, where="post", linewidth=1.4, **drawn)
            else:
                axes.plot(curve.x, curve.y, marker="." if len(curve.x) < 30 else "", linewidth=1.4, **drawn)
        for name, value in (levels or {}).items():
            axes.axhline(value, color="black", linewidth=0.8, linestyle="--", label=name)
        for name, value in (marks or {}).items():
            axes.axvline(value, color="black", linewidth=0.8, linestyle=":")
            axes.text(value, 1.0, name, fontsize=7, ha="center", va="bottom", transform=axes.get_xaxis_transform())
        axes.set(xlabel=x, ylabel=y)
        axes.set_title(title, fontsize=9, loc="left", pad=12 if marks else 4)
        if log_x:
            axes.set_xscale("log")
        if log_y:
            axes.set_yscale("log")
        for axis, log in ((axes.xaxis, log_x), (axes.yaxis, log_y)):
            if log:
                # matplotlib's own logarithmic labels use math text, which is switched off.
                axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:,.10g}"))
                axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        if curves:
            axes.legend(fontsize=7)
        _save(figure, to)


def distribution(
    to: Path,
    series: Mapping[str, Sequence[float]],
    *,
    x: str,
    marks: Mapping[str, float] | None = None,
    title: str = "",
) -> None:
    """Empirical distribution functions on a logarithmic axis; values of 0 and below are drawn at the left end."""
    curves = []
    for name, values in series.items():
        ordered = np.sort(np.asarray(values, dtype=float))
        if ordered.size == 0 or ordered[-1] <= 0:
            continue
        levels = np.arange(1, ordered.size + 1) / ordered.size
        chosen = np.unique(np.linspace(0, ordered.size - 1, min(_MAX_POINTS, ordered.size)).astype(int))
        chosen = chosen[ordered[chosen] > 0]
        curves.append(Line(name, ordered[chosen].tolist(), levels[chosen].tolist()))
    lines(to, curves, x=x, y="share", log_x=True, marks=marks, title=title)


def bars(to: Path, shares: Mapping[str, float], *, y: str, title: str = "") -> None:
    """One bar for each name."""
    with style():
        figure = Figure(figsize=(5.6, 3.2))
        axes = figure.add_subplot()
        axes.bar(range(len(shares)), list(shares.values()), color=COLOURS[1], width=0.7)
        axes.set_xticks(range(len(shares)), list(shares))
        axes.set_ylabel(y)
        axes.set_title(title, fontsize=9, loc="left")
        _save(figure, to)


def _save(figure: Figure, to: Path) -> None:
    canvas: Any = FigureCanvasSVG(figure)
    with to.open("w", encoding="utf-8") as file:
        canvas.print_svg(file, metadata={"Date": None})
