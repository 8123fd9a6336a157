"""Command ``report``: one HTML page, and its figures as files. ``compare`` is in `replayer.compare.cli`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from replayer.compare.assumptions import ASSUMED_FLOOR
from replayer.compare.cli import (
    ArmOption,
    AssumedFloor,
    Baseline,
    Clock,
    ComparedClass,
    Force,
    KeepAll,
    OnlyClass,
    Resamples,
    Runs,
    SameOption,
    Seed,
    SkipFirst,
    SkipLast,
    given_options,
)
from replayer.records.counted import counted

if TYPE_CHECKING:
    from replayer.compare.arms import ArmRuns
    from replayer.report.inputs import ReportInputs
    from replayer.report.page import Arm


def report_command(
    context: typer.Context,
    runs: Runs = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None,
        typer.Option(
            help="Also write every figure to this folder, as PNG and SVG.", show_default="figures only in the page"
        ),
    ] = None,
    arm: ArmOption = None,
    aa: SameOption = None,
    baseline: Baseline = "",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replayed trace, for the hit-rate anatomy.",
            show_default="the experiment's own, else no anatomy",
        ),
    ] = None,
    pool_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="KV pool of one instance in tokens, for the anatomy's finite caches.",
            show_default="as the runs report",
        ),
    ] = None,
    breakdown: Annotated[
        list[str] | None,
        typer.Option(
            help="ARM=FILE: the proxy's /breakdown rows (JSONL) of an arm's first run. Repeatable.",
            show_default="breakdown.jsonl beside the run",
        ),
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Session whose timeline is drawn.", show_default="the longest")
    ] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Replay report",
    resamples: Resamples = 2000,
    seed: Seed = 0,
    skip_first_s: SkipFirst = None,
    skip_last_s: SkipLast = None,
    keep_all: KeepAll = False,
    only_class: OnlyClass = ComparedClass.ALL,
    clock: Clock = "sent",
    assumed_noise: AssumedFloor = ASSUMED_FLOOR,
    force: Force = False,
) -> None:
    """Write one self-contained HTML page about one or more runs.

    It has verdicts, tables, figures and conditions.
    Takes run files of `warmroute replay` and `warmroute simulate`, or the directory of an experiment. The page refers
    to nothing outside itself and can be printed. Runs that must not be compared (other trace, scale or limit, a warm
    fleet) are shown side by side without a verdict, and the page says why. For an experiment's folder, the settings
    under `comparison` in its file are the defaults; options override them.
    """
    from rich.console import Console
    from rich.text import Text

    from replayer.compare.comparison import CompareOptions
    from replayer.compare.tables import print_verdict
    from replayer.records.outputs import not_written
    from replayer.report.figures.style import save_all
    from replayer.report.page import BreakdownError, Extras, against_leader, compare_all, make_page, write_report

    if keep_all and (skip_first_s is not None or skip_last_s is not None):
        _stop("--keep-all leaves nothing out: give it without --skip-first-s and --skip-last-s")
    found = _read(runs or [], arm or [], trace)
    _refuse_overwriting(output, [*found.files, *_files(aa or [], breakdown or [])])
    arms = _with_breakdowns(_baseline_first(found.arms, baseline), breakdown or [])
    why = found.why_no_trace or Extras().why_no_trace
    extras = Extras(found.trace, why, pool_tokens, session, found.environment, found.notes)
    options = CompareOptions(
        resamples=resamples,
        seed=seed,
        force=force,
        skip_first_s=0.0 if keep_all else skip_first_s,
        skip_last_s=0.0 if keep_all else skip_last_s,
        clock=clock,
        assumed_floor=assumed_noise,
        only_class=only_class.only,
        trace=extras.trace,
    )
    applied = ""
    if found.settings is not None:
        given = given_options(context)
        options, applied = found.settings.applied(options, given), found.settings.describe(given)
        extras = replace(extras, notes=[*extras.notes, *([applied] if applied else [])])
    try:
        same = _same(aa or [])
        comparisons, refusals = compare_all(arms, options, same=same)
        # Each arm's hits have just been checked against the trace.
        among_the_best = against_leader(arms, options if refusals else replace(options, trace=None), same=same)
        page = make_page(arms, comparisons, title=title, remarks=refusals, among_the_best=among_the_best, extras=extras)
    except BreakdownError as error:
        _stop(str(error))
    except KeyError as error:
        _stop(f"--session {error.args[0]}: no run has a session of that id")
    try:
        write_report(output, page.html)
    except OSError as error:
        _stop(not_written(error, output))
    try:
        drawn = save_all(page.drawings, figures) if figures is not None else []
    except OSError as error:
        _stop(not_written(error, figures or output, "--figures"))
    console = Console(highlight=False)
    for note in found.notes:
        console.print(Text(note), style="red")
    if comparisons:
        print_verdict(console, comparisons, among_the_best)
    if applied:
        console.print(Text(applied), style="dim")
    for refusal in refusals:
        typer.echo(refusal, err=True)
    if drawn:
        console.print(Text(f"{counted(len(drawn), 'file')} of figures: {figures}"), soft_wrap=True)
    console.print(Text(f"Open the report: {output}"), soft_wrap=True)


def _read(runs: Sequence[Path], specs: Sequence[str], trace: Path | None) -> ReportInputs:
    """The runs with what belongs to them; an unreadable input ends the command with status 2."""
    from replayer.compare.arms import ArmFilesError
    from replayer.records.runs import RecordError
    from replayer.report.inputs import ReportError, read_inputs
    from replayer.report.page import BreakdownError
    from replayer.traces.trace import TraceError

    try:
        return read_inputs(runs, specs, trace)
    except (ArmFilesError, RecordError, TraceError, ReportError, BreakdownError) as error:
        _stop(str(error))
    except OSError as error:
        _stop(f"{error.filename or ''}: {error.strerror}")


def _files(same: Sequence[str], breakdown: Sequence[str]) -> list[Path]:
    """Files that --aa and --breakdown name."""
    return [
        *(Path(one) for spec in same for one in spec.split(",")),
        *(Path(spec.rpartition("=")[2]) for spec in breakdown),
    ]


def _refuse_overwriting(output: Path, files: Sequence[Path]) -> None:
    """End the command if the output is an input, or a file other than an earlier report."""
    from replayer.records.outputs import (
        ExistingOutputError,
        OverwritesInputError,
        not_written,
        refuse_inputs,
        refuse_other_than_report,
    )

    try:
        refuse_inputs(output, files)
        refuse_other_than_report(output)
    except (OverwritesInputError, ExistingOutputError) as error:
        _stop(str(error))
    except OSError as error:
        _stop(not_written(error, output))


def _same(specs: Sequence[str]) -> list[ArmRuns]:
    """A/A groups, each of replicates."""
    from replayer.compare.arms import ArmFilesError, read_arm
    from replayer.records.runs import RecordError

    try:
        groups = [
            read_arm(f"A/A {number}", [Path(one) for one in spec.split(",")]) for number, spec in enumerate(specs, 1)
        ]
    except (ArmFilesError, RecordError) as error:
        _stop(str(error))
    except OSError as error:
        _stop(f"{error.filename or ''}: {error.strerror}")
    if any(len(group.runs) < 2 for group in groups):
        _stop("--aa needs at least two replicates: --aa RUN.jsonl,RUN.jsonl[,...]")
    return groups


def _baseline_first(arms: list[Arm], baseline: str) -> list[Arm]:
    if not baseline:
        return arms
    if baseline not in (names := [one.label for one in arms]):
        _stop(f"--baseline {baseline}: there is no such arm; there are {', '.join(names)}")
    return sorted(arms, key=lambda one: one.label != baseline)


def _with_breakdowns(arms: list[Arm], given: Sequence[str]) -> list[Arm]:
    """The arms with rows from ARM=FILE; rows that are not of the run are reported, or refused if none is."""
    from replayer.records.breakdown_rows import BreakdownError, read_rows
    from replayer.report.inputs import ReportError, with_rows

    by_label = {one.label: position for position, one in enumerate(arms)}
    for spec in given:
        label, separator, file = spec.rpartition("=")
        if not separator or label not in by_label:
            _stop(f"--breakdown {spec}: expected ARM=FILE with ARM one of {', '.join(by_label)}")
        before = arms[by_label[label]]
        try:
            arms[by_label[label]] = found = with_rows(before, read_rows(file), file)
        except (OSError, BreakdownError, ReportError) as error:
            _stop(f"--breakdown {spec}: {error}")
        for warning in found.warnings[len(before.warnings) :]:
            typer.echo(f"{label}: {warning}", err=True)
    return arms


def _stop(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def register(app: typer.Typer) -> None:
    """Add ``compare`` and ``report`` to an application."""
    from replayer.compare.cli import compare_command

    app.command("compare")(compare_command)
    app.command("report")(report_command)
