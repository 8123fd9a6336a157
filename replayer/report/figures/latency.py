"""Figures of a request's times: distributions, TTFT by turn, one session's timeline, predicted against actual legs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from replayer.compare.statistics.tests import FloatArray
from replayer.records.counted import counted
from replayer.report.figures.style import (
    COLOURS,
    MARKERS,
    SMALL,
    WIDE,
    Drawing,
    line,
    logarithmic,
    printable,
    short_name,
    slug,
    style,
)
from replayer.report.offloads import LegSummary
from replayer.report.timeline import MAX_TURNS, Span
from replayer.report.turns import TurnTimes

_MAX_POINTS = 400
_MAX_DOTS = 300


def cdfs(series: Mapping[str, FloatArray], *, title: str, unit: str, of: str = "requests") -> Drawing | None:
    """Empirical distribution functions on a logarithmic axis, one line for each arm; empty arms are left out.

    ``of`` names what the values are of, for the axis.
    """
    drawn = {label: np.sort(values[values > 0]) for label, values in series.items() if np.any(values > 0)}
    if not drawn:
        return None
    with style():
        figure = Figure(figsize=SMALL)
        axes = figure.add_subplot()
        for position, (label, ordered) in enumerate(drawn.items()):
            levels = np.arange(1, ordered.size + 1) / ordered.size
            chosen = np.unique(np.linspace(0, ordered.size - 1, min(_MAX_POINTS, ordered.size)).astype(int))
            axes.plot(ordered[chosen], levels[chosen], label=printable(label), **line(position))
        logarithmic(axes, "x")
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 1])
        axes.set_xlabel(f"{title} [{unit}]")
        axes.set_ylabel(f"share of {of}")
        axes.legend(fontsize=8, loc="lower right")
    medians = "; ".join(f"{label}: median {np.median(values):.3g} {unit}" for label, values in drawn.items())
    return Drawing(slug("cdf", title), f"Distribution of {title}. {medians}.", figure, f"Distribution of {title}.")


def per_turn(arms: Mapping[str, Sequence[TurnTimes]]) -> Drawing | None:
    """Median TTFT by turn of the session with its 95 % interval, one line for each arm."""
    drawn = {label: turns for label, turns in arms.items() if turns}
    if not drawn:
        return None
    with style():
        figure = Figure(figsize=SMALL)
        axes = figure.add_subplot()
        for position, (label, turns) in enumerate(drawn.items()):
            middle = np.array([turn.p50_s for turn in turns])
            low, high = np.array([turn.low_s for turn in turns]), np.array([turn.high_s for turn in turns])
            # Side by side, so that one arm's interval does not hide another's.
            places = np.array([turn.turn for turn in turns]) + (position - (len(drawn) - 1) / 2) * 0.12
            axes.errorbar(
                places,
                middle,
                yerr=(middle - low, high - middle),
                label=printable(label),
                marker=MARKERS[position % len(MARKERS)],
                markersize=2.5,
                elinewidth=0.7,
                **line(position),
            )
        logarithmic(axes, "y")
        axes.set_xlabel("turn of the session")
        axes.set_ylabel("median TTFT [s]")
        axes.legend(fontsize=8)
    last = max(turns[-1].turn for turns in drawn.values())
    return Drawing(
        "ttft-by-turn",
        f"Median TTFT by turn, 1 to {last}, with 95 % intervals: {', '.join(drawn)}.",
        figure,
        "Median TTFT by turn of the session, with 95 % intervals.",
    )


_WAITING: Any = {"facecolor": "white", "edgecolor": "black", "linewidth": 0.5}
_PREFILL: Any = {"facecolor": "#d0d0d0", "edgecolor": "black", "linewidth": 0.5, "hatch": "////"}
_DECODE: Any = {"facecolor": "#404040", "edgecolor": "black", "linewidth": 0.5}


def timeline(label: str, session: str, shown: Sequence[Span], reach_s: tuple[float, float]) -> Drawing | None:
    """One session's turns: left where they lie in time, right how long they took, with instance and cached share.

    Args:
        label: the arm.
        session: its id.
        shown: the session's requests.
        reach_s: length of the two time axes, the same for every arm of a page.
    """
    shown = shown[:MAX_TURNS]
    if not shown:
        return None
    with style():
        figure = Figure(figsize=(WIDE, 0.9 + 0.165 * len(shown)))
        whole, each = figure.subplots(1, 2, sharey=True, width_ratios=(2, 3))
        for row, span in enumerate(shown):
            _bars(whole, row, span, span.scheduled_s)
            end_s = _bars(each, row, span, 0.0)
            each.text(end_s + 0.01 * reach_s[1], row, printable(_place_and_hits(span)), fontsize=6.5, va="center")
        # Turns that all failed at once have no length: an axis must have some.
        whole.set_xlim(0, reach_s[0] * 1.02 or 1.0)
        each.set_xlim(0, reach_s[1] * 1.45 or 1.0)
        whole.set_ylim(len(shown) - 0.4, -0.6)
        whole.set_yticks(range(len(shown)), [str(span.turn) for span in shown], fontsize=7)
        whole.set_ylabel("turn")
        whole.set_xlabel("engine seconds since the session began")
        each.set_xlabel("engine seconds since the turn was due")
        for axes in (whole, each):
            axes.grid(axis="y", visible=False)
        patches = [
            Patch(**_WAITING, label="waiting in the client"),
            Patch(**_PREFILL, label="queue and prefill, to the first token"),
            Patch(**_DECODE, label="decode"),
        ]
        figure.legend(handles=patches, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return Drawing(
        slug("timeline", label),
        f"Timeline of session {session} in {label}: {counted(len(shown), 'turn')}; first token after "
        f"{', '.join('none' if s.first_token_s is None else f'{s.first_token_s - s.sent_s:.2g}' for s in shown)} s.",
        figure,
        f"{label}: session {session}.",
    )


def _bars(axes: Any, row: int, span: Span, start_s: float) -> float:
    """One request's bars, beginning at ``start_s``; where they end."""
    shift = start_s - span.scheduled_s
    first_s = span.finished_s if span.first_token_s is None else span.first_token_s
    for begin, end, look in (
        (span.scheduled_s, span.sent_s, _WAITING),
        (span.sent_s, first_s, _PREFILL),
        (first_s, span.finished_s, _DECODE),
    ):
        if end > begin:
            axes.barh(row, end - begin, left=begin + shift, height=0.62, **look)
    return span.finished_s + shift


