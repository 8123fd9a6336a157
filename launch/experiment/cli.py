"""Commands ``experiment run``, ``plan``, ``status`` and ``verify``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from replayer.records.counted import counted

if TYPE_CHECKING:
    from launch.experiment.definition.file import LoadedExperiment
    from launch.experiment.definition.inputs import Inputs
    from launch.experiment.records.state import ExperimentState

RUNS = Path("runs")

Config = Annotated[
    Path,
    typer.Argument(
        metavar="EXPERIMENT.yaml",
        help="Experiment file, or the name of a shipped one such as aa-simulated.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the file (YAML value), such as backend.instances=16; repeat with --resume. Repeatable.",
        show_default=False,
    ),
]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of an experiment.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

app = typer.Typer(no_args_is_help=True, help="Compare policies by measured or simulated runs on fresh fleets.")


@app.command()
def run(
    config: Config,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the experiment. Default: runs/NAME-TIME.", show_default=False),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the experiment in --output (default: the newest runs/NAME-*); runs with "
            "intact records are kept.",
        ),
    ] = False,
    settings: Overrides = None,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Parallel simulated runs; live runs are made one by one.")
    ] = 1,
) -> None:
    """Run every arm as often as the file says, each on a fleet proved fresh, and compare them.

    The state is on disk after every run: an experiment that was stopped or killed continues with --resume. Ctrl-C and
    SIGTERM stop everything that was started. Exit status 0: all runs done; 1: some refused or failed; 2: the file or
    the directory cannot be used; 128 + signal: stopped.
    """
    from launch.experiment.definition.file import ExperimentError

    experiment = _load(config, settings)
    try:
        directory = output or (_newest(experiment.settings.name) if resume else _new(experiment.settings.name))
        code = _run(experiment, directory, resume, jobs)
    except ExperimentError as error:
        _stop(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(code)


@app.command()
def plan(config: Config, settings: Overrides = None, as_json: AsJson = False) -> None:
    """Print arms, order, seeds, offered load and expected time, after the checks of run; writes nothing."""
    import dataclasses

    import msgspec
    from rich.console import Console

    from launch.experiment.console import plan_table
    from launch.experiment.definition.file import ExperimentError
    from launch.experiment.definition.fleets import arm_fleets, clock_scale
    from launch.experiment.definition.inputs import checked_plan
    from launch.experiment.definition.lengths import too_long
    from launch.experiment.definition.order import plan_runs
    from launch.experiment.records import expected
    from replayer.replay.plan import describe
    from replayer.traces.trace import TraceError

    experiment = _load(config, settings)
    try:
        fleets = arm_fleets(experiment)
        sent = checked_plan(experiment, fleets)
        refused = too_long(experiment, fleets, sent)
    except (ExperimentError, TraceError) as error:
        _stop(error)
    offered = sent.offered
    slots = plan_runs(experiment.settings)
    scale = next((clock_scale(fleet) for fleet in fleets.values()), 1.0)
    least_s = expected.replay_s(experiment, offered, scale)
    if as_json:
        plan_of_runs = {
            "name": experiment.settings.name,
            "backend": experiment.settings.backend.kind,
            "baseline": experiment.settings.baseline_arm,
            "offered": msgspec.to_builtins(offered),
            "too_long": [dataclasses.asdict(one) for one in refused],
            "replay_least_s": least_s,
            "starts_at_most_s": expected.start_limit_s(experiment, fleets) if fleets else None,
            "runs": [
                {"order": one.order, "arm": one.arm, "repeat": one.repeat, "seed": one.seed, "path": one.path}
                for one in slots
            ],
            "config": experiment.config,
        }
        _print_json(plan_of_runs)
        return
    console = Console()
    console.print(plan_table(experiment.settings, slots))
    for name, value in describe(offered):
        console.print(f"{name}: {value}", markup=False, highlight=False, soft_wrap=True)
    for one in refused:
        console.print(
            f"warning: {one.requests:,} of {counted(offered.requests, 'request')} need more than {one.limit_tokens:,} "
            f"tokens, all that the engines of {', '.join(one.arms)} take, and will fail; give these a larger "
            "max_model_len and KV pool, or shorten prompts with trace.prompt_scale",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if least_s is None:
        requests = offered.requests * len(slots)
        time_expected = (
            f"expected time: {counted(requests, 'request')} to simulate, one process for each of "
            f"{counted(len(slots), 'run')}; `status` estimates it once some are done"
        )
    else:
        starts = expected.in_words(expected.start_limit_s(experiment, fleets))
        least = expected.in_words(least_s)
        time_expected = f"expected time: at least {least} of replaying, and at most {starts} of starting fleets"
    console.print(time_expected, markup=False, highlight=False, soft_wrap=True)


@app.command()
def status(directory: Directory, as_json: AsJson = False) -> None:
    """Show the progress of an experiment. Exit status 0: done; 3: not done."""
    import msgspec
    from rich.console import Console

    from launch.experiment.console import state_table
    from launch.experiment.definition.file import ExperimentError
    from launch.experiment.records import expected
    from launch.experiment.records.state import DONE, read_experiment

    try:
        state = read_experiment(directory)
    except ExperimentError as error:
        _stop(error)
    if as_json:
        _print_json({**msgspec.to_builtins(state), "alive": state.alive})
    else:
        console = Console()
        console.print(state_table(state, str(directory)))
        left_s = expected.left_s(state)
        progress = f"{len(state.done())} of {len(state.runs)} runs done"
        if state.left and left_s is not None:
            progress += f"; the others would take about {expected.in_words(left_s)} one by one"
        console.print(progress, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if state.state == DONE and not state.left else 3)


@app.command()
def verify(directory: Directory, as_json: AsJson = False) -> None:
    """Check a finished experiment: hashes, order, completeness, freshness.

    Every file is hashed again and every record read; no engine may have served two runs. Exit status 0: sound; 1: not.
    """
    import msgspec
    from rich.console import Console

    from launch.experiment.definition.file import ExperimentError
    from launch.experiment.verify import verify as check

    try:
        found = check(directory)
    except ExperimentError as error:
        _stop(error)
    if as_json:
        _print_json({"sound": found.sound, **msgspec.to_builtins(found)})
        raise typer.Exit(0 if found.sound else 1)
    console = Console(highlight=False)
    for problem in found.problems:
        console.print(f"problem: {problem}", style="red", markup=False, soft_wrap=True)
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    verdict = "sound" if found.sound else counted(len(found.problems), "problem")
    console.print(
        f"{directory}: {verdict} ({counted(found.runs, 'run')}, {counted(found.requests, 'request')}, "
        f"{counted(found.files, 'file')} hashed)",
        markup=False,
        soft_wrap=True,
    )
    raise typer.Exit(0 if found.sound else 1)


def _run(experiment: LoadedExperiment, directory: Path, resume: bool, jobs: int) -> int:
    from launch.experiment.definition.file import ExperimentError
    from launch.experiment.definition.sections import LiveBackend
    from launch.experiment.records.state import locked, read_experiment
    from launch.experiment.run.opening import not_begun, open_experiment, reopen_experiment, restore

    if jobs > 1 and isinstance(experiment.settings.backend, LiveBackend):
        raise ExperimentError("--jobs: live runs would disturb each other; leave it at 1")
    resume = resume and not not_begun(directory)
    if resume:
        read_experiment(directory)  # raises where there is none, before anything is created there
    else:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ExperimentError(f"{directory}: {error.strerror}; choose another --output") from error
    with locked(directory):
        state, inputs = (reopen_experiment if resume else open_experiment)(experiment, directory)
        for message in restore(experiment, directory, state, inputs) if resume else ():
            typer.echo(f"warning: {message}", err=True)
        return _measure(experiment, directory, state, inputs, jobs)


def _measure(experiment: LoadedExperiment, directory: Path, state: ExperimentState, inputs: Inputs, jobs: int) -> int:
    from rich.console import Console

    from launch.experiment.comparison import write_comparison
    from launch.experiment.console import ConsoleObserver
    from launch.experiment.definition.file import ExperimentError
    from launch.experiment.records.state import CUT_FOLDER, DAMAGED, DONE
    from launch.experiment.run.runner import Runner
    from launch.run.signals import run_until_signal
    from replayer.compare.tables import print_verdict
    from replayer.records.runs import RecordError

    console = Console(highlight=False)
    console.print(
        f"{len(state.left)} of {len(state.runs)} runs to make; records in {directory}", markup=False, soft_wrap=True
    )

    for run in state.left:
        if run.state == DAMAGED:
            console.print(
                f"warning: {run.name} is made again, its records move to {CUT_FOLDER}/: {'; '.join(run.reasons)}",
                style="yellow",
                markup=False,
                soft_wrap=True,
            )

    async def work() -> int:
        with ConsoleObserver(console) as observer:
            ended = await Runner(experiment, directory, state, inputs, observer, jobs).run()
        return 0 if ended.state == DONE and not ended.left else 1

    remedy = f"continue with: {experiment.resume_command(directory)}"
    try:
        code = run_until_signal(work())
    except ExperimentError as error:
        raise ExperimentError(f"{error}; once that is fixed, {remedy}") from error
    if code > 1:
        console.print(f"{state.state}; {remedy}", markup=False, soft_wrap=True)
        return code
    try:
        found, refusals = write_comparison(directory, state)
    except (RecordError, OSError) as error:
        typer.echo(f"error: the runs cannot be compared: {error}", err=True)
        return 1
    if found:
        print_verdict(console, found)
    for refusal in refusals:
        console.print(refusal, markup=False, soft_wrap=True)
    if len(state.arms) > 1:
        console.print(f"Details: warmroute compare {directory} --details", markup=False, soft_wrap=True)
    console.print(
        f"Write the report: warmroute report {directory} --output {directory / 'report.html'}",
        markup=False,
        soft_wrap=True,
    )
    return code


def _load(config: Path, overrides: list[str] | None) -> LoadedExperiment:
    from launch.experiment.definition.file import ExperimentError, load_experiment

    # Where a MODULE:Class is looked for last, as by `warmroute simulate`.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        return load_experiment(config, overrides or [])
    except ExperimentError as error:
        _stop(error)


def _new(name: str) -> Path:
    from launch.run.supervisor import new_run_dir

    return new_run_dir(name, RUNS)


def _newest(name: str) -> Path:
    from launch.experiment.definition.file import ExperimentError
    from launch.experiment.records.state import STATE_FILE

    found = sorted(RUNS.glob(f"{name}-[0-9]*/{STATE_FILE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ExperimentError(f"nothing to resume: no {RUNS}/{name}-*; give the experiment's directory with --output")
    return found[-1].parent


def _print_json(value: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def _stop(error: object) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2)


def register(root: typer.Typer) -> None:
    """Add ``experiment`` to an application."""
    root.add_typer(app, name="experiment")
