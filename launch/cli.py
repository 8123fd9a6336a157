"""Commands ``up``, ``down`` and ``status``; `register` adds the launcher's other commands too."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    import asyncio

    from rich.table import Table

    from launch.doctor.probes.deep import HandOffs
    from launch.fleet.file import FleetFile
    from launch.run.state import FleetRecord, ProcessState

RUNS = Path("runs")
_SETTLE_S = 0.1
_DOWN_MARGIN_S = 10.0
_COLUMNS = ("process", "status", "pid", "role", "devices", "transport", "url", "bootstrap", "restarts", "recycles")
_ALWAYS = frozenset({"process", "status", "pid"})
_NUMBERS = frozenset({"pid", "restarts", "recycles"})

RunDir = Annotated[
    Path | None,
    typer.Option(help="Run directory of the fleet. Default: the only one under runs/ that runs.", show_default=False),
]

Running = Annotated[
    str | None,
    typer.Argument(
        metavar="FLEET", help="Fleet file as given to `up`. Default: the only one that runs.", show_default=False
    ),
]


def up(
    fleet_file: Annotated[
        Path, typer.Argument(metavar="FLEET.yaml", help="Fleet file, or the name of a shipped one such as sim-4x.")
    ],
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for logs, settings and state.json. Default: runs/FLEET-TIME.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and settings; start nothing.")] = False,
    with_proxy: Annotated[bool, typer.Option("--proxy/--no-proxy", help="Start the proxy in front.")] = True,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the fleet is ready; stop it with `down`.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of the fleet file (YAML value), such as vllm.max_model_len=8192. Repeatable.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model id or folder; same as --set model=... Default: the file's.", show_default=False),
    ] = None,
    require_fresh: Annotated[
        bool,
        typer.Option("--require-fresh", help="Prove that every engine is fresh once ready (fresh.json), or stop all."),
    ] = False,
    on: Annotated[
        Literal["host", "ray"],
        typer.Option(metavar="host|ray", help="Where engines run: this machine, or the nodes of a Ray cluster."),
    ] = "host",
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster, with --on ray. Default: the one running here, else one of this machine alone.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Start a fleet of engines and the proxy in front of them, until Ctrl-C; a second stops it at once.

    The file is checked in full and its ports are probed before anything starts. Every process has its own log file in
    the run directory. All processes end with this command, on Linux also when it is killed.
    """
    from launch.fleet.file import FleetError, find_fleet, load_fleet
    from launch.run.state import StateError, make_run_dir
    from launch.run.supervisor import new_run_dir

    try:
        source = find_fleet(fleet_file)
        overrides = [*(settings or []), *([f"model={json.dumps(model)}"] if model else [])]
        fleet = load_fleet(source, overrides)
    except FleetError as error:
        _stop(str(error))
    if ray_address is not None and on != "ray":
        _stop("--ray-address is for --on ray")
    directory = run_dir or new_run_dir(source.stem, RUNS)
    if dry_run:
        _print_plan(fleet, directory, with_proxy)
        return
    try:
        make_run_dir(directory)
    except StateError as error:
        _stop(str(error))
    if detach:
        options = [] if with_proxy else ["--no-proxy"]
        options += [part for override in overrides for part in ("--set", override)]
        options += ["--on", on, *(["--ray-address", ray_address] if ray_address else [])]
        _detach(source, directory, [*options, *(["--require-fresh"] if require_fresh else [])])
        return
    import asyncio

    from launch.run.signals import run_until_signal

    hurry = asyncio.Event()
    if on == "ray":
        from launch.on_ray.hold import hold

        work = hold(ray_address, fleet, directory, source, with_proxy, require_fresh, hurry)
    else:
        work = _hold(fleet, directory, source, with_proxy, require_fresh, hurry)
    code = run_until_signal(work, on_second=hurry.set)
    if run_dir is None:
        with suppress(OSError):
            directory.rmdir()  # it is empty after a start that was refused
    raise typer.Exit(code)


def status(
    fleet: Running = None,
    run_dir: RunDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the state file's contents as JSON.")] = False,
) -> None:
    """Show the processes of a fleet.

    Exit status 0: all are running; 3: some are not.
    """
    import msgspec
    from rich.console import Console

    state, directory = _state(run_dir, fleet)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(state), indent=2).decode() + "\n")
    else:
        Console().print(state_table(state, directory))
    raise typer.Exit(0 if state.supervised and len(state.running) == len(state.processes) else 3)