def _place_and_hits(span: Span) -> str:
    where = short_name(span.instance) if span.instance else "?"
    if span.prefill_instance:
        where = f"P {short_name(span.prefill_instance)} → D {where}"
    cached = "cached unknown" if span.cached_share is None else f"{span.cached_share:.0%} cached"
    return f"{where}: {cached} of {span.prompt_tokens / 1000:.1f}k" + ("" if span.ok else ", FAILED")


def legs(arms: Mapping[str, Sequence[LegSummary]]) -> Drawing | None:
    """Predicted against actual time of each kind of leg, a panel for each; the line is a right prediction."""
    kinds = list(dict.fromkeys(leg.leg for found in arms.values() for leg in found if np.any(leg.predicted_s > 0)))
    if not kinds:
        return None
    with style():
        figure = Figure(figsize=(max(SMALL[0], WIDE / 3 * len(kinds)), 3.2))
        for axes, kind in zip(np.atleast_1d(figure.subplots(1, len(kinds))), kinds, strict=True):
            ends = []
            for position, (label, found) in enumerate(arms.items()):
                for leg in (leg for leg in found if leg.leg == kind):
                    sensible = (leg.predicted_s > 0) & (leg.actual_s > 0)
                    predicted, actual = _thinned(leg.predicted_s[sensible], leg.actual_s[sensible])
                    if not predicted.size:
                        continue
                    axes.plot(
                        predicted,
                        actual,
                        linestyle="none",
                        marker=MARKERS[position % len(MARKERS)],
                        markersize=3,
                        alpha=0.6,
                        color=COLOURS[position % len(COLOURS)],
                        label=printable(label),
                    )
                    ends += [predicted.min(), predicted.max(), actual.min(), actual.max()]
            if ends:
                axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", linewidth=0.8)
            logarithmic(axes, "x")
            logarithmic(axes, "y")
            axes.set_title(kind, fontsize=9)
            axes.set_xlabel("predicted [s]")
            axes.set_ylabel("actual [s]")
            axes.legend(fontsize=7)
    return Drawing(
        "legs",
        f"Predicted against actual time of legs: {', '.join(kinds)}; arms {', '.join(arms)}.",
        figure,
        "Time of each leg, predicted by the cost models against what it took; on the line the prediction was right.",
    )


def _thinned(predicted: FloatArray, actual: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Evenly chosen by rank of the prediction, so that both ends stay."""
    if predicted.size <= _MAX_DOTS:
        return predicted, actual
    order = np.argsort(predicted, kind="stable")
    chosen = order[np.linspace(0, predicted.size - 1, _MAX_DOTS).astype(int)]
    return predicted[chosen], actual[chosen]
