"""Commands ``up``, ``down``, ``status`` and ``demo``."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from launch.fleet import FleetFile
    from launch.state import FleetState

RUNS = Path("runs")
_SETTLE_S = 0.1
_DOWN_MARGIN_S = 10.0

RunDir = Annotated[
    Path | None,
    typer.Option(help="Run directory of the fleet; default: the only one under runs/ in which something runs."),
]


def up(
    fleet_file: Annotated[
        Path, typer.Argument(metavar="FLEET.yaml", help="Fleet file, or the name of a shipped one such as sim-4x.")
    ],
    run_dir: Annotated[
        Path | None, typer.Option(help="Where logs, settings and state.json go. Default: runs/FLEET-<time>.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")] = False,
    with_proxy: Annotated[bool, typer.Option("--proxy/--no-proxy", help="Start the proxy in front.")] = True,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the fleet is ready; stop it with `down`.")
    ] = False,
) -> None:
    """Start the engines of a fleet file and the proxy in front of them, and keep them until Ctrl-C or SIGTERM.

    The file is checked in full and its ports are probed before anything starts. Every process has its own log file in
    the run directory. All processes end with this command, also when it is killed (on Linux).
    """
    from launch.fleet import FleetError, find_fleet, load_fleet
    from launch.supervisor import new_run_dir

    try:
        source = find_fleet(fleet_file)
        fleet = load_fleet(source)
    except FleetError as error:
        _stop(str(error))
    directory = run_dir or new_run_dir(source.stem, RUNS)
    if dry_run:
        _print_plan(fleet, directory, with_proxy)
        return
    if detach:
        _detach(source, directory, with_proxy)
        return
    from launch.signals import run_until_signal

    raise typer.Exit(run_until_signal(_hold(fleet, directory, source, with_proxy)))


def status(
    run_dir: RunDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the state file's contents as JSON.")] = False,
) -> None:
    """Show the processes of a fleet. Exit status 0: all run; 3: some do not."""
    import msgspec
    from rich.console import Console

    state, directory = _state(run_dir)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(state), indent=2).decode() + "\n")
    else:
        Console().print(state_table(state, directory))
    raise typer.Exit(0 if state.supervised and len(state.running) == len(state.processes) else 3)


def down(run_dir: RunDir = None) -> None:
    """Stop a fleet started by `up` in another shell: its launcher first, then whatever it left behind."""
    from launch.processes import end_recorded_group
    from launch.state import read_state

    state, directory = _state(run_dir)
    count = len(state.running)
    if not state.supervised and not count:
        typer.echo(f"{directory}: nothing runs")
        return
    if state.supervised:
        os.kill(state.supervisor_pid, signal.SIGTERM)
        _wait_until(lambda: not state.supervised, 2 * state.stop_grace_s + _DOWN_MARGIN_S)
    state = read_state(directory)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for process in state.running:
            end_recorded_group(process.pid, process.created_unix_s, signum)
        _wait_until(lambda: not state.running, _DOWN_MARGIN_S)
    if state.running or state.supervised:
        _stop(f"still running: {', '.join(f'{process.name} (pid {process.pid})' for process in state.running)}")
    typer.echo(f"{directory}: stopped {count} processes")


def state_table(state: FleetState, directory: Path) -> Table:
    """The processes of a fleet as a Rich table."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(f"{state.fleet}  ({directory})"), title_justify="left")
    for column in ("process", "status", "pid", "url", "bootstrap", "restarts", "log"):
        table.add_column(column, justify="right" if column in {"pid", "restarts"} else "left", overflow="fold")
    for process in state.processes:
        shown = process.status
        if not process.alive and shown not in {"exited", "stopped"}:
            shown = "gone"
        if process.exit_code is not None:
            shown += f" (code {process.exit_code})"
        table.add_row(
            escape(process.name),
            escape(shown),
            str(process.pid),
            escape(process.url),
            escape(process.bootstrap_url or "–"),
            str(process.restarts),
            escape(process.log),
            style="" if process.alive else "red",
        )
    if not state.supervised:
        table.caption = "the launcher of this fleet no longer runs"
    return table


