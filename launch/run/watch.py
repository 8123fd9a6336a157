"""Watch over a running fleet: restart exited processes, recycle engines on the proxy's request, end dead engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import httpx

from launch.fleet.file import FleetFile
from launch.run.processes import ManagedProcess, StartError, stop_processes
from launch.run.proxy_access import ProxyAccess
from launch.run.recycling import HealthRecord, RecycleRequests, RowsRefusedError, health_status, instance_rows
from launch.run.state import ProcessState

_WATCH_S = 0.1
_LOOK_S = 1.0
"""Interval between checks of the engines' health and of the proxy's recycle requests."""
_PROBE_TIMEOUT_S = 2.0
_MAX_BACKOFF_S = 30.0


class WatchedFleet(Protocol):
    """The part of a supervised fleet that its watch reads and acts on."""

    fleet: FleetFile
    with_proxy: bool
    proxy_access: ProxyAccess
    unexpected_exits: list[str]

    @property
    def processes(self) -> Sequence[ManagedProcess]:
        """Running processes, in the order of their start."""
        ...

    def notify(self, message: str, /) -> None:
        """Report an event to the user."""
        ...

    def state_of(self, process: ManagedProcess) -> ProcessState:
        """The recorded state of a process."""
        ...

    def set_status(self, process: ManagedProcess, status: str, exit_code: int | None = None) -> None:
        """Record a new status."""
        ...

    def record_late_state(self) -> None:
        """Write the state again if the last attempt failed."""
        ...

    def start_process(self, process: ManagedProcess) -> None:
        """Start a process again."""
        ...

    async def until_ready(self, process: ManagedProcess, client: httpx.AsyncClient, deadline: float) -> None:
        """Wait until a process is ready; raises StartError."""
        ...

    async def warm_pairs(self, only: str | None = None) -> None:
        """Send the first hand-off of each pair that a restarted engine is in."""
        ...


class Watch:
    """Watch over one fleet; `run` continues until it is cancelled."""

    def __init__(self, fleet: WatchedFleet) -> None:
        self._fleet = fleet
        self._settings = fleet.fleet
        self._in_hand: set[str] = set()
        """Processes being stopped or started on purpose: their exits are expected."""

    async def run(self) -> None:
        """Handle unexpected exits, dead engines and the proxy's recycle requests."""
        async with asyncio.TaskGroup() as tasks, httpx.AsyncClient(timeout=_PROBE_TIMEOUT_S) as client:
            tasks.create_task(self._watch_health(tasks, client), name="fleet-health")
            tasks.create_task(self._record_late_state(), name="fleet-state")
            if self._fleet.with_proxy:
                tasks.create_task(self._watch_recycle_requests(tasks, client), name="fleet-recycling")
            while True:
                for process in self._ended():
                    self._maybe_restart(process, tasks, client)
                await asyncio.sleep(_WATCH_S)

    def _ended(self) -> list[ManagedProcess]:
        """Processes that exited unexpectedly since the last check; each is reported once."""
        ended = [
            process
            for process in self._fleet.processes
            if process.exit_code is None and process.spec.name not in self._in_hand and process.exited()
        ]
        for process in ended:
            code = process.reap()
            self._fleet.set_status(process, "exited", code)
            self._report_exit(f"{process.spec.name} ended unexpectedly with code {code}; log: {process.log_path}")
        return ended

    def _report_exit(self, message: str) -> None:
        self._fleet.unexpected_exits.append(message)
        self._fleet.notify(message)

    def _maybe_restart(self, process: ManagedProcess, tasks: asyncio.TaskGroup, client: httpx.AsyncClient) -> None:
        if self._settings.restart != "on_failure":
            return
        found, most = self._fleet.state_of(process), self._settings.max_restarts
        if found.restarts >= most:
            self._fleet.notify(
                f"{process.spec.name} is not restarted again, max_restarts is {most}; log: {process.log_path}"
            )
        else:
            self._in_hand.add(process.spec.name)
            # Set at once, so that no other task takes the process for gone.
            self._fleet.set_status(process, "restarting", process.exit_code)
            tasks.create_task(self._restart(process, client))

    async def _restart(self, process: ManagedProcess, client: httpx.AsyncClient) -> None:
        found = self._fleet.state_of(process)
        pause = min(_MAX_BACKOFF_S, self._settings.restart_backoff_s * 2**found.restarts)
        found.restarts += 1
        self._fleet.notify(f"{process.spec.name} restarts in {pause:g} s (restart {found.restarts})")
        await asyncio.sleep(pause)
        await self._start_again(process, client)

    async def _start_again(self, process: ManagedProcess, client: httpx.AsyncClient) -> None:
        """Start a stopped process again; give up when it does not become ready."""
        try:
            self._fleet.start_process(process)
            deadline = asyncio.get_running_loop().time() + self._settings.ready_timeout_s
            await self._fleet.until_ready(process, client, deadline)
            if process.spec.member is not None:
                await self._fleet.warm_pairs(process.spec.name)
            self._fleet.notify(f"{process.spec.name} is ready again")
        except StartError as error:
            self._fleet.notify(str(error))
            await stop_processes([process], self._settings.stop_grace_s)
            self._fleet.set_status(process, "exited", process.exit_code)
        finally:
            self._in_hand.discard(process.spec.name)

    async def _record_late_state(self) -> None:
        """Write a state that the disk refused, once it does not: no other change may come for days."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._fleet.record_late_state()

    async def _watch_health(self, tasks: asyncio.TaskGroup, client: httpx.AsyncClient) -> None:
        """Replace engines whose API server is still up without its engine."""
        record = HealthRecord()
        while True:
            await asyncio.sleep(_LOOK_S)
            for process in [process for process in self._fleet.processes if self._serving(process)]:
                status = await health_status(client, process.spec.ready_urls[0])
                if record.dead(process.spec.name, status) and self._serving(process):
                    record.forget(process.spec.name)
                    self._in_hand.add(process.spec.name)
                    tasks.create_task(self._replace_dead(process, status or 0, tasks, client))

    async def _replace_dead(
        self, process: ManagedProcess, status: int, tasks: asyncio.TaskGroup, client: httpx.AsyncClient
    ) -> None:
        self._report_exit(
            f"{process.spec.name} answers {status} on /health: its engine is dead; log: {process.log_path}"
        )
        self._fleet.set_status(process, "stopping")
        await stop_processes([process], self._settings.stop_grace_s)
        self._fleet.set_status(process, "exited", process.exit_code)
        self._in_hand.discard(process.spec.name)
        self._maybe_restart(process, tasks, client)

    async def _watch_recycle_requests(self, tasks: asyncio.TaskGroup, client: httpx.AsyncClient) -> None:
        """Recycle engines on the proxy's request, once they are idle or have had time to drain."""
        requests = RecycleRequests()
        reported: set[str] = set()
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                rows = await instance_rows(self._fleet.proxy_access)
            except RowsRefusedError as error:
                if "" not in reported:
                    reported.add("")
                    self._fleet.notify(f"warning: the proxy's recycle requests cannot be read: {error}")
                continue
            due = requests.due(rows)
            for process in [process for process in self._fleet.processes if process.spec.name in due]:
                name = process.spec.name
                if not self._serving(process):
                    continue
                if self._fleet.state_of(process).recycles >= self._settings.max_recycles:
                    if name not in reported:
                        reported.add(name)
                        self._fleet.notify(
                            f"{name} should be recycled ({due[name]}) but has been {self._settings.max_recycles} times "
                            "already (max_recycles); not recycled"
                        )
                    continue
                requests.approve(name)
                self._in_hand.add(name)
                tasks.create_task(self._recycle(process, due[name], client))

    async def _recycle(self, process: ManagedProcess, reason: str, client: httpx.AsyncClient) -> None:
        found = self._fleet.state_of(process)
        found.recycles += 1
        self._fleet.notify(f"{process.spec.name} is recycled (recycle {found.recycles}): {reason}")
        self._fleet.set_status(process, "recycling")
        await stop_processes([process], self._settings.stop_grace_s)
        await self._start_again(process, client)

    def _serving(self, process: ManagedProcess) -> bool:
        return (
            process.spec.member is not None
            and process.spec.name not in self._in_hand
            and self._fleet.state_of(process).status == "ready"
        )
