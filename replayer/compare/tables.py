"""Tables of a comparison for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replayer.compare.goodput import Slo
from replayer.compare.statistics.tests import Effect
from replayer.report.page import format_percent, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from replayer.compare.comparison import Comparison

_COLOURS = {"better": "green", "worse": "red"}


def effects_table(comparison: Comparison) -> Table:
    """One comparison as a Rich table."""
    from rich.markup import escape
    from rich.table import Table

    title = f"{comparison.candidate_label} against {comparison.baseline_label}"
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("metric", no_wrap=True)
    for name in (comparison.baseline_label, comparison.candidate_label):
        table.add_column(escape(name), justify="right", overflow="fold")
    table.add_column("change (95 % interval)", justify="right", no_wrap=True)
    table.add_column("p, Holm", justify="right", no_wrap=True)
    table.add_column("floor", justify="right", no_wrap=True)
    table.add_column("smallest seen", justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for effect in comparison.effects:
        show = format_seconds if effect.unit == "s" else format_percent
        interval = "" if effect.note else f" ({effect.low * 100:+.1f} … {effect.high * 100:+.1f})"
        table.add_row(
            effect.metric,
            show(effect.baseline),
            show(effect.candidate),
            f"{format_percent(effect.change)}{interval}",
            "–" if effect.note else f"{effect.p_adjusted:.4f}",
            _around(effect.noise_floor),
            _around(effect.smallest_detectable),
            escape(_verdict(effect)),
            style=_COLOURS.get(effect.verdict.value, ""),
        )
    pairing, runs = comparison.pairing, comparison.runs
    repeated = f"{runs[0]} and {runs[1]} runs, " if max(runs) > 1 else ""
    table.caption = (
        f"{repeated}{pairing.both_ok} of {len(pairing.keys)} pairs OK in {'all' if repeated else 'both'}, "
        f"{comparison.sessions} sessions; ≈ not distinguishable; floor: smaller changes are not called different; "
        "smallest seen: found in 80 of 100 such experiments"
    )
    return table


def floor_table(comparison: Comparison) -> Table:
    """What runs of the same thing differ by, as a Rich table."""
    from rich.table import Table

    table = Table(title="Runs of the same thing", title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("metric", no_wrap=True)
    for name in ("runs", "of things", "scatter (1 SD)", "largest difference", "two runs, 95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in comparison.noise_floor:
        table.add_row(
            row.metric,
            str(row.runs),
            str(row.groups),
            *(_around(value) for value in (row.scatter, row.largest, row.two_runs)),
        )
    return table


def goodput_lines(comparison: Comparison, slo: Slo) -> list[str]:
    """Goodput per second of both arms, with the objectives in words."""
    told = {"goodput": slo.describe_fixed(), "goodput, scaled SLO": slo.describe_scaled() if slo.scaled else ""}
    return [
        f"{name} ({told[name]}): {before:.3f} requests/s against {after:.3f} requests/s"
        for name, (before, after) in comparison.goodput_per_s.items()
    ]


def _verdict(effect: Effect) -> str:
    if effect.note:
        return f"not judged: {effect.note}"
    if effect.verdict.value in _COLOURS:
        return effect.verdict.value
    return "≈, below the noise floor" if effect.below_floor else "≈"


def _around(value: float) -> str:
    return f"±{value * 100:.1f} %" if np.isfinite(value) else "–"
