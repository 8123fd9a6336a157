"""The parts of a page that need more than one module: hit anatomy, load over time, one session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from replayer.report.anatomy import Anatomy, AnatomyTokens, TracePaths, anatomy, total
from replayer.report.figures import fleet as figures_fleet
from replayer.report.figures import latency as figures_latency
from replayer.report.figures.style import Drawing, natural
from replayer.report.inputs import OneRun
from replayer.report.load_over_time import BINS, Imbalance, LoadOverTime, imbalance, load_over_time
from replayer.report.timeline import MAX_TURNS, choose_session, spans
from replayer.traces.trace import Trace

Runs = Mapping[str, Sequence[OneRun]]
"""Label -> the arm's runs."""
_MAX_CELLS = 1200
_MIN_BINS = 24
_MAX_SURPLUS = 0.01
"""Share of the prompt tokens that may be cached beyond the model before the page warns."""
_MAX_UNCOUNTED = 0.01
"""Share of the requests that may be left out before the page has them as the reason."""

LEVELS = {
    "ideal_infinite": ("ideal, infinite", "one cache for the fleet that never forgets"),
    "ideal_finite": ("ideal, finite", "one LRU cache of the fleet's whole capacity"),
    "routed_infinite": ("routed, infinite", "instances that never forget, the placement as it was"),
    "best_placed": ("best placed", "LRU caches of the instances' size: the one that held most of the prompt"),
    "routed_finite": ("routed, finite", "LRU caches of the instances' size: the chosen one"),
    "actual": ("actual", "as the engines reported"),
}


@dataclass(frozen=True)
class SectionCell:
    """One figure of the anatomy."""

    share: float | None
    """Of the arm's prompt tokens."""
    tokens: int | None


@dataclass(frozen=True)
class HitRow:
    """One line of the anatomy's table."""

    name: str
    meaning: str
    cells: list[SectionCell]


@dataclass(frozen=True)
class Hits:
    """The anatomy of all arms, or the reason why there is none."""

    why_missing: str = ""
    arms: dict[str, Anatomy] = field(default_factory=dict)
    levels: list[HitRow] = field(default_factory=list)
    losses: list[HitRow] = field(default_factory=list)
    errors: list[HitRow] = field(default_factory=list)
    """Predicted against actual on the instance that computed the prompt."""
    drawing: Drawing | None = None

    @property
    def doubtful(self) -> dict[str, str]:
        """Arms in which more was cached than the model holds, each with the likely reason."""
        return {
            label: _why_surplus(one)
            for label, one in self.arms.items()
            for part in one.losses
            if part.name == "not delivered" and part.tokens < -_MAX_SURPLUS * one.tokens.prompt
        }

    @property
    def left_out(self) -> dict[str, list[str]]:
        """Missing figure with its reason -> arms without it."""
        missing: dict[str, list[str]] = {}
        for label, one in self.arms.items():
            for why in one.left_out:
                missing.setdefault(why, []).append(label)
        return missing


def hits(arms: Runs, trace: Trace | None, *, why_no_trace: str, capacity_tokens: int | None) -> Hits:
    """The hit-rate anatomy of every arm.

    Args:
        arms: their runs.
        trace: the replayed trace.
        why_no_trace: shown where ``trace`` is None.
        capacity_tokens: KV pool of one instance, where the runs do not have it.
    """
    if trace is None:
        return Hits(why_no_trace)
    paths = TracePaths(trace)
    found = {
        label: total([_anatomy(paths, trace, one, capacity_tokens) for one in runs]) for label, runs in arms.items()
    }
    if not any(one.requests for one in found.values()):
        return Hits("no request of any arm succeeded, said which instance served it, and is in the trace")
    levels = [
        HitRow(title, meaning, [_cell(one, getattr(one.tokens, name)) for one in found.values()])
        for name, (title, meaning) in LEVELS.items()
    ]
    parts = {part.name: part.meaning for one in found.values() for part in one.losses}
    losses = [
        HitRow(name, parts[name], [_cell(one, _loss(one, name)) for one in found.values()])
        for name in sorted(parts, key=lambda name: -figures_fleet.PARTS.index(name))
    ]
    errors = [
        HitRow(name, meaning, [_cell(one, getattr(one.tokens, key)) for one in found.values()])
        for key, name, meaning in (
            ("overpredicted", "predicted, not there", "sum of max(0, predicted − actual)"),
            ("underpredicted", "there, not predicted", "sum of max(0, actual − predicted)"),
        )
    ]
    return Hits("", found, _known(levels), losses, _known(errors), figures_fleet.hits(found))


def _why_surplus(one: Anatomy) -> str:
    every = one.requests + one.uncounted
    if one.uncounted > _MAX_UNCOUNTED * every:
        return (
            f"more was cached than the counted requests explain: {one.uncounted:,} of {every:,} requests are left out, "
            "and with them the prompts that they left in the engines' caches"
        )
    return "more was cached than caches of this capacity can hold: check --pool-tokens"


