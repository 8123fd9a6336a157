"""State of a running fleet on disk: ``state.json`` in the run directory, for `status` and `down` in other shells."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from launch.fleet.file import FleetFile
from launch.run.files import replace_file
from launch.run.processes import creation_time, same_process

STATE_FILE = "state.json"
SCHEMA = 1
_ROOM_BYTES = 64 * 1024
"""Room for the files of a start; `state.json` of a hundred processes has that size."""


class StateError(ValueError):
    """No usable state; the message names the remedy."""


class ProcessState(msgspec.Struct, kw_only=True):
    """One process as last seen by its supervisor."""

    name: str
    kind: str
    pid: int
    created_unix_s: float
    url: str
    log: str
    bootstrap_url: str | None = None
    status: str = "starting"
    """starting, ready, exited, restarting or stopped."""
    restarts: int = 0
    """Restarts after unexpected exits."""
    recycles: int = 0
    """Restarts requested by the proxy."""
    exit_code: int | None = None
    role: str = ""
    """Of an engine: kv_both, kv_producer, kv_consumer or none."""
    devices: list[str] = msgspec.field(default_factory=list)
    configured_transport: str | None = None
    transport: str | None = None
    """Transport proven by the connector's log; None when it shows none, or without a connector."""
    events_url: str | None = None
    mark: str = ""
    """In the environment of everything it started (see `launch.run.processes`)."""

    @property
    def alive(self) -> bool:
        """True if this same process still runs (a reused pid does not count)."""
        return same_process(self.pid, self.created_unix_s)


class FleetRecord(msgspec.Struct, kw_only=True):
    """One fleet run."""

    schema: int = SCHEMA
    fleet: str
    """The fleet file it was started from."""
    supervisor_pid: int
    supervisor_created_unix_s: float
    started_unix_s: float = msgspec.field(default_factory=time.time)
    status: str = "starting"
    """starting, ready, stopping, stopped or failed."""
    proxy_url: str | None = None
    stop_grace_s: float = 5.0
    """Time its supervisor leaves the engines between SIGTERM and SIGKILL, once the proxy has ended."""
    proxy_stop_s: float = 5.0
    """The same for the proxy, which drains meanwhile."""
    processes: list[ProcessState] = msgspec.field(default_factory=list)

    @property
    def supervised(self) -> bool:
        """True if the launcher that wrote the state still runs."""
        return same_process(self.supervisor_pid, self.supervisor_created_unix_s)

    @property
    def running(self) -> list[ProcessState]:
        """The processes that still run."""
        return [process for process in self.processes if process.alive]

    @property
    def marks(self) -> list[str]:
        """The marks of all processes' trees."""
        return [process.mark for process in self.processes if process.mark]


def new_record(fleet: FleetFile, source: str, *, with_proxy: bool) -> FleetRecord:
    """The record of a fleet that this process starts now."""
    return FleetRecord(
        fleet=source,
        supervisor_pid=os.getpid(),
        supervisor_created_unix_s=creation_time(os.getpid()) or 0.0,
        proxy_url=fleet.proxy_url() if with_proxy else None,
        stop_grace_s=fleet.stop_grace_s,
        proxy_stop_s=fleet.proxy_stop_s,
    )


def write_state(run_dir: Path, state: FleetRecord) -> None:
    """Replace the state file in one step. Raises OSError, with its path."""
    replace_file(run_dir / STATE_FILE, msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")


def make_run_dir(run_dir: Path) -> None:
    """Make a run directory for a new fleet; one of a fleet that has ended may be used again.

    Raises:
        StateError: it cannot be made, a fleet runs from it, or files in it cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if _in_use(run_dir):
            raise StateError(
                f"{run_dir}: a fleet is already running from this directory; "
                f"stop it (`warmroute down --run-dir {run_dir}`) or choose another --run-dir"
            )
        probe = run_dir / f".probe.{os.getpid()}"
        try:
            replace_file(probe, bytes(_ROOM_BYTES))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise StateError(f"{run_dir}: cannot be a run directory ({error.strerror}); give another --run-dir") from error


def _in_use(run_dir: Path) -> bool:
    try:
        previous = read_state(run_dir)
    except StateError:
        return False
    return previous.supervised or bool(previous.running)


def read_state(run_dir: Path) -> FleetRecord:
    """The state of one run directory.

    Raises:
        StateError: no state file there, or not one of ours.
    """
    path = run_dir / STATE_FILE
    try:
        state = msgspec.json.decode(path.read_bytes(), type=FleetRecord)
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}; give the run directory that `warmroute up` printed") from error
    except msgspec.MsgspecError as error:
        raise StateError(f"{path}: not a state file of warmroute ({error})") from error
    if state.schema != SCHEMA:
        raise StateError(f"{path}: state schema {state.schema}, this version reads {SCHEMA}")
    return state


def find_run_dir(root: Path, fleet: str | None = None) -> Path:
    """The one run directory under ``root`` in which something still runs.

    Args:
        root: folder of run directories.
        fleet: only fleets of this file, as it is given to `up`: its name or its path.

    Raises:
        StateError: there is none, or several.
    """
    wanted = None if fleet is None else Path(fleet).stem
    live = []
    for path in sorted(root.glob(f"*/{STATE_FILE}")):
        try:
            state = read_state(path.parent)
        except StateError:
            continue
        if state.supervised or state.running:
            live.append((path.parent, Path(state.fleet).stem))
    found = [directory for directory, name in live if wanted in {None, name}]
    if len(found) == 1:
        return found[0]
    if found:
        raise StateError(f"several fleets are running: choose one with --run-dir: {', '.join(map(str, found))}")
    others = f"; running: {', '.join(sorted(name for _, name in live))}" if live else ""
    which = "" if fleet is None else f" {fleet!r}"
    raise StateError(
        f"no fleet{which} is running from a directory under {root}/{others}; give its run directory with --run-dir"
    )
