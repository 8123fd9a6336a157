"""The tournament's tables as Markdown, from kept results alone: equal results give equal bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from bench.tournament.folds import Ablation, Fold, ablation, folds, in_place
from bench.tournament.judge import E2E, METRICS, TTFT, CellFigures, CellStanding
from bench.tournament.ranking import (
    MIN_SESSIONS,
    TARGET_RATIO,
    TARGET_SHARE,
    Rank,
    SessionRow,
    by_axis,
    family_share,
    rank,
    ranking,
    session_rows,
)
from bench.tournament.results import GridCell, TraceFacts

BEGIN, END = "<!-- tournament: begin -->", "<!-- tournament: end -->"
SHOWN_BEHIND = 25
"""Most cells to list in which the subject is more than 5 % behind."""


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """Command and versions that the results were made with."""

    command: str
    versions: dict[str, str]


class TournamentReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the tables are made from."""

    made: Made
    facts: dict[str, TraceFacts]
    figures: list[CellFigures]
    field: list[str]
    """Labels that are ranked."""
    subject: str
    ideas: dict[str, str]
    """Label of the subject without each idea."""
    ablation_figures: list[CellFigures]
    """Figures of the cells that the ablations were played in, with the field's."""
    with_folds: bool


def markdown(report: TournamentReport) -> str:
    """The Markdown text between the markers of docs/tournament.md."""
    verdicts = [verdict for each in report.figures for verdict in each.judge(report.field)]
    families = {name: facts.family for name, facts in report.facts.items()}
    ranks = ranking(verdicts)
    order = [each.label for each in ranks]
    parts = [
        _made(report.made),
        f"### Traces\n\n{_traces(report)}",
        f"### Ranking\n\n{_ranking(ranks, family_share(verdicts, families))}",
    ]
    if rows := session_rows(report.figures, order):
        parts.append(f"### Sessions\n\n{_sessions(rows)}")
    if report.subject in order:
        parts.append(f"### `{report.subject}` against its targets\n\n{_targets(verdicts, report.subject)}")
    axes: list[tuple[str, str, Callable[[GridCell], object]]] = [
        ("By family of traces", "", lambda cell: families[cell.trace]),
        ("By trace", "", lambda cell: cell.trace),
        ("By load", "load ", lambda cell: f"{cell.load:g}"),
        ("By KV pool", "pool ", lambda cell: f"{cell.pool:g}"),
        ("By fleet", "×", lambda cell: f"{cell.fleet}"),
    ]
    for title, prefix, axis in axes:
        parts.append(f"### {title}\n\n{_axis(verdicts, order, prefix, axis)}")
    ablations = _ablations(report)
    if ablations:
        parts.append(f"### Contribution of each idea\n\n{_ablation_table(report, ablations)}")
    if report.with_folds:
        parts.append(f"### Held-out families\n\n{_folds(report, families)}")
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterator[list[str]] | list[list[str]], left: int = 1) -> str:
    rule = "|" + " --- |" * left + " ---: |" * (len(head) - left)
    return "\n".join(["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)])


def _made(made: Made) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(made.versions.items()))
    return (
        f"Made by `{made.command}` ({versions}). The same command gives the same tables, with any number of processes."
    )


def _traces(report: TournamentReport) -> str:
    def rows() -> Iterator[list[str]]:
        played = {each.cell.trace for each in report.figures}
        for name, facts in sorted(report.facts.items(), key=lambda item: (item[1].family, item[0])):
            if name not in played:
                continue
            pools = ", ".join(
                f"{tokens:,}{'*' if factor in facts.floored else ''}" for factor, tokens in facts.pools.items()
            )
            yield [
                f"`{name}`",
                facts.family,
                f"{facts.requests:,}",
                f"{facts.sessions:,}",
                f"{facts.saturation:.3g}",
                f"{facts.attained:.2f}",
                f"{facts.latency_s:.3g}",
                f"{facts.hot_set_tokens:,.0f}",
                pools,
            ]

    head = ["trace", "family", "requests", "sessions", "saturation", "attained", "latency", "hot set", "pools"]
    return (
        _table(head, rows(), left=2)
        + "\n\nSaturation in requests per second and instance; *attained*: the throughput of one instance that is "
        "offered 1.5 times its saturation, with a pool that never evicts, over the saturation computed for its "
        "requests; nominal "
        "latency at 0.8 of saturation in seconds; hot set and pools in tokens of one instance (*: raised so that the "
        "largest request fits)."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ranking(ranks: Sequence[Rank], shares: Mapping[str, float]) -> str:
    def rows() -> Iterator[list[str]]:
        for place, each in enumerate(ranks, 1):
            yield [
                str(place),
                f"`{each.label}`",
                _percent(each.tied),
                _percent(shares[each.label]),
                _percent(each.tied_on[TTFT]),
                f"{each.mean[TTFT]:.3f}",
                _percent(each.tied_on[E2E]),
                f"{each.mean[E2E]:.3f}",
                f"{each.worst:.2f}",
                str(each.behind),
                str(each.surely_behind),
                str(each.failed),
            ]

    head = [
        *("rank", "policy", "best or tied", "by family", "TTFT p90 tied", "ratio", "E2E p50 tied", "ratio"),
        *("worst", "> 5 % behind", "significantly", "failed"),
    ]
    return (
        f"{ranks[0].cells if ranks else 0} cells.\n\n"
        + _table(head, rows(), left=2)
        + "\n\n*best or tied*: share of cells where a policy is best or tied for best in TTFT p90 *and* E2E p50; "
        "*by family*: the same with equal weight for every family of traces; "
        "*ratio*: geometric mean of the ratio to the cell's best; "
        "*worst*: the largest ratio to a cell's best in either metric; *> 5 % behind*: cells where it is above 1.05 in "
        "either, *significantly* where the whole 95 % interval is; *failed*: judged requests that failed."
    )


def _sessions(rows: Sequence[SessionRow]) -> str:
    head = ["policy", "mean", "p50", "p90", "slowdown mean", "p50", "p90", "failed"]
    lines = [
        [
            f"`{row.label}`",
            *(f"{each:.3f}" for each in row.ratios),
            *(f"{each:.2f}" for each in row.slowdowns),
            str(row.failed),
        ]
        for row in rows
    ]
    return (
        f"{rows[0].cells} cells with at least {MIN_SESSIONS} whole sessions in every seed.\n\n"
        + _table(head, lines)
        + "\n\n*mean*, *p50*, *p90*: completion time of the sessions of which every turn is judged, from when the "
        "first turn was due to the end of the last, over the lowest of any policy in the cell; *slowdown*: completion "
        "time over that on an idle fleet; both geometric means over cells and seeds. *failed*: whole sessions with a "
        "failed turn, which have no time. In the order of the ranking, which does not take these figures into account."
    )


def _targets(verdicts: Sequence[CellStanding], subject: str) -> str:
    own = [verdict for verdict in verdicts if verdict.label == subject]
    found = rank(own)
    share_met = "met" if found.tied >= TARGET_SHARE else "**missed**"
    worst_met = "met" if found.worst <= TARGET_RATIO else "**missed**"
    lines = [
        f"- best or tied for best on both metrics in {100 * found.tied:.1f} % of {found.cells} cells "
        f"(target {100 * TARGET_SHARE:.0f} %): {share_met}",
        f"- furthest behind the best {100 * (found.worst - 1):.1f} % (target {100 * (TARGET_RATIO - 1):.0f} %), "
        f"in {found.worst_cell}: {worst_met}",
    ]
    behind = sorted(
        (each for each in own if each.worst > TARGET_RATIO), key=lambda verdict: (-verdict.worst, verdict.cell)
    )
    if behind:
        rows = [[str(each.cell), *(_interval(each, metric) for metric in METRICS)] for each in behind[:SHOWN_BEHIND]]
        more = f" (the worst {SHOWN_BEHIND} of {len(behind)})" if len(behind) > SHOWN_BEHIND else ""
        lines += ["", f"Cells more than 5 % behind{more}:", "", _table(["cell", *METRICS], rows)]
    return "\n".join(lines)


def _interval(verdict: CellStanding, metric: str) -> str:
    standing = verdict.metrics[metric]
    return f"{standing.ratio:.3f} [{standing.low:.3f}, {standing.high:.3f}]"


def _axis(
    verdicts: Sequence[CellStanding], order: Sequence[str], prefix: str, axis: Callable[[GridCell], object]
) -> str:
    found = by_axis(verdicts, axis)
    rows = [
        [
            f"`{label}`",
            *(
                f"{_percent(ranks[label].tied)} · {ranks[label].overall:.2f} · {ranks[label].worst:.2f}"
                if label in ranks
                else "–"
                for ranks in found.values()
            ),
        ]
        for label in order
    ]
    return "Best or tied on both metrics · mean ratio · worst ratio.\n\n" + _table(
        ["policy", *(f"{prefix}{value}" for value in found)], rows
    )


def _ablations(report: TournamentReport) -> list[Ablation]:
    if report.subject not in report.field:
        return []
    made = [
        ablation(report.ablation_figures, report.field, idea, label, report.subject)
        for idea, label in sorted(report.ideas.items())
    ]
    return [each for each in made if each is not None]


def _ablation_table(report: TournamentReport, ablations: Sequence[Ablation]) -> str:
    full = rank(in_place(report.ablation_figures, report.field, report.subject, report.subject))
    rows = [["none (as it is)", _percent(full.tied), f"{full.worst:.2f}", "1.000", "–", "1.000", "–"]]
    for each in sorted(ablations, key=lambda found: (found.rank.tied, -found.rank.overall, found.idea)):
        row = [each.idea, _percent(each.rank.tied), f"{each.rank.worst:.2f}"]
        for metric in METRICS:
            row += [f"{each.ratio[metric]:.3f}", f"{each.worse[metric]} / {each.better[metric]}"]
        rows.append(row)
    head = ["switched off", "best or tied", "worst", "TTFT p90", "worse / better", "E2E p50", "worse / better"]
    return (
        _played_with(report.ablation_figures)
        + _table(head, rows)
        + f"\n\nTimes over those of `{report.subject}`, geometric mean over cells, and the number of cells "
        f"where the subject without the idea is worse or better with its whole 95 % interval. *Best or tied* "
        f"and *worst* are the variant's standing among the other policies in `{report.subject}`'s place."
    )


def _played_with(figures: Sequence[CellFigures]) -> str:
    fleets = ", ".join(f"×{fleet}" for fleet in sorted({each.cell.fleet for each in figures}))
    seeds = ", ".join(str(seed) for seed in sorted({seed for each in figures for seed in each.seeds}))
    return f"{len(figures)} cells: fleets {fleets}; seeds {seeds}.\n\n"


def _folds(report: TournamentReport, families: Mapping[str, str]) -> str:
    variants = [report.subject, *report.ideas.values()]
    verdicts = {
        variant: found
        for variant in variants
        if (found := in_place(report.ablation_figures, report.field, variant, report.subject))
    }
    made: list[Fold] = folds(verdicts, families) if verdicts else []
    if not made:
        return "Needs results of at least two families."
    rows = [
        [
            each.family,
            f"`{each.chosen}`",
            _percent(each.elsewhere.tied),
            f"{each.elsewhere.worst:.2f}",
            _percent(each.held_out.tied),
            f"{each.held_out.worst:.2f}",
        ]
        for each in made
    ]
    head = ["held out", "chosen on the others", "there: best or tied", "worst", "here: best or tied", "worst"]
    return _played_with(report.ablation_figures) + _table(head, rows, left=2)
