"""Commands ``compare`` and ``report``: verdicts in the terminal, and the HTML page."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from replayer.compare import Comparison
    from replayer.report import Arm, ArmSummary
    from replayer.summary import Quantiles

Runs = Annotated[
    list[Path],
    typer.Argument(help="Run files written by `warmroute replay`; the first is the baseline.", show_default=False),
]
Resamples = Annotated[int, typer.Option(min=1000, help="Bootstrap resamples of sessions.")]
Seed = Annotated[int, typer.Option(help="Seed of the resamples.")]
SkipFirst = Annotated[
    float,
    typer.Option(min=0, help="Leave out, in both arms, pairs scheduled in the first engine seconds. 0 keeps all."),
]
Clock = Annotated[
    str, typer.Option(help="Where TTFT and E2E start: 'sent' (the client sent it) or 'scheduled' (the plan wanted it).")
]
Force = Annotated[
    bool, typer.Option("--force", help="Compare runs of different traces, scales or limits all the same.")
]


def compare_command(
    runs: Runs,
    resamples: Resamples = 2000,
    seed: Seed = 0,
    skip_first_s: SkipFirst = 0.0,
    clock: Clock = "sent",
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare runs of one trace, paired by request, with 95 % intervals by bootstrap over sessions.

    Requests are paired by (session_id, turn, chat_id). Times are compared over pairs that succeeded in both runs;
    nothing else is left out unless --skip-first-s says so. A metric is called better or worse when its p-value,
    corrected by Holm over all metrics of the pair, is below 0.05.
    """
    from rich.console import Console
    from rich.markup import escape

    from replayer.compare import ComparisonError, compare

    arms = load_arms(runs)
    if len(arms) < 2:
        _stop("compare needs at least two run files: BASELINE.jsonl CANDIDATE.jsonl [...]")
    comparisons = []
    for arm in arms[1:]:
        try:
            found = compare(
                arms[0].run,
                arm.run,
                resamples=resamples,
                seed=seed,
                force=force,
                skip_first_s=skip_first_s,
                clock=clock,
                labels=(arms[0].label, arm.label),
            )
        except ComparisonError as error:
            _stop(str(error))
        comparisons.append(found)
    if as_json:
        sys.stdout.write(json.dumps([found.as_json() for found in comparisons], indent=2, ensure_ascii=False) + "\n")
        return
    console = Console()
    for found in comparisons:
        console.print(effects_table(found))
        for note in found.notes:
            console.print(f"[dim]{escape(note)}[/dim]")
        console.print(escape(found.sentence), style="bold")
        console.print()


def report_command(
    runs: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
    breakdown: Annotated[
        list[str] | None,
        typer.Option(help="ARM=FILE: the proxy's /breakdown as JSONL for the arm of that label. May be repeated."),
    ] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Replay report",
    resamples: Resamples = 2000,
    seed: Seed = 0,
    skip_first_s: SkipFirst = 0.0,
    clock: Clock = "sent",
    force: Force = False,
) -> None:
    """Write one self-contained HTML page about one or more runs: tables, verdicts, figures, conditions.

    The page refers to nothing outside itself and can be printed. Runs that must not be compared (other trace, scale or
    limit) are shown side by side without a verdict, and the page says why.
    """
    from replayer.report import BreakdownError, against_leader, compare_all, read_breakdown, render, write_report

    arms = load_arms(runs)
    by_label = {arm.label: position for position, arm in enumerate(arms)}
    for given in breakdown or []:
        label, separator, file = given.rpartition("=")
        if not separator or label not in by_label:
            _stop(f"--breakdown {given}: expected ARM=FILE with ARM one of {', '.join(by_label)}")
        try:
            rows = read_breakdown(file)
        except (OSError, BreakdownError) as error:
            _stop(f"--breakdown {given}: {error}")
        position = by_label[label]
        arms[position] = type(arms[position])(label, arms[position].run, rows)
    comparisons, refusals = compare_all(
        arms, resamples=resamples, seed=seed, skip_first_s=skip_first_s, clock=clock, force=force
    )
    among_the_best = against_leader(
        arms, resamples=resamples, seed=seed, skip_first_s=skip_first_s, clock=clock, force=force
    )
    try:
        page = render(arms, comparisons, title=title, remarks=refusals, among_the_best=among_the_best)
        write_report(output, page)
    except OSError as error:
        _stop(f"cannot write {output}: {error.strerror}")
    for found in comparisons:
        typer.echo(found.sentence)
    for refusal in refusals:
        typer.echo(refusal, err=True)
    typer.echo(f"report: {output}")


