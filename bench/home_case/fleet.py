"""The running fleet as its run directory describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from launch.run.state import FleetRecord, ProcessState, StateError, read_state
from launch.run.supervisor import PROXY_CONFIG
from warmroute_yaml import load_yaml

_SECRET = ("keys", "tls", "tenants")
"""Sections of the proxy's settings that are not kept with results."""


class HomeCaseError(Exception):
    """A run that cannot be made or read; the message has the remedy."""


class RunningFleet(NamedTuple):
    """A started fleet with its proxy."""

    state: FleetRecord
    proxy: ProcessState
    engines: list[ProcessState]
    settings: dict[str, Any]
    """The proxy's settings file, without secrets."""
    url: str
    admin_url: str


def running_fleet(run_dir: Path) -> RunningFleet:
    """The fleet of a run directory.

    Raises:
        HomeCaseError: it is not ready, or was started without a proxy.
    """
    try:
        state = read_state(run_dir)
        settings = load_yaml((run_dir / PROXY_CONFIG).read_text(encoding="utf-8"))
    except (StateError, OSError, yaml.YAMLError) as error:
        raise HomeCaseError(f"{error}; start a fleet with `warmroute up FLEET --detach --run-dir {run_dir}`") from error
    proxies = [process for process in state.processes if process.kind == "proxy"]
    engines = [process for process in state.processes if process.kind != "proxy"]
    if state.status != "ready" or state.proxy_url is None or not proxies or not engines:
        raise HomeCaseError(f"{run_dir}: the fleet is {state.status} and must be ready, with its proxy")
    if ended := [process.name for process in state.processes if not process.alive]:
        raise HomeCaseError(f"{run_dir}: no longer running: {', '.join(ended)}; start the fleet again")
    admin = settings.get("admin") or {}
    port = admin.get("port")
    return RunningFleet(
        state,
        proxies[0],
        engines,
        {name: value for name, value in settings.items() if name not in _SECRET},
        state.proxy_url,
        state.proxy_url if port is None else f"http://{admin.get('host', '127.0.0.1')}:{port}",
    )


def changes(before: FleetRecord, run_dir: Path) -> list[str]:
    """Processes that ended or were restarted since a state was read."""
    try:
        after = {process.name: process for process in read_state(run_dir).processes}
    except StateError as error:
        return [str(error)]
    found = []
    for process in before.processes:
        now = after.get(process.name)
        if now is None or not now.alive:
            found.append(f"{process.name} ended during the run; its log: {process.log}")
        elif (now.pid, now.created_unix_s) != (process.pid, process.created_unix_s):
            found.append(f"{process.name} was restarted during the run")
    return found
