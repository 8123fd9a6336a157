"""The verdict as a matrix of arms and metrics: one sentence, markers, cells, legend.

Terminal (`replayer.compare.tables`), HTML (`replayer.report`) and JSON all print the texts that are made here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from replayer.compare.comparison import Comparison
from replayer.compare.statistics.tests import Effect, Verdict
from replayer.compare.verdict import VerdictCell, baseline_value, cell_of
from replayer.records.classes import PlannedClass

MAIN_METRICS = ("TTFT p50", "TTFT p90", "TPOT p50", "E2E p50", "APC")
"""Columns of the matrix: as many as fit into 80 columns of text. The details have every metric."""
LEADING_METRIC = "E2E p50"


@dataclass(frozen=True)
class MatrixRow:
    """One candidate."""

    arm: str
    cells: list[VerdictCell]
    also: list[VerdictCell]
    """Metrics outside the columns on which the candidate is better or worse."""


@dataclass(frozen=True)
class Matrix:
    """All candidates of one baseline."""

    baseline: str
    headline: str
    """The verdict in one sentence."""
    markers: list[str]
    """Limits that a reader must see beside the headline: single runs, failed requests, forced comparisons."""
    metrics: list[str]
    reference: list[str]
    """The baseline's value of each metric; a range where candidates are paired on different requests."""
    rows: list[MatrixRow]
    legend: str

    @property
    def also(self) -> list[str]:
        """One line for each candidate with differences outside the columns."""
        return [
            f"{row.arm}, also: "
            + ", ".join(f"{cell.metric} {cell.symbol} {cell.change} % {cell.word}" for cell in row.also)
            for row in self.rows
            if row.also
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "baseline": self.baseline,
            "headline": self.headline,
            "markers": self.markers,
            "legend": self.legend,
            "reference": dict(zip(self.metrics, self.reference, strict=True)),
            "rows": [
                {
                    "arm": row.arm,
                    "cells": [cell.as_json() for cell in row.cells],
                    "also": [cell.as_json() for cell in row.also],
                }
                for row in self.rows
            ],
        }


def matrix_of(comparisons: Sequence[Comparison], *, metrics: Sequence[str] = MAIN_METRICS) -> Matrix:
    """The matrix of comparisons that share a baseline.

    Args:
        comparisons: at least one, of one family.
        metrics: columns; those that were not compared are left out.
    """
    known = {effect.metric for effect in comparisons[0].effects}
    columns = [name for name in metrics if name in known]
    return Matrix(
        baseline=comparisons[0].baseline_label,
        headline=headline(comparisons),
        markers=_markers(comparisons),
        metrics=columns,
        reference=[_reference([_effect(found, name) for found in comparisons]) for name in columns],
        rows=[_row(found, columns) for found in comparisons],
        legend=(
            f"Change against {comparisons[0].baseline_label} in %, below it the 95 % interval; ▼ fell, ▲ rose: better "
            "or worse by the corrected test; ≈ not distinguishable; – not judged."
        ),
    )


def headline(comparisons: Sequence[Comparison]) -> str:
    """The candidates by outcome in one sentence: better, worse, both, neither."""
    restriction = comparisons[0].restriction
    if len(comparisons) == 1:
        return restriction + _one(comparisons[0])
    groups: dict[tuple[bool, bool], list[str]] = {}
    for found in comparisons:
        verdicts = {effect.verdict for effect in found.effects}
        groups.setdefault((Verdict.BETTER in verdicts, Verdict.WORSE in verdicts), []).append(found.candidate_label)
    words = {
        (True, False): "better on some metrics and worse on none",
        (True, True): "better on some metrics and worse on others",
        (False, False): "not distinguishable",
        (False, True): "worse on some metrics and better on none",
    }
    parts = [f"{_listed(groups[key])} {_verb(groups[key])} {words[key]}" for key in words if key in groups]
    against = "against" if restriction else "Against"
    return f"{restriction}{against} {comparisons[0].baseline_label}: {'; '.join(parts)}."


