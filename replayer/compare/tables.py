"""A comparison in the terminal: the matrix of verdicts, and the tables of its details."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from replayer.compare.goodput import Slo
from replayer.compare.matrix import Matrix, leader_sentence, matrix_of
from replayer.compare.verdict import VerdictCell, baseline_value, cell_of
from replayer.records.counted import counted
from replayer.records.readable import format_points

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from replayer.compare.comparison import Comparison

_COLOURS = {"better": "green", "worse": "red"}
_PLAIN: Any = {"box": None, "pad_edge": False, "padding": (0, 1, 0, 0)}


def print_verdict(
    console: Console, comparisons: Sequence[Comparison], among_the_best: Sequence[Comparison] = ()
) -> Matrix:
    """Print headline, markers, matrix and legend; returns the matrix.

    Args:
        console: 80 columns are enough.
        comparisons: at least one, of one family.
        among_the_best: the candidates against the fastest of them, for one more sentence.
    """
    from rich.text import Text

    matrix = matrix_of(comparisons)
    console.print(Text(matrix.headline), style="bold")
    if among_the_best:
        console.print(Text(leader_sentence(among_the_best)))
    for marker in matrix.markers:
        console.print(Text(f"! {marker}"), style="yellow")
    console.print()
    console.print(matrix_table(matrix))
    console.print(Text(matrix.legend), style="dim")
    for line in matrix.also:
        console.print(Text(line))
    return matrix


def matrix_table(matrix: Matrix) -> Table:
    """The matrix as a Rich table: arms down, metrics across, change over interval in each cell."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, header_style="bold", leading=1)
    table.add_column("arm", overflow="fold", min_width=8)
    for name in matrix.metrics:
        table.add_column(name, overflow="fold")
    table.add_row(Text(f"{matrix.baseline}\n(baseline)"), *map(Text, matrix.reference))
    for row in matrix.rows:
        table.add_row(Text(row.arm), *map(_cell, row.cells))
    return table


def _cell(cell: VerdictCell) -> Text:
    from rich.text import Text

    return Text(cell.head, style=_COLOURS.get(cell.word, "")).append(f"\n{cell.interval}", style="not bold")


def print_details(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Print every comparison with all its metrics, its fine print and its sentence, then the table of replicates."""
    from rich.text import Text

    for found in comparisons:
        console.print(effects_table(found))
        for note in [*_remarks(found), *found.notes]:
            console.print(Text(note), style="dim")
        console.print(Text(found.sentence), style="bold")
        console.print()
    if comparisons[0].noise_floor:
        console.print(floor_table(comparisons[0]))
        console.print()


def effects_table(comparison: Comparison) -> Table:
    """One comparison as a Rich table: every metric, within 80 columns."""
    from rich.table import Table
    from rich.text import Text

    pairing, runs = comparison.pairing, comparison.runs
    title = Text(f"{comparison.candidate_label} against {comparison.baseline_label}")
    table = Table(title=title, title_justify="left", caption_justify="left", header_style="bold", **_PLAIN)
    table.add_column("metric", overflow="fold")
    for name in ("baseline", "candidate"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("change, %", no_wrap=True)
    for name in ("95 % interval", "p", "noise\nfloor", "smallest\nfound"):
        table.add_column(name, justify="right", no_wrap=True)
    for effect in comparison.effects:
        cell = cell_of(effect)
        table.add_row(
            effect.metric,
            baseline_value(effect),
            baseline_value(replace(effect, baseline=effect.candidate)),
            cell.head,
            cell.interval,
            "–" if effect.note else f"{effect.p_adjusted:.4f}",
            format_points(effect.noise_floor, signed=False),
            format_points(effect.smallest_detectable, signed=False),
            style=_COLOURS.get(cell.word, ""),
        )
    repeated = f"{runs[0]} and {runs[1]} runs, " if max(runs) > 1 else ""
    table.caption = (
        f"{repeated}{pairing.both_ok} of {len(pairing.keys)} pairs OK in {'all' if repeated else 'both'}, "
        f"{counted(comparison.sessions, 'session')}.\n"
        f"p: corrected by Holm over {counted(comparison.family, 'test')}.\n"
        f"noise floor, %: equal arms of so many runs differ by less in 95 of 100 cases{_source(comparison)}; a change "
        "below it is never called better or worse.\n"
        "smallest found, %: an experiment like this one finds a true change of this size in 80 of 100 cases."
    )
    return table


def _source(comparison: Comparison) -> str:
    """Source of the noise floor, in words."""
    if comparison.noise_floor:
        return ", by the noise between replicates (last table)"
    return ", as assumed for single runs" if comparison.assumed_noise else ""


def _remarks(comparison: Comparison) -> list[str]:
    """Reasons for metrics that are not judged or lie below the noise floor, equal ones together."""
    by_note: dict[str, list[str]] = {}
    for cell in map(cell_of, comparison.effects):
        if cell.note:
            by_note.setdefault(f"{cell.verdict}: {cell.note}", []).append(cell.metric)
    return [f"{', '.join(metrics)} {note}" for note, metrics in by_note.items()]


def floor_table(comparison: Comparison) -> Table:
    """Differences between replicates as a Rich table."""
    from rich.table import Table

    table = Table(
        title="Replicates: differences between runs of one arm, %",
        title_justify="left",
        caption_justify="left",
        header_style="bold",
        **_PLAIN,
    )
    table.add_column("metric", no_wrap=True)
    for name in ("runs", "of arms", "1 SD", "largest seen", "floor of single runs"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in comparison.noise_floor:
        table.add_row(
            row.metric,
            str(row.runs),
            str(row.groups),
            *(_in_percent(value) for value in (row.scatter, row.largest, row.two_runs)),
        )
    table.caption = (
        "1 SD: standard deviation of a run about its arm. largest seen: between two runs of one arm.\n"
        "floor of single runs: two runs of one arm differ by less in 95 of 100 cases, the noise floor of arms with one "
        "run each. More runs lower the noise floor."
    )
    return table


def goodput_lines(comparison: Comparison, slo: Slo) -> list[str]:
    """Goodput per second of candidate and baseline by name, with the objectives in words."""
    candidate, baseline = comparison.candidate_label, comparison.baseline_label
    objectives = {"goodput": slo.describe_fixed(), "goodput, scaled SLO": slo.describe_scaled() if slo.scaled else ""}
    return [
        f"{name} ({objectives[name]}): {candidate} {after:.3f} requests/s against {baseline} {before:.3f} requests/s"
        for name, (before, after) in comparison.goodput_per_s.items()
    ]


def _in_percent(value: float) -> str:
    return f"{value * 100:.1f}" if np.isfinite(value) else "–"