def down(fleet: Running = None, run_dir: RunDir = None) -> None:
    """Stop a fleet that `up` started in another shell.

    Requests in progress have the proxy's grace period; `down` again meanwhile stops the fleet at once.
    """
    from launch.run.processes import kill_marked, marked
    from launch.run.state import read_state

    state, directory = _state(run_dir, fleet)
    count = len(state.running)
    if not state.supervised and not count and not marked(state.marks):
        typer.echo(f"{directory}: nothing is running")
        return
    if state.supervised:
        os.kill(state.supervisor_pid, signal.SIGTERM)
        _wait_until(lambda: not state.supervised, state.proxy_stop_s + state.stop_grace_s + _DOWN_MARGIN_S)
    state = read_state(directory)
    # What a launcher that was killed has left, in the launcher's order.
    proxies = [process for process in state.processes if process.kind == "proxy"]
    for group, grace_s in ((proxies, state.proxy_stop_s), (state.processes, state.stop_grace_s)):
        _end(group, grace_s)
    # Processes whose guard was killed.
    kill_marked(state.marks)
    _wait_until(lambda: not marked(state.marks), _DOWN_MARGIN_S)
    if state.running or state.supervised or marked(state.marks):
        named = [f"{process.name} (pid {process.pid})" for process in state.running]
        _stop(f"still running: {', '.join(named) or ', '.join(f'pid {pid}' for pid in marked(state.marks))}")
    typer.echo(f"{directory}: stopped {count} {'process' if count == 1 else 'processes'}")