async def _hold(fleet: FleetFile, directory: Path, source: Path, with_proxy: bool) -> int:
    """Run the fleet until it fails or this task is cancelled; the exit status."""
    from rich.console import Console
    from rich.markup import escape

    from launch.processes import StartError
    from launch.supervisor import Fleet

    console = Console()

    def notify(message: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {escape(message)}", style="yellow", soft_wrap=True)

    runner = Fleet(fleet, directory, source=str(source), with_proxy=with_proxy, notify=notify)
    try:
        async with runner:
            console.print(state_table(runner.state, directory))
            if runner.state.proxy_url:
                console.print(f"ready: {runner.state.proxy_url}/v1 (Ctrl-C stops everything)", soft_wrap=True)
            reason = await runner.wait()
            typer.echo(f"error: {reason}; stopping the fleet", err=True)
            return 1
    except StartError as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    finally:
        console.print(f"stopped; logs in {escape(str(directory))}", soft_wrap=True)


def _detach(source: Path, directory: Path, with_proxy: bool) -> None:
    """Start a second launcher in its own session and wait until its fleet is ready."""
    from rich.console import Console

    from launch.state import StateError, read_state

    directory.mkdir(parents=True, exist_ok=True)
    log_path = directory / "launcher.log"
    command = [sys.executable, "-m", "launch", "up", str(source), "--run-dir", str(directory)]
    command += [] if with_proxy else ["--no-proxy"]
    with log_path.open("wb") as log:
        launcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while True:
            try:
                state = read_state(directory)
            except StateError:
                state = None
            if state is not None and state.supervisor_pid == launcher.pid and state.status == "ready":
                break
            if launcher.poll() is not None:
                sys.stderr.write(log_path.read_text(errors="replace"))
                _stop(f"the fleet did not start (see {log_path})")
            time.sleep(_SETTLE_S)
    except BaseException:
        launcher.terminate()
        raise
    console = Console()
    console.print(state_table(state, directory))
    console.print(f"detached; stop it with: warmroute down --run-dir {directory}", soft_wrap=True, markup=False)


def _print_plan(fleet: FleetFile, directory: Path, with_proxy: bool) -> None:
    import yaml

    from launch.engines import engine_specs, proxy_spec
    from launch.fleet import ports_in_use
    from launch.supervisor import PROXY_CONFIG

    specs = engine_specs(fleet)
    if with_proxy:
        specs.append(proxy_spec(fleet, directory / PROXY_CONFIG))
    for spec in specs:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in spec.environment.items())
        typer.echo(f"# {spec.name}: ready when {', '.join(spec.ready_urls)} answer 200")
        typer.echo(f"{variables} {shlex.join(spec.command)}".strip())
    if with_proxy:
        typer.echo(f"# {directory / PROXY_CONFIG}:")
        typer.echo(yaml.safe_dump(fleet.proxy_config(), sort_keys=False), nl=False)
    for problem in ports_in_use(fleet, with_proxy=with_proxy):
        typer.echo(f"warning: {problem}", err=True)


def _state(run_dir: Path | None) -> tuple[FleetState, Path]:
    from launch.state import StateError, find_run_dir, read_state

    try:
        directory = run_dir or find_run_dir(RUNS)
        return read_state(directory), directory
    except StateError as error:
        _stop(str(error))


def _wait_until(done: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not done() and time.monotonic() < deadline:
        time.sleep(_SETTLE_S)


def _stop(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def register(app: typer.Typer) -> None:
    """Add ``up``, ``down``, ``status`` and ``demo`` to an application."""
    from launch.demo_cli import demo

    app.command("up")(up)
    app.command("down")(down)
    app.command("status")(status)
    app.command("demo")(demo)