def load_arms(paths: Sequence[Path]) -> list[Arm]:
    """Read run files; a file that cannot be read ends the command with its error and status 2."""
    from replayer.records import RecordError, read_run
    from replayer.report import Arm, unique_labels

    runs = []
    for path in paths:
        try:
            runs.append(read_run(path))
        except RecordError as error:
            _stop(str(error))
        except OSError as error:
            _stop(f"{path}: {error.strerror}")
        if not runs[-1].records:
            _stop(f"{path}: holds no request; replay again")
    return [Arm(label, run) for label, run in zip(unique_labels(runs), runs, strict=True)]


def effects_table(comparison: Comparison) -> Table:
    """One comparison as a Rich table."""
    from rich.markup import escape
    from rich.table import Table

    from replayer.report import format_percent, format_seconds

    title = f"{comparison.candidate_label} against {comparison.baseline_label}"
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("metric", no_wrap=True)
    for name in (comparison.baseline_label, comparison.candidate_label):
        table.add_column(escape(name), justify="right", overflow="fold")
    table.add_column("change (95 % interval)", justify="right", no_wrap=True)
    table.add_column("p, Holm", justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    colours = {"better": "green", "worse": "red"}
    for effect in comparison.effects:
        show = format_seconds if effect.unit == "s" else format_percent
        interval = "" if effect.note else f" ({effect.low * 100:+.1f} … {effect.high * 100:+.1f})"
        table.add_row(
            effect.metric,
            show(effect.baseline),
            show(effect.candidate),
            f"{format_percent(effect.change)}{interval}",
            "–" if effect.note else f"{effect.p_adjusted:.4f}",
            escape(
                f"not judged: {effect.note}"
                if effect.note
                else effect.verdict.value
                if effect.verdict.value in colours
                else "≈"
            ),
            style=colours.get(effect.verdict.value, ""),
        )
    pairing = comparison.pairing
    table.caption = (
        f"{pairing.both_ok} of {len(pairing.keys)} pairs OK in both, {comparison.sessions} sessions; "
        "≈ not distinguishable"
    )
    return table


def arms_table(summaries: Sequence[ArmSummary], *, title: str = "Arms") -> Table:
    """The arms side by side as a Rich table; times in engine seconds."""
    from rich.markup import escape
    from rich.table import Table

    from replayer.report import format_percent

    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("arm", overflow="fold")
    for column in ("OK/N", "TTFT s", "TPOT ms", "E2E s"):
        table.add_column(f"{column}\np50/p90/p99" if column != "OK/N" else column, justify="right", no_wrap=True)
    table.add_column("APC", justify="right", no_wrap=True)
    for found in summaries:
        total = found.summary.total
        table.add_row(
            escape(found.label),
            f"{total.ok}/{total.requests}",
            _three(total.ttft_s),
            _three(total.tpot_s, 1000),
            _three(total.e2e_s),
            format_percent(found.summary.apc),
        )
    return table


def _three(quantiles: Quantiles, factor: float = 1.0) -> str:
    """p50/p90/p99 with three digits each."""
    values = (quantiles.p50, quantiles.p90, quantiles.p99)
    return "/".join("–" if value is None else _digits(value * factor) for value in values)


def _digits(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _stop(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def register(app: typer.Typer) -> None:
    """Add ``compare`` and ``report`` to an application."""
    app.command("compare")(compare_command)
    app.command("report")(report_command)
