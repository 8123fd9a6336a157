"""One self-contained HTML page about one or more runs: verdicts, figures, tables and the conditions they hold under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from replayer.compare.arms import ArmRuns
from replayer.compare.comparison import CompareOptions, Comparison
from replayer.compare.conditions import refuse_or_note
from replayer.compare.matrix import leader_sentence, matrix_of
from replayer.compare.pairing import align
from replayer.compare.runs import ComparisonError, compare_arms
from replayer.compare.verdict import cell_of
from replayer.compare.window import choose_window, in_class
from replayer.records.breakdown_rows import BreakdownError, BreakdownRow
from replayer.records.breakdown_rows import read_objects as read_breakdown
from replayer.records.classes import CLASSES
from replayer.records.outputs import replacing
from replayer.records.readable import format_change, format_factor, format_number, format_percent, format_seconds
from replayer.records.sessions import session_tally
from replayer.report import conditions as report_conditions
from replayer.report import decisions
from replayer.report import sections as report_sections
from replayer.report.figures import fleet as figures_fleet
from replayer.report.figures import latency as figures_latency
from replayer.report.figures.style import Drawing, natural
from replayer.report.inputs import Arm, Row, pooled, unique_labels
from replayer.report.offloads import offloads
from replayer.report.summary import ArmSummary, summarise_arm, values_of
from replayer.report.turns import by_turn
from replayer.traces.trace import Trace

__all__ = [
    "Arm",
    "ArmSummary",
    "BreakdownError",
    "Page",
    "Row",
    "against_leader",
    "compare_all",
    "make_page",
    "read_breakdown",
    "render",
    "summarise_arm",
    "unique_labels",
    "write_report",
]


@dataclass(frozen=True)
class Extras:
    """Contents of a page besides its runs."""

    trace: Trace | None = None
    """The replayed trace: the hit anatomy needs its block ids."""
    why_no_trace: str = "it needs the trace for its block ids: give --trace FILE"
    pool_tokens: int | None = None
    """KV pool of one instance, where the runs do not have it."""
    session: str | None = None
    """The session to draw; None: the longest."""
    environment: Mapping[str, Any] | None = None
    """Machine and versions of an experiment."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    """A finished page."""

    html: str
    drawings: list[Drawing]
    """Its figures, in order."""


def compare_all(
    arms: Sequence[Arm], options: CompareOptions | None = None, *, same: Sequence[ArmRuns] = (), **fields: Any
) -> tuple[list[Comparison], list[str]]:
    """Every arm against the first: the comparisons, and the reasons why others could not be made.

    Args:
        arms: the baseline first.
        options: how to compare.
        same: groups of replicates, used for the noise floor.
        fields: of `CompareOptions`, instead of ``options``.
    """
    chosen = options or CompareOptions(**fields)
    base, *others = [arm.compared() for arm in arms]
    if not others:
        return [], []
    try:
        return compare_arms([base, *others], chosen, same=same), []
    except ComparisonError as error:
        if len(others) == 1:
            return [], [str(error)]
    # Some arm must not be compared: find which, and compare the others.
    comparable, refusals = [base], []
    for other in others:
        try:
            refuse_or_note([base, other], chosen.trace, force=chosen.force)
            comparable.append(other)
        except ComparisonError as error:
            refusals.append(str(error))
    if len(comparable) == 1:
        return [], refusals
    try:
        return compare_arms(comparable, chosen, same=same), refusals
    except ComparisonError as error:
        return [], [*refusals, str(error)]


def against_leader(arms: Sequence[Arm], options: CompareOptions | None = None, **fields: Any) -> list[Comparison]:
    """The arms after the first against the one of them with the lowest E2E p50 over requests that succeeded in all.

    Empty with fewer than two such arms, or when they cannot be compared. Arguments as for `compare_all`. The first arm
    is compared too and left out afterwards: noise and correction are those of ``compare --baseline LEADER``.
    """
    chosen = options or CompareOptions(**{name: value for name, value in fields.items() if name != "same"})
    timed = [arm for arm in arms[1:] if all(any(record.ok for record in one.run.records) for one in arm.runs())]
    leader = _fastest(timed, chosen) if len(timed) > 1 else None
    if leader is None:
        return []
    others = [arms[0], *(arm for arm in timed if arm is not leader)]
    comparisons, _ = compare_all([leader, *others], options, **fields)
    return [found for found in comparisons if found.candidate_label != arms[0].label]


def _fastest(arms: Sequence[Arm], options: CompareOptions) -> Arm | None:
    """The arm with the lowest E2E p50 over the compared requests that succeeded in every run of all; None without any.

    Over each arm's own successful requests, one that fails at the slow ones would be the fastest.
    """
    groups = [[one.run for one in arm.runs()] for arm in arms]
    requests, columns = align([run for group in groups for run in group], clock=options.clock)
    _, inside = choose_window(
        requests.planned_s,
        requests.input_tokens,
        requests.session_of,
        skip_first_s=options.skip_first_s,
        skip_last_s=options.skip_last_s,
    )
    kept = inside & in_class(requests.classes, options.only_class)
    kept = np.logical_and.reduce([kept, *(run.ok & np.isfinite(run.e2e_s) for run in columns)])
    if not kept.any():
        return None
    medians = iter([np.median(run.e2e_s[kept]) for run in columns])
    values = [np.mean(np.log([next(medians) for _ in group])) for group in groups]
    return arms[int(np.argmin(values))]


def render(
    arms: Sequence[Arm],
    comparisons: Sequence[Comparison],
    *,
    title: str = "Replay report",
    remarks: Sequence[str] = (),
    among_the_best: Sequence[Comparison] = (),
    extras: Extras | None = None,
) -> str:
    """HTML text of `make_page`."""
    return make_page(arms, comparisons, title=title, remarks=remarks, among_the_best=among_the_best, extras=extras).html


def make_page(
    arms: Sequence[Arm],
    comparisons: Sequence[Comparison],
    *,
    title: str = "Replay report",
    remarks: Sequence[str] = (),
    among_the_best: Sequence[Comparison] = (),
    extras: Extras | None = None,
) -> Page:
    """The page and its figures. Labels and every other text from the files are escaped.

    Args:
        arms: the runs, baseline first.
        comparisons: from `compare_all` or `compare`.
        title: heading of the page.
        remarks: sentences shown above the tables, for example why a comparison was refused.
        among_the_best: the arms against the leader (`against_leader`), shown as a second, folded matrix.
        extras: trace, pool, session and environment.

    Raises:
        BreakdownError: breakdown rows of another shape.
        KeyError: the session asked for is in no run.
    """
    extras = extras or Extras()
    runs = {arm.label: arm.runs() for arm in arms}
    together = {label: pooled(every) for label, every in runs.items()}
    sessions = {label: session_tally(one.run for one in every) for label, every in runs.items()}
    summaries = [
        summarise_arm(label, run, runs=len(runs[label]), intervals=True, sessions=sessions[label])
        for label, run in together.items()
    ]
    latency = _kept(
        *(
            figures_latency.cdfs(
                {label: values_of(run.records, attribute) for label, run in together.items()}, title=name, unit="s"
            )
            for name, attribute in (("TTFT", "ttft_s"), ("E2E", "e2e_s"), ("TPOT", "tpot_s"))
        ),
        figures_latency.cdfs(
            {label: np.array(tally.completion_s) for label, tally in sessions.items()},
            title="Session time",
            unit="s",
            of="sessions",
        ),
        figures_latency.per_turn({label: by_turn(one.run.records for one in every) for label, every in runs.items()}),
    )
    hits = report_sections.hits(
        runs, extras.trace, why_no_trace=extras.why_no_trace, capacity_tokens=extras.pool_tokens
    )
    load = report_sections.load(runs)
    shares = _kept(
        figures_fleet.instance_load({s.label: _floats(s.requests_by_instance) for s in summaries}, title="requests"),
        figures_fleet.instance_load(
            {s.label: _floats(s.new_tokens_by_instance) for s in summaries}, title="new tokens"
        ),
    )
    rows: dict[str, list[BreakdownRow]] = {
        label: [row for one in every for row in one.rows] for label, every in runs.items()
    }
    offloaded = {label: offloads(run.records, rows[label], run.header.clock_scale) for label, run in together.items()}
    legs = _kept(figures_latency.legs({label: found.legs for label, found in offloaded.items()}))
    session = report_sections.session(runs, extras.session)
    instances = sorted({name for every in runs.values() for one in every for name in one.instances}, key=natural)
    html = _environment().get_template("report.html.j2").render(
        title=title,
        arms=arms,
        summaries=summaries,
        comparisons=comparisons,
        matrix=matrix_of(comparisons) if comparisons else None,
        leader=_leader(among_the_best),
        remarks=[*extras.notes, *remarks],
        warnings=[(arm.label, warning) for arm in arms for warning in arm.warnings],
        latency=latency,
        hits=hits,
        load=load,
        shares=shares,
        instances=instances,
        costs=" and of ".join(dict.fromkeys(run.header.idle_costs.source for run in together.values())),
        classes=CLASSES,
        reasons={label: decisions.reasons(run.records) for label, run in together.items()},
        matrices={label: decisions.class_matrix(run.records) for label, run in together.items()},
        breakdowns={label: found for label in rows if (found := decisions.summarise_rows(rows[label])) is not None},
        offloads=offloaded,
        legs=legs,
        session=session,
        conditions=report_conditions.conditions(runs),
        freshness=report_conditions.freshness(runs),
        machine=report_conditions.machine(extras.environment),
    )  # fmt: skip
    drawings = [*latency, *_kept(hits.drawing), *load.lines, *load.maps, *shares, *legs]
    return Page(html, [*drawings, *(session.drawings if session else [])])


def write_report(path: str | Path, html: str) -> Path:
    """Write the page, creating its folder; returns the path. Where it cannot be written, an earlier page is kept."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(html.encode())
    return path


def _leader(among_the_best: Sequence[Comparison]) -> dict[str, Any] | None:
    """The candidates against the fastest of them."""
    if not among_the_best:
        return None
    return {
        "sentence": leader_sentence(among_the_best),
        "matrix": matrix_of(among_the_best),
        "sentences": [found.sentence for found in among_the_best],
    }


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("replayer.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters.update(
        seconds=format_seconds,
        percent=format_percent,
        factor=format_factor,
        change=format_change,
        number=format_number,
        cell=cell_of,
        inline=lambda drawing: Markup(drawing.inline()),
    )
    return environment


def _kept(*drawings: Drawing | None) -> list[Drawing]:
    return [drawing for drawing in drawings if drawing is not None]


def _floats(loads: dict[str, int]) -> dict[str, float]:
    return {name: float(load) for name, load in loads.items()}