def state_table(state: FleetRecord, directory: Path) -> Table:
    """The processes of a fleet as a Rich table; each one's log is NAME.log in the run directory.

    A transport with a question mark is configured, but not proven by the engine's log.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(f"{state.fleet}  ({directory})"), title_justify="left")
    rows = [_row(process) for process in state.processes]
    # An empty column would only make the others narrow.
    shown = [name for name in _COLUMNS if name in _ALWAYS or any(row[name] not in {"", "0"} for row in rows)]
    for name in shown:
        justify: Literal["left", "right"] = "right" if name in _NUMBERS else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name in {"process", "status", "pid"})
    for process, row in zip(state.processes, rows, strict=True):
        table.add_row(*(escape(row[name] or "–") for name in shown), style="" if process.alive else "red")
    if not state.supervised:
        table.caption = "the launcher of this fleet is no longer running"
    return table


def _row(process: ProcessState) -> dict[str, str]:
    """One process as `status` shows it, by column; empty where there is no value."""
    status = process.status
    if not process.alive and status not in {"exited", "stopped"}:
        status = "gone"
    if process.exit_code is not None:
        status += f" (code {process.exit_code})"
    transport = process.transport or (f"{process.configured_transport}?" if process.configured_transport else "")
    return {
        "process": process.name,
        "status": status,
        "pid": str(process.pid),
        "role": process.role,
        "devices": ",".join(process.devices),
        "transport": transport,
        "url": process.url,
        "bootstrap": f":{urlsplit(process.bootstrap_url).port}" if process.bootstrap_url else "",
        "restarts": str(process.restarts),
        "recycles": str(process.recycles),
    }


def _proved(directory: Path, options: list[str]) -> bool:
    """Report if the fleet proved fresh, or if that was not required; the launcher ends when it did not."""
    import msgspec

    from launch.freshness.proof import FRESH_FILE, FreshProof

    if "--require-fresh" not in options:
        return True
    try:
        return msgspec.json.decode((directory / FRESH_FILE).read_bytes(), type=FreshProof).fresh
    except (OSError, msgspec.MsgspecError):
        return False  # not written yet


async def _hold(
    fleet: FleetFile, directory: Path, source: Path, with_proxy: bool, require_fresh: bool, hurry: asyncio.Event
) -> int:
    """Run the fleet until it fails or this task is cancelled; the exit status."""
    from launch.freshness.proof import FRESH_FILE, StaleEngineError, prove_fresh
    from launch.run.messages import Messages
    from launch.run.processes import StartError
    from launch.run.supervisor import Fleet

    messages = Messages()
    since_unix_s = time.time()
    (directory / FRESH_FILE).unlink(missing_ok=True)
    runner = Fleet(
        fleet,
        directory,
        source=str(source),
        with_proxy=with_proxy,
        notify=messages.notify,
        hurry=hurry,
        defer_warmup=require_fresh,
    )
    try:
        async with runner:
            if require_fresh:
                await prove_fresh(runner.state.processes, since_unix_s=since_unix_s, path=directory / FRESH_FILE)
                await runner.finish_start()
            messages.show(state_table(runner.state, directory))
            if runner.state.proxy_url:
                messages.show(f"ready: {runner.state.proxy_url}/v1 (Ctrl-C stops everything)")
            reason = await runner.wait()
            typer.echo(f"error: {reason}; stopping the fleet", err=True)
            return 1
    except (StartError, StaleEngineError) as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    finally:
        if runner.state.processes:
            messages.show(f"stopped; logs in {directory}")


def _detach(source: Path, directory: Path, options: list[str]) -> None:
    """Start a second launcher in its own session and wait until its fleet is ready."""
    from rich.console import Console

    from launch.run.detached import NotStartedError, SignalError, start_detached

    command = [sys.executable, "-m", "launch", "up", str(source), "--run-dir", str(directory), *options]
    log_path = directory / "launcher.log"
    try:
        state = start_detached(command, directory, log_path, lambda: _proved(directory, options))
    except NotStartedError as error:
        sys.stderr.write(error.output)
        _stop(f"the fleet did not start (see {log_path})")
    except SignalError as error:
        typer.echo(f"interrupted: the fleet is being stopped, see {log_path}", err=True)
        raise typer.Exit(128 + error.signum) from error
    console = Console()
    console.print(state_table(state, directory))
    console.print(f"detached; stop it with: warmroute down --run-dir {directory}", soft_wrap=True, markup=False)


def _print_plan(fleet: FleetFile, directory: Path, with_proxy: bool) -> None:
    import yaml

    from launch.engines.commands import engine_specs, proxy_spec
    from launch.engines.dimensions import tcp_warnings
    from launch.engines.flags import start_problems
    from launch.fleet.file import ports_in_use
    from launch.run.supervisor import PROXY_CONFIG

    specs = engine_specs(fleet)
    if with_proxy:
        specs.append(proxy_spec(fleet, directory / PROXY_CONFIG))
    for spec in specs:
        own = {
            **spec.default_environment,
            **spec.environment,
            **{name: spec.complete_environment({})[name] for name in spec.search_paths},
        }
        given = {name: shlex.quote(value) for name, value in own.items()}
        for name in spec.search_paths.keys() - spec.environment.keys():
            given[name] += f"${{{name}:+:${name}}}"  # the shell's own directories follow
        variables = " ".join(f"{name}={value}" for name, value in given.items())
        typer.echo(f"# {spec.name}: ready when {', '.join(spec.ready_urls)} answer 200")
        unset = "".join(f"-u {name} " for name in spec.drop_environment)
        typer.echo(f"{f'env {unset}' if unset else ''}{variables} {shlex.join(spec.command)}".strip())
    if with_proxy:
        typer.echo(f"# {directory / PROXY_CONFIG}:")
        typer.echo(yaml.safe_dump(fleet.shown_proxy_config(), sort_keys=False), nl=False)
    for problem in [*start_problems(fleet), *ports_in_use(fleet, with_proxy=with_proxy), *tcp_warnings(fleet)]:
        typer.echo(f"warning: {problem}", err=True)


def _state(run_dir: Path | None, fleet: str | None) -> tuple[FleetRecord, Path]:
    from launch.run.state import StateError, find_run_dir, read_state

    if run_dir is not None and fleet is not None:
        _stop("give FLEET or --run-dir, not both")
    try:
        directory = run_dir or find_run_dir(RUNS, fleet)
        return read_state(directory), directory
    except StateError as error:
        _stop(str(error))


def _end(processes: Sequence[ProcessState], grace_s: float) -> None:
    from launch.run.processes import end_recorded

    for signum, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _DOWN_MARGIN_S)):
        for process in processes:
            end_recorded(process.pid, process.created_unix_s, signum)
        _wait_until(lambda: not any(process.alive for process in processes), limit_s)


def _wait_until(done: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not done() and time.monotonic() < deadline:
        time.sleep(_SETTLE_S)


def _stop(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def register(app: typer.Typer, hand_offs: HandOffs | None = None) -> None:
    """Add ``up``, ``down``, ``status``, ``demo``, ``doctor``, ``telemetry`` and ``experiment`` to an application.

    ``hand_offs`` makes the hand-offs of ``doctor --deep``.
    """
    from launch.demo.cli import demo
    from launch.doctor.cli import doctor_command
    from launch.experiment.cli import register as register_experiment
    from launch.hardware.telemetry_cli import telemetry

    app.command("up")(up)
    app.command("down")(down)
    app.command("status")(status)
    app.command("demo")(demo)
    app.command("doctor")(doctor_command(hand_offs))
    app.command("telemetry")(telemetry)
    register_experiment(app)