def leader_sentence(comparisons: Sequence[Comparison]) -> str:
    """The fastest candidate, and whether it is better than the others; empty without comparisons.

    Args:
        comparisons: of the other candidates against it.
    """
    if not comparisons:
        return ""
    groups: dict[Verdict, list[str]] = {}
    for found in comparisons:
        groups.setdefault(_effect(found, LEADING_METRIC).verdict, []).append(found.candidate_label)
    # The comparisons are the other way round: a candidate that is worse puts the leader ahead.
    words = {
        Verdict.WORSE: "better than",
        Verdict.NOT_DISTINGUISHABLE: "not distinguishable from",
        Verdict.NOT_JUDGED: "not judged against",
        Verdict.BETTER: "worse than",
    }
    parts = [f"{words[verdict]} {_listed(groups[verdict])}" for verdict in words if verdict in groups]
    leader = comparisons[0].baseline_label
    return f"Of the candidates, {leader} has the lowest {LEADING_METRIC}: there it is {_listed(parts)}."


def _one(found: Comparison) -> str:
    counts = {verdict: sum(effect.verdict is verdict for effect in found.effects) for verdict in Verdict}
    judged = sum(counts.values()) - counts[Verdict.NOT_JUDGED]
    names = f"{found.candidate_label} against {found.baseline_label}:"
    if not judged and found.pairing.keys and not found.pairing.both_ok:
        return f"{names} not judged, no request succeeded in both."
    if not judged:
        return f"{names} not judged, too few requests or sessions."
    better, worse = counts[Verdict.BETTER], counts[Verdict.WORSE]
    if not better and not worse:
        return f"{names} not distinguishable on any of {judged} metrics."
    return (
        f"{names} better on {better or 'none'} and worse on {worse or 'none'} of {judged} metrics, "
        f"{counts[Verdict.NOT_DISTINGUISHABLE] or 'none'} not distinguishable."
    )


def _row(found: Comparison, columns: Sequence[str]) -> MatrixRow:
    cells = {effect.metric: cell_of(effect) for effect in found.effects}
    also = [cell for name, cell in cells.items() if name not in columns and cell.word]
    return MatrixRow(found.candidate_label, [cells[name] for name in columns], also)


def _markers(comparisons: Sequence[Comparison]) -> list[str]:
    first = comparisons[0]
    markers = list(dict.fromkeys(warning for found in comparisons for warning in found.warnings))
    if first.only_class is not None:
        markers.insert(0, _class_marker(comparisons, first.only_class))
    failed = {first.baseline_label: max(found.pairing.failed_baseline for found in comparisons)}
    failed |= {found.candidate_label: found.pairing.failed_candidate for found in comparisons}
    if any(failed.values()):
        markers.append(
            "Failed requests: " + ", ".join(f"{count} in {label}" for label, count in failed.items() if count)
        )
    if not first.noise_floor:
        times = f"±{first.assumed_noise * 100:g} % for times" if first.assumed_noise else "none for times"
        markers.append(f"Single runs: noise between runs is assumed, not measured: {times}, none for APC and rates")
    return markers


def _class_marker(comparisons: Sequence[Comparison], only: PlannedClass) -> str:
    """The compared class, with the range of its requests where candidates are paired on different ones."""
    requests = [len(found.pairing.keys) for found in comparisons]
    totals = [count + found.pairing.other_classes for count, found in zip(requests, comparisons, strict=True)]
    shown, of = (" to ".join(dict.fromkeys((f"{min(each):,}", f"{max(each):,}"))) for each in (requests, totals))
    return f"Only requests of class {only} are compared, {shown} of {of}: {only.tokens}"


def _effect(found: Comparison, metric: str) -> Effect:
    return next(effect for effect in found.effects if effect.metric == metric)


def _reference(effects: Sequence[Effect]) -> str:
    ordered = sorted(effects, key=lambda effect: effect.baseline)
    ends = list(dict.fromkeys(baseline_value(effect) for effect in (ordered[0], ordered[-1])))
    return " … ".join(ends)


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _verb(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
