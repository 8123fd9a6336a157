"""The tournament's command line: simulate missing results, then write the tables."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.tournament.arena import Arena
from bench.tournament.entrants import Entrant, ablation_label, ablations, field_of
from bench.tournament.jobs import Done, jobs_of, play_all
from bench.tournament.judge import CellFigures
from bench.tournament.results import EntrantResult, GridCell, Store
from bench.tournament.settings import CONFIG, Grid, TournamentError, TournamentSettings, check_grid, read_settings
from bench.tournament.tables import BEGIN, END, Made, TournamentReport, markdown
from replayer.traces.trace import TraceError
from sim.hardware import ProfileError, load_profile

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT.parent / "shared" / "traces"
OUT = ROOT / "runs" / "tournament"
PAGE = ROOT / "docs" / "tournament.md"
_MADE = "made.json"

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    policies: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy: [LABEL=]NAME[+RULE][,key=value...], NAME registered or module:Class, RULE an admission "
            "rule. Repeat. Default: all policies, without holding."
        ),
    ] = None,
    traces: Annotated[str, typer.Option(help="Traces by name, with commas; empty: all.")] = "",
    loads: Annotated[str, typer.Option(help="Loads over saturation, with commas; empty: as configured.")] = "",
    pools: Annotated[str, typer.Option(help="KV pools over the hot set, with commas; empty: as configured.")] = "",
    fleets: Annotated[str, typer.Option(help="Numbers of instances, with commas; empty: as configured.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, one repeat each, with commas; empty: as configured.")] = "",
    with_ablations: Annotated[
        bool, typer.Option("--ablations", help="Also simulate the subject with each configured idea switched off.")
    ] = False,
    hand_offs: Annotated[
        bool,
        typer.Option(
            "--hand-offs", help="Play on instances that can hand over KV, with the subject and variants of `hand_offs`."
        ),
    ] = False,
    priority_scheduling: Annotated[
        bool,
        typer.Option(
            "--priority-scheduling",
            help="Play on engines that compute waiting prompts by priority; policies without an order set none.",
        ),
    ] = False,
    with_folds: Annotated[
        bool, typer.Option("--folds", help="Also choose among the subject's variants with each family held out.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    trace_dir: Annotated[
        Path, typer.Option(envvar="WARMROUTE_TRACES", help="Folder of traces.", show_default="../shared/traces")
    ] = TRACES,
    out: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of results; existing results are not simulated again.")
    ] = OUT,
    config: Annotated[Path, typer.Option(help="Settings.", show_default="configs/tournament.yaml")] = CONFIG,
    profile: Annotated[
        str, typer.Option(help="Hardware profile of the engines, by name or path; empty: as configured.")
    ] = "",
    table: Annotated[
        Path | None,
        typer.Option("--document", help="Write the tables between the markers of this file, e.g. docs/tournament.md."),
    ] = None,
    only_tables: Annotated[
        bool, typer.Option("--only-tables", help="Simulate nothing; make tables from existing results.")
    ] = False,
) -> None:
    """Rank routing policies over traces, loads, KV pools and fleet sizes, simulated in virtual time.

    Results are kept in --output, one small file for each cell, seed and policy; an interrupted run resumes where it
    stopped. The tables are computed from them and printed, or written with --document.
    """
    console = Console(stderr=True)
    try:
        settings = read_settings(config)
        if profile:
            load_profile(profile)
            settings = msgspec.structs.replace(settings, profile=profile)
        if hand_offs:
            settings = settings.with_hand_offs()
        if priority_scheduling:
            settings = msgspec.structs.replace(settings, priority_scheduling=True)
        grid = _grid(settings.grid, loads, pools, fleets, seeds)
        settings = msgspec.structs.replace(settings, grid=grid)
        entrants = field_of(policies or [], settings.left_out)
        variants = ablations(settings) if with_ablations else []
        ablation_grid = settings.ablation_grid() if variants else grid
        store = Store(out)
        if only_tables:
            kept = sorted(store.read_facts())
            if not kept:
                raise TournamentError(f"no results in {out}; run without --only-tables to simulate them")
            names = _chosen(traces, kept)
        else:
            names = _play(settings, settings.grid, trace_dir, traces, out, entrants, jobs, console)
            if variants:
                _play(settings, ablation_grid, trace_dir, traces, out, variants, jobs, console)
            made = Made(
                command=_command(policies, traces, grid, settings, with_ablations, with_folds), versions=_versions()
            )
            (out / _MADE).write_bytes(msgspec.json.encode(made))
        report = _report(store, settings, names, entrants, variants, with_folds)
        _show(markdown(report), table, console)
    except (TournamentError, TraceError, ProfileError) as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise TournamentError(f"--{option} {text!r}: give numbers separated by commas") from error


def _grid(base: Grid, loads: str, pools: str, fleets: str, seeds: str) -> Grid:
    fleet_sizes, repeats = _numbers(fleets, "fleets"), _numbers(seeds, "seeds")
    if any(value != int(value) for value in (*fleet_sizes, *repeats)):
        raise TournamentError("--fleets and --seeds must be whole numbers")
    grid = Grid(
        loads=tuple(sorted(_numbers(loads, "loads") or base.loads)),
        pools=tuple(sorted(_numbers(pools, "pools") or base.pools)),
        fleets=tuple(sorted(int(value) for value in fleet_sizes or base.fleets)),
        seeds=tuple(sorted(int(value) for value in repeats or base.seeds)),
    )
    check_grid(grid)
    return grid


def _chosen(given: str, known: Sequence[str]) -> list[str]:
    chosen = [name.strip() for name in given.split(",") if name.strip()] or list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise TournamentError(f"no trace {', '.join(unknown) or 'at all'}; known: {', '.join(known) or 'none'}")
    return sorted(set(chosen))


def _play(
    settings: TournamentSettings,
    grid: Grid,
    folder: Path,
    traces: str,
    out: Path,
    entrants: list[Entrant],
    processes: int,
    console: Console,
) -> list[str]:
    arena = Arena(settings, folder)
    names = _chosen(traces, sorted(arena.grounds))
    jobs = jobs_of(grid, names)
    spent: dict[int, list[Done]] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{len(jobs)} cells x seeds, {len(entrants)} policies", total=len(jobs))

        def on_done(done: Done) -> None:
            spent.setdefault(done.job.cell.fleet, []).append(done)
            progress.advance(task)
            count = sum(map(len, spent.values()))
            if not console.is_terminal and (count % 50 == 0 or count == len(jobs)):
                console.print(f"{count} of {len(jobs)} cells x seeds", highlight=False)

        play_all(jobs, settings, folder, out, entrants, processes, on_done)
    _print_cost(spent, console)
    return names


def _print_cost(spent: dict[int, list[Done]], console: Console) -> None:
    for fleet, found in sorted(spent.items()):
        played = sum(done.played for done in found)
        cpu_s = sum(done.cpu_s for done in found)
        requests = sum(done.played * done.requests for done in found)
        rate = f", {requests / cpu_s:,.0f} requests/s" if played and cpu_s else ""
        console.print(
            f"x{fleet}: {played} simulations run, {sum(done.kept for done in found)} kept, "
            f"{cpu_s:,.0f} CPU seconds{rate}",
            highlight=False,
        )


def _report(
    store: Store,
    settings: TournamentSettings,
    names: list[str],
    entrants: list[Entrant],
    variants: list[Entrant],
    folds: bool,
) -> TournamentReport:
    field = [entrant.label for entrant in entrants]
    found = _kept(store, settings.grid, names, field)
    with_variants = found
    if variants:
        labels = [*field, *(entrant.label for entrant in variants)]
        with_variants = _kept(store, settings.ablation_grid(), names, labels)
    try:
        made = msgspec.json.decode((store.folder / _MADE).read_bytes(), type=Made)
    except OSError as error:
        raise TournamentError(f"cannot read {store.folder / _MADE}: run without --only-tables once") from error
    return TournamentReport(
        made=made,
        facts=store.read_facts(),
        figures=[CellFigures(cell, results) for cell, results in found.items()],
        field=field,
        subject=settings.subject,
        ideas={idea: ablation_label(settings, idea) for idea in settings.ablations} if variants else {},
        ablation_figures=[CellFigures(cell, results) for cell, results in with_variants.items()],
        with_folds=folds,
    )


def _kept(store: Store, grid: Grid, names: list[str], labels: list[str]) -> dict[GridCell, list[EntrantResult]]:
    """The results of every cell: complete, and all made by the same simulator version."""
    found: dict[GridCell, list[EntrantResult]] = {}
    missing: list[str] = []
    for trace, load, pool, fleet in product(names, grid.loads, grid.pools, grid.fleets):
        cell = GridCell(trace=trace, load=load, pool=pool, fleet=fleet)
        for label, seed in product(labels, grid.seeds):
            result = store.read(cell, seed, label)
            if result is None:
                missing.append(f"{cell}, seed {seed}, {label}")
            else:
                found.setdefault(cell, []).append(result)
    if missing:
        raise TournamentError(
            f"{len(missing)} results are missing, the first: {missing[0]}; run without --only-tables to simulate them"
        )
    if len({result.sources for results in found.values() for result in results}) > 1:
        raise TournamentError(
            f"the results in {store.folder} were made by different versions of the simulator; "
            "run without --only-tables to simulate the older ones again"
        )
    return found


def _show(text: str, table: Path | None, console: Console) -> None:
    if table is None:
        sys.stdout.write(text)
        return
    page = table.read_text(encoding="utf-8") if table.exists() else f"{BEGIN}\n{END}\n"
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise TournamentError(f"{table} must have the lines {BEGIN} and {END} once each")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    table.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
    console.print(f"tables written to {table}", highlight=False)


def _command(
    policies: list[str] | None,
    traces: str,
    grid: Grid,
    settings: TournamentSettings,
    with_ablations: bool,
    with_folds: bool,
) -> str:
    words = ["python -m bench.tournament"]
    for text in policies or []:
        words.append(f"--policies {text}")
    if traces:
        words.append(f"--traces {traces}")
    default = Grid()
    for name in ("loads", "pools", "fleets", "seeds"):
        if getattr(grid, name) != getattr(default, name):
            words.append(f"--{name} {','.join(f'{value:g}' for value in getattr(grid, name))}")
    if settings.profile != TournamentSettings().profile:
        words.append(f"--profile {settings.profile}")
    words += ["--hand-offs"] * bool(settings.transport) + ["--priority-scheduling"] * settings.priority_scheduling
    words += ["--ablations"] * with_ablations + ["--folds"] * with_folds
    return " ".join(words)


def _versions() -> dict[str, str]:
    try:
        own = version("warmroute")
    except PackageNotFoundError:
        own = "from source"
    return {"warmroute": own, "Python": platform.python_version(), "numpy": version("numpy")}
