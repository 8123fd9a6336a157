"""Command ``compare``: the matrix of verdicts, its details, or everything as JSON."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from replayer.compare.assumptions import ASSUMED_FLOOR
from replayer.compare.goodput import SloTokens
from replayer.records.classes import PlannedClass
from replayer.traces.numbers import finite

if TYPE_CHECKING:
    from replayer.compare.arms import ArmRuns
    from replayer.compare.comparison import Comparison, KeptSettings
    from replayer.compare.goodput import Slo
    from replayer.traces.trace import Trace

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Run files, one for each arm, the baseline first; or the folder of one experiment.",
        show_default=False,
    ),
]
ArmOption = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        help="NAME=RUN.jsonl,RUN.jsonl,...: an arm of several runs. Repeatable; the first is the baseline.",
        show_default=False,
    ),
]
SameOption = Annotated[
    list[str] | None,
    typer.Option(
        "--aa",
        help="RUN.jsonl,RUN.jsonl,...: A/A runs, which measure how much runs differ by chance. Repeatable.",
        show_default=False,
    ),
]
Baseline = Annotated[str, typer.Option(help="Arm that the others are compared with. Default: the first.")]
Resamples = Annotated[int, typer.Option(min=1000, help="Bootstrap resamples of sessions.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the resamples.")]
SkipFirst = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Leave out the plan's first engine seconds; automatic: until a tenth of the prompt tokens is due.",
        show_default="automatic",
        callback=finite,
    ),
]
SkipLast = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Leave out the plan's last engine seconds; automatic: after the last arrival, at most 10 % of requests.",
        show_default="automatic",
        callback=finite,
    ),
]
KeepAll = Annotated[bool, typer.Option("--keep-all", help="Leave nothing out at the start or the end.")]


class ComparedClass(StrEnum):
    """Requests to compare: one class by new tokens in the trace, or all."""

    ALL = "ALL"
    WARM = PlannedClass.WARM.value
    MEDIUM = PlannedClass.MEDIUM.value
    HEAVY = PlannedClass.HEAVY.value

    @property
    def only(self) -> PlannedClass | None:
        """The class; None for all."""
        return None if self is ComparedClass.ALL else PlannedClass(self.value)


OnlyClass = Annotated[
    ComparedClass,
    typer.Option(
        "--class",
        case_sensitive=False,
        help="Compare one class of requests only, by new tokens in the trace: WARM < 5,000 ≤ MEDIUM < 20,000 ≤ HEAVY.",
    ),
]
Clock = Annotated[str, typer.Option(help="Start of TTFT and E2E: when the request was sent, or when it was scheduled.")]
SloTtft = Annotated[
    float | None,
    typer.Option(
        "--slo-ttft-s", help="Objective for goodput: longest TTFT, seconds.", show_default="none", callback=finite
    ),
]
SloTpot = Annotated[
    float | None,
    typer.Option(
        "--slo-tpot-s", help="Objective for goodput: longest TPOT, seconds.", show_default="none", callback=finite
    ),
]
SloE2e = Annotated[
    float | None,
    typer.Option(
        "--slo-e2e-s", help="Objective for goodput: longest E2E, seconds.", show_default="none", callback=finite
    ),
]
SloBase = Annotated[
    float | None,
    typer.Option(
        "--slo-ttft-base-s",
        help="Length-scaled TTFT objective: base of base + slope x tokens, seconds.",
        show_default="none; 0 with a slope",
        callback=finite,
    ),
]
SloSlope = Annotated[
    float | None,
    typer.Option(
        "--slo-ttft-per-1k-tokens-s",
        help="Length-scaled TTFT objective: slope, seconds per 1,000 tokens.",
        show_default="none; 0 with a base",
        callback=finite,
    ),
]
SloOf = Annotated[
    SloTokens,
    typer.Option(
        "--slo-tokens",
        help="Tokens of the length-scaled objective: the whole prompt, or those new since the turn before.",
    ),
]
AssumedFloor = Annotated[
    float,
    typer.Option(
        min=0,
        help="Without repeats and --aa: fraction by which 95 % of A/A runs are assumed to differ at most.",
        callback=finite,
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Replayed trace, to check cache hits by request. Default: the experiment's own, else none.",
        show_default=False,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Compare anyway, and print the reasons against it: other trace or load, warm fleet, missing runs.",
    ),
]
Details = Annotated[
    bool,
    typer.Option("--details", help="Print every metric with values, p-value and noise floor, and the notes."),
]


def compare_command(
    context: typer.Context,
    runs: Runs = None,
    arm: ArmOption = None,
    aa: SameOption = None,
    baseline: Baseline = "",
    resamples: Resamples = 2000,
    seed: Seed = 0,
    skip_first_s: SkipFirst = None,
    skip_last_s: SkipLast = None,
    keep_all: KeepAll = False,
    only_class: OnlyClass = ComparedClass.ALL,
    clock: Clock = "sent",
    slo_ttft_s: SloTtft = None,
    slo_tpot_s: SloTpot = None,
    slo_e2e_s: SloE2e = None,
    slo_ttft_base_s: SloBase = None,
    slo_ttft_per_1k_tokens_s: SloSlope = None,
    slo_tokens: SloOf = SloTokens.PROMPT,
    assumed_noise: AssumedFloor = ASSUMED_FLOOR,
    trace: TraceFile = None,
    force: Force = False,
    details: Details = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare runs of one trace, paired by request, with 95 % intervals.

    Intervals are from a bootstrap over sessions and repeats. Requests are paired by (session_id, turn, chat_id). Times
    are compared over requests that succeeded in every run of both arms. The cold start and the drain at the end of the
    plan are left out of all arms by one rule. A metric is called better or worse when its p-value, corrected by Holm
    over all metrics of all candidates, is below 0.05 and the change is not below the noise floor. An arm that was
    measured on a warm fleet is refused. For an experiment's folder, the settings under `comparison` in its file are the
    defaults; options override them.
    """
    from replayer.compare.comparison import CompareOptions
    from replayer.compare.conditions import ComparisonError
    from replayer.compare.goodput import Slo

    if keep_all and (skip_first_s is not None or skip_last_s is not None):
        _stop("--keep-all leaves nothing out: give it without --skip-first-s and --skip-last-s")
    arms, same, found_trace, notes, settings = _read(runs or [], arm or [], aa or [], trace, force=force)
    if baseline:
        if baseline not in (names := [one.label for one in arms]):
            _stop(f"--baseline {baseline}: there is no such arm; there are {', '.join(names)}")
        arms.sort(key=lambda one: one.label != baseline)
    options = CompareOptions(
        resamples=resamples,
        seed=seed,
        force=force,
        skip_first_s=0.0 if keep_all else skip_first_s,
        skip_last_s=0.0 if keep_all else skip_last_s,
        clock=clock,
        slo=Slo(slo_ttft_s, slo_tpot_s, slo_e2e_s, slo_ttft_base_s, slo_ttft_per_1k_tokens_s, slo_tokens),
        assumed_floor=assumed_noise,
        only_class=only_class.only,
        trace=found_trace,
    )
    applied = ""
    if settings is not None:
        given = given_options(context)
        options, applied = settings.applied(options, given), settings.describe(given)
    if "slo_tokens" in given_options(context) and not options.slo.scaled:
        _stop(
            "--slo-tokens is for the length-scaled objective: give --slo-ttft-base-s or --slo-ttft-per-1k-tokens-s too"
        )
    from replayer.compare.runs import compare_arms

    try:
        comparisons = compare_arms(arms, options, same=same)
    except ComparisonError as error:
        _stop(str(error))
    if as_json:
        rows = [
            {**found.as_json(), "notes": [*notes, *([applied] if applied else []), *found.notes]}
            for found in comparisons
        ]
        sys.stdout.write(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
        return
    _print(comparisons, notes, applied, options.slo, details=details)


def given_options(context: typer.Context) -> set[str]:
    """Names of the options of a comparison that were given: they override an experiment's settings."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    # By name: recent versions of Typer have an enumeration of their own instead of Click's.
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    return given | {"skip_first_s", "skip_last_s"} if "keep_all" in given else given


def _read(
    runs: list[Path], specs: list[str], same: list[str], trace: Path | None, *, force: bool
) -> tuple[list[ArmRuns], list[ArmRuns], Trace | None, list[str], KeptSettings | None]:
    """Arms, A/A groups, trace, notes, an experiment's settings; an unreadable input ends the command, status 2."""
    from replayer.compare.arms import ArmFilesError, read_arm, read_arms
    from replayer.records.runs import RecordError
    from replayer.traces.loading import load_replayed
    from replayer.traces.trace import TraceError

    notes: list[str] = []
    settings: KeptSettings | None = None
    try:
        arms, experiment = read_arms(runs, specs, force=force)
        if experiment is not None:
            notes, settings = experiment.notes, experiment.settings
            trace = trace or (experiment.trace if experiment.trace and experiment.trace.exists() else None)
        groups = [
            read_arm(f"A/A {number}", [Path(one) for one in spec.split(",")]) for number, spec in enumerate(same, 1)
        ]
        for group in groups:
            if len(group.runs) < 2:
                _stop("--aa needs at least two replicates: --aa RUN.jsonl,RUN.jsonl[,...]")
        if len(arms) == 1 and settings is not None:
            only = "only one arm of the experiment has finished runs" if notes else "the experiment has one arm"
            _stop(f"{runs[0]}: {only}, {arms[0].label}, and compare needs two; `warmroute report` shows one")
        if len(arms) < 2:
            _stop(
                "compare needs two arms: BASELINE.jsonl CANDIDATE.jsonl [...], --arm twice, or an experiment's folder"
            )
        loaded = None if trace is None else load_replayed(trace, arms[0].runs[0].run.header.options)
        return arms, groups, loaded, notes, settings
    except (ArmFilesError, RecordError, TraceError) as error:
        _stop(str(error))
    except OSError as error:
        _stop(f"{error.filename or ''}: {error.strerror}")


def _print(comparisons: list[Comparison], notes: list[str], applied: str, slo: Slo, *, details: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from replayer.compare.tables import goodput_lines, print_details, print_verdict

    console = Console(highlight=False)
    for note in notes:
        console.print(Text(note), style="red")
    print_verdict(console, comparisons)
    for found in comparisons:
        for line in goodput_lines(found, slo):
            console.print(Text(line))
    if applied:
        console.print(Text(applied), style="dim")
    console.print()
    if details:
        print_details(console, comparisons)
    else:
        console.print("Every metric, p-values, noise floor and fine print: --details, or --json.", style="dim")


def _stop(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)
