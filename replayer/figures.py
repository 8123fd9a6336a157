"""Figures of a report as inline SVG: no file, no script, no reference to anything outside the page."""

from __future__ import annotations

import html
import io
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from replayer.statistics import FloatArray

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "warmroute",
    # Labels come from files: a `$` in one must not be taken for mathematics.
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
}
# Okabe & Ito's palette (told apart by colour-blind readers and in print), with line styles as a second sign.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
_LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)))
_MAX_POINTS = 400
_MAX_BAR_LABELS = 12


@dataclass(frozen=True, slots=True)
class Span:
    """One request on a timeline; engine seconds from the first request shown."""

    turn: int
    sent_s: float
    first_token_s: float
    finished_s: float
    instance: str


def cdfs(series: Mapping[str, FloatArray], *, title: str, unit: str) -> str:
    """Empirical distribution functions on a logarithmic axis, one line for each arm; empty arms are left out."""
    drawn = {label: np.sort(values[values > 0]) for label, values in series.items() if np.any(values > 0)}
    if not drawn:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 3.1))
        axes = figure.add_subplot()
        for position, (label, ordered) in enumerate(drawn.items()):
            levels = np.arange(1, ordered.size + 1) / ordered.size
            chosen = np.unique(np.linspace(0, ordered.size - 1, min(_MAX_POINTS, ordered.size)).astype(int))
            axes.plot(ordered[chosen], levels[chosen], label=_label(label), **_line(position))
        _logarithmic(axes, "x")
        axes.set_ylim(0, 1)
        axes.set_xlabel(f"{title} [{unit}]")
        axes.set_ylabel("share of requests")
        axes.legend(fontsize=8, loc="lower right")
        return _svg(figure, f"Distribution of {title}: {', '.join(drawn)}")


def per_turn(series: Mapping[str, Mapping[int, float]], *, title: str, unit: str) -> str:
    """Median by turn of the session, one line for each arm."""
    drawn = {label: points for label, points in series.items() if points}
    if not drawn:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 3.1))
        axes = figure.add_subplot()
        for position, (label, points) in enumerate(drawn.items()):
            turns = sorted(points)
            axes.plot(
                turns,
                [points[turn] for turn in turns],
                label=_label(label),
                marker=".",
                **_line(position),
            )
        _logarithmic(axes, "y")
        axes.set_xlabel("turn of the session")
        axes.set_ylabel(f"{title} [{unit}]")
        axes.legend(fontsize=8)
        return _svg(figure, f"{title} by turn: {', '.join(drawn)}")


def instance_load(arms: Mapping[str, Mapping[str, float]], *, title: str) -> str:
    """Share of the load each instance carried, one group of bars for each arm; the dashed line is an even share."""
    arms = {label: loads for label, loads in arms.items() if sum(loads.values()) > 0}
    instances = sorted({instance for loads in arms.values() for instance in loads}, key=natural)
    if not instances:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(max(4.6, 1.4 + 0.5 * len(instances)), 2.8))
        axes = figure.add_subplot()
        width = 0.8 / len(arms)
        for position, (label, loads) in enumerate(arms.items()):
            total = sum(loads.values())
            offsets = np.arange(len(instances)) + (position - (len(arms) - 1) / 2) * width
            shares = [loads.get(instance, 0.0) / total for instance in instances]
            axes.bar(offsets, shares, width * 0.95, label=_label(label), color=COLOURS[position % len(COLOURS)])
        axes.axhline(1 / len(instances), color="black", linewidth=0.8, linestyle="--")
        crowded = len(instances) > _MAX_BAR_LABELS
        axes.set_xticks(np.arange(len(instances)), [_label(name) for name in instances], rotation=90 if crowded else 0)
        axes.set_ylabel(title)
        axes.legend(fontsize=8, ncols=min(4, len(arms)), loc="upper center", bbox_to_anchor=(0.5, 1.22))
        return _svg(figure, f"{title} by instance: {', '.join(arms)}")


def timeline(arms: Mapping[str, Sequence[Span]]) -> str:
    """One session's requests in every arm: light until the first token, then dark, numbered by instance."""
    arms = {label: spans for label, spans in arms.items() if spans}
    if not arms:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9.4, 0.7 + 0.5 * len(arms)))
        axes = figure.add_subplot()
        for row, spans in enumerate(arms.values()):
            colour = COLOURS[row % len(COLOURS)]
            for span in spans:
                waiting = max(0.0, span.first_token_s - span.sent_s)
                decoding = max(0.0, span.finished_s - span.first_token_s)
                axes.barh(row, waiting, left=span.sent_s, height=0.5, color=colour, alpha=0.35, linewidth=0)
                axes.barh(row, decoding, left=span.first_token_s, height=0.5, color=colour, linewidth=0)
                axes.text(span.sent_s, row - 0.3, _label(_short(span.instance)), fontsize=6, va="bottom")
        axes.set_yticks(range(len(arms)), [_label(label) for label in arms])
        axes.set_ylim(len(arms) - 0.5, -0.7)
        axes.set_xlabel("engine seconds since the session's first request")
        axes.grid(axis="y", visible=False)
        return _svg(figure, f"Timeline of one session: {', '.join(arms)}")


def _logarithmic(axes: Any, which: str) -> None:
    """A logarithmic axis labelled 0.1, 0.2, 0.5, 1: matplotlib's own labels are mathematics, which is switched off."""
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high < 1000 * max(low, 1e-12) else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts inst-2 before inst-10."""
    return tuple(
        (0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)
    )


def _short(instance: str) -> str:
    """The number at the end of an instance's name, or the name."""
    found = re.search(r"(\d+)$", instance)
    return found.group(1) if found else instance


def _line(position: int) -> dict[str, Any]:
    return {
        "color": COLOURS[position % len(COLOURS)],
        "linestyle": _LINES[position % len(_LINES)],
        "linewidth": 1.4,
    }


def _label(text: str) -> str:
    """A label matplotlib and XML both take: control characters out; a leading underscore would hide it."""
    printable = "".join(character if character.isprintable() else "�" for character in text)
    return f" {printable}" if printable.startswith("_") else printable


_IDENTIFIER = re.compile(r'(\bid="|url\(#|href="#)([^")]+)')
_NAMESPACES = re.compile(r' xmlns(:\w+)?="[^"]*"')


def _svg(figure: Figure, description: str) -> str:
    """The figure as an ``<svg>`` element for an HTML page: namespaces, metadata and prolog removed, ids made unique."""
    buffer = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    canvas: Any = FigureCanvasSVG(figure)
    canvas.print_svg(buffer, metadata=metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    head = _NAMESPACES.sub("", head)
    # Ids are unique within one figure only; several share a page.
    prefix = f"f{zlib.crc32(text.encode()):08x}-"
    rest = _IDENTIFIER.sub(lambda match: f"{match.group(1)}{prefix}{match.group(2)}", rest)
    return f'{head} role="img" aria-label="{html.escape(_label(description), quote=True)}">{rest}'