def _known(rows: Sequence[HitRow]) -> list[HitRow]:
    return [row for row in rows if any(cell.tokens is not None for cell in row.cells)]


def _anatomy(paths: TracePaths, trace: Trace, one: OneRun, capacity_tokens: int | None) -> Anatomy:
    replayed = one.run.header.trace_sha256
    if replayed and trace.sha256 and replayed != trace.sha256:
        return Anatomy(AnatomyTokens(), 0, 0, None, ["everything: it replayed another trace"])
    beliefs = {row.request_id: row.believed for row in one.rows if row.believed}
    return anatomy(
        paths,
        one.run.records,
        capacity_tokens=capacity_tokens or one.capacity_tokens,
        instances=one.instances,
        beliefs=beliefs,
    )


def _cell(one: Anatomy, tokens: int | None) -> SectionCell:
    if tokens is None or not one.tokens.prompt:
        return SectionCell(None, None)
    return SectionCell(tokens / one.tokens.prompt, tokens)


def _loss(one: Anatomy, name: str) -> int | None:
    return next((part.tokens for part in one.losses if part.name == name), None)


@dataclass(frozen=True)
class LoadSectionRow:
    """Imbalance of one arm's loads; with repeats the mean of them."""

    label: str
    requests: Imbalance
    pending_tokens: Imbalance
    mean_requests: float
    """In flight in the whole fleet."""
    mean_pending_tokens: float
    bin_s: float


@dataclass(frozen=True)
class LoadSection:
    """Load over time of all arms."""

    rows: list[LoadSectionRow] = field(default_factory=list)
    lines: list[Drawing] = field(default_factory=list)
    maps: list[Drawing] = field(default_factory=list)
    repeat: str = ""
    """Which repeat the figures show, where there are several."""


def load(arms: Runs) -> LoadSection:
    """Load over time: tables over all repeats, figures of each arm's first run."""
    every = {label: [one for one in map(_load, runs) if one is not None] for label, runs in arms.items()}
    first = {label: loads[0] for label, loads in every.items() if loads}
    if not first:
        return LoadSection()
    rows = [
        LoadSectionRow(
            label,
            _mean([imbalance(one.requests) for one in loads]),
            _mean([imbalance(one.pending_tokens) for one in loads]),
            float(np.mean([one.requests.sum(axis=0).mean() for one in loads])),
            float(np.mean([one.pending_tokens.sum(axis=0).mean() for one in loads])),
            float(np.mean([one.bin_s for one in loads])),
        )
        for label, loads in every.items()
        if loads
    ]
    drawn = [
        figures_fleet.fleet_load(first),
        figures_fleet.unevenness(first, "largest over mean"),
        figures_fleet.unevenness(first, "coefficient of variation"),
    ]
    tops = [(float(one.requests.max()), float(one.pending_tokens.max())) for one in first.values()]
    largest = (max(top[0] for top in tops), max(top[1] for top in tops))
    several = next((runs[0].repeat for runs in arms.values() if len(runs) > 1), "")
    return LoadSection(
        rows,
        [drawing for drawing in drawn if drawing is not None],
        [figures_fleet.load_map(label, one, largest) for label, one in first.items()],
        several,
    )


def _load(one: OneRun) -> LoadOverTime | None:
    instances = sorted(one.instances, key=natural)
    bins = max(_MIN_BINS, min(BINS, _MAX_CELLS // max(1, len(instances))))
    return load_over_time(one.run.records, instances=instances, bins=bins)


def _mean(found: Sequence[Imbalance]) -> Imbalance:
    return Imbalance(
        float(np.mean([one.largest_over_mean for one in found])),
        float(np.mean([one.coefficient_of_variation for one in found])),
    )


@dataclass(frozen=True)
class SessionShown:
    """One session in every arm."""

    session: str
    drawings: list[Drawing]
    cut: int
    """Turns beyond those that are drawn."""
    absent: list[str]
    """Arms in which it never ran."""


def session(arms: Runs, wanted: str | None) -> SessionShown | None:
    """The session asked for, or the longest that succeeded throughout in every arm (their first runs).

    Returns:
        None without any session.

    Raises:
        KeyError: ``wanted`` is in no run.
    """
    first = {label: runs[0].run for label, runs in arms.items()}
    if wanted is not None and not any(r.session_id == wanted for run in first.values() for r in run.records):
        raise KeyError(wanted)
    chosen = wanted if wanted is not None else choose_session(list(first.values()))
    if chosen is None:
        return None
    shown = {label: spans(run, chosen) for label, run in first.items()}
    drawn = [span for found in shown.values() for span in found[:MAX_TURNS]]
    if not drawn:
        return None
    reach = (max(span.finished_s for span in drawn), max(span.finished_s - span.scheduled_s for span in drawn))
    drawings = [figures_latency.timeline(label, chosen, found, reach) for label, found in shown.items()]
    return SessionShown(
        chosen,
        [drawing for drawing in drawings if drawing is not None],
        max(0, max(map(len, shown.values())) - MAX_TURNS),
        [label for label, found in shown.items() if not found],
    )
