"""A running fleet: started, checked, watched, and always stopped.

Use it as an asynchronous context manager; every process is ended on exit, also after an error.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from launch.engines.commands import KINDS, ProcessSpec, engine_specs, proxy_spec
from launch.engines.dimensions import tcp_warnings
from launch.fleet.file import FleetFile, ports_in_use
from launch.run.compatibility import incompatible_engines
from launch.run.effective import effective_config_problems
from launch.run.files import FileReports, required
from launch.run.pair_warmup import PairEnd, ordered_pairs, warm_pairs
from launch.run.processes import ManagedProcess, StartError, finish_despite_cancellation, stop_processes
from launch.run.proxy_access import ProxyAccess
from launch.run.state import STATE_FILE, ProcessState, StateError, make_run_dir, new_record, write_state
from launch.run.transport import prove_transport
from launch.run.watch import Watch
from policies.types import Role, Transport

PROXY_CONFIG = "proxy.yaml"
_WATCH_S = 0.1
_READY_POLL_S = 0.1
_PROBE_TIMEOUT_S = 2.0

Notify = Callable[[str], None]


class Fleet:
    """Engines and a proxy, supervised.

    Args:
        fleet: the fleet to run.
        run_dir: directory for logs, the proxy's settings and ``state.json``; created when missing.
        source: the fleet's file, for the state file.
        with_proxy: False starts the engines only.
        notify: called with a sentence for each event that an operator should know.
        hurry: once set, the stop does not wait for requests in progress.
        defer_warmup: the fleet is not ready, and its pairs not warm, until `finish_start` is called: what needs engines
            without any request (`launch.freshness`) comes before.
    """

    def __init__(
        self,
        fleet: FleetFile,
        run_dir: Path,
        *,
        source: str = "",
        with_proxy: bool = True,
        notify: Notify = lambda message: None,
        hurry: asyncio.Event | None = None,
        defer_warmup: bool = False,
    ) -> None:
        self.fleet = fleet
        self._defer_warmup = defer_warmup
        self.run_dir = run_dir
        self.with_proxy = with_proxy
        self.unexpected_exits: list[str] = []
        """One sentence for every process that exited unexpectedly."""
        self.notify = notify
        self.processes: list[ManagedProcess] = []
        """In the order of their start; empty before it and after the stop."""
        self.proxy_access = ProxyAccess(fleet)
        self._hurry = hurry
        self._files = FileReports(notify)
        self._watching: asyncio.Task[None] | None = None
        self.state = new_record(fleet, source, with_proxy=with_proxy)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await finish_despite_cancellation(self._stop("failed"), name="fleet-stop")
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await finish_despite_cancellation(self._stop("stopped"), name="fleet-stop")

    async def wait(self) -> str:
        """Wait until the proxy or every engine has exited for good; returns the reason."""
        while True:
            if self._watching is not None and self._watching.done():
                await self._watching
            lost = [process for process in self.state.processes if process.status == "exited"]
            if any(process.kind == "proxy" for process in lost):
                return "the proxy is gone"
            engines = [process for process in self.state.processes if process.kind != "proxy"]
            if all(process.status == "exited" for process in engines):
                return "every engine is gone"
            await asyncio.sleep(_WATCH_S)

    async def _start(self) -> None:
        self._prepare()
        tasks = [
            asyncio.create_task(self._start_all(), name="fleet-start"),
            asyncio.create_task(self._until_one_exits(), name="fleet-exits"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._watching = asyncio.create_task(Watch(self).run(), name="fleet-watch")

    async def _until_one_exits(self) -> None:
        """Raise StartError once a process that was started has exited, also one that was ready before the others."""
        while True:
            for process in self.processes:
                if process.exited():
                    raise self._exited_early(process)
            await asyncio.sleep(_READY_POLL_S)

    async def _start_all(self) -> None:
        specs = engine_specs(self.fleet)
        for number, spec in enumerate(specs):
            if number and self.fleet.stagger_s:
                await asyncio.sleep(self.fleet.stagger_s)
            self._launch(spec)
        deadline = asyncio.get_running_loop().time() + self.fleet.ready_timeout_s
        async with httpx.AsyncClient(timeout=_PROBE_TIMEOUT_S) as client:
            waits = [
                asyncio.create_task(self.until_ready(process, client, deadline), name=f"ready-{process.spec.name}")
                for process in self.processes
            ]
            try:
                await asyncio.gather(*waits)
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
            await self._check_compatible(client)
            if not self._defer_warmup:
                await self.warm_pairs()
            if self.with_proxy:
                self._write_proxy_config()
                proxy = self._launch(proxy_spec(self.fleet, self.run_dir / PROXY_CONFIG))
                await self.until_ready(proxy, client, deadline)
        if not self._defer_warmup:
            self._report_ready()

    async def finish_start(self) -> None:
        """Warm the pairs and report the fleet ready, after a start with ``defer_warmup``.

        Raises:
            StartError: a pair failed, and the fleet requires all; or the state cannot be written.
        """
        await self.warm_pairs()
        self._report_ready()

    def _report_ready(self) -> None:
        self.state.status = "ready"
        self._require_state()

    async def warm_pairs(self, only: str | None = None) -> None:
        """Send the first hand-off of each pair of engines, where the fleet file wants that.

        Args:
            only: pairs of this engine, which was restarted: a failure is a warning then.

        Raises:
            StartError: a pair failed, and the fleet requires all.
        """
        settings = self.fleet.pair_warmup
        if settings.mode == "off":
            return
        serving = {found.name for found in self.state.processes if found.status == "ready"}
        ends = [
            PairEnd(member.name, self.fleet.url(member.index), member.role, self.fleet.bootstrap_url(member.index))
            for member in self.fleet.members
            if member.name in serving
        ]
        pairs = [pair for pair in ordered_pairs(ends) if only is None or only in {pair[0].name, pair[1].name}]
        if not pairs and only is None:
            self.notify("warning: pair_warmup: no two engines exchange KV (role), so there is no pair to warm")
        async with httpx.AsyncClient() as client:
            failed = await warm_pairs(pairs, self.fleet.request_model, settings, client)
        if failed and settings.mode == "require" and only is None:
            raise StartError(
                f"pair_warmup: {len(failed)} of {len(pairs)} pairs did not hand over KV: {'; '.join(failed)}"
            )
        for problem in failed:
            self.notify(f"warning: pair_warmup: {problem}")

    def _prepare(self) -> None:
        try:
            make_run_dir(self.run_dir)
        except StateError as error:
            raise StartError(str(error)) from error
        busy = ports_in_use(self.fleet, with_proxy=self.with_proxy)
        if busy:
            raise StartError("; ".join(busy))
        lacking = KINDS[self.fleet.kind].problems(self.fleet, os.environ)
        if lacking:
            raise StartError("; ".join(lacking))
        for message in tcp_warnings(self.fleet):
            self.notify(f"warning: {message}")

    async def _check_compatible(self, client: httpx.AsyncClient) -> None:
        """Refuse engines and peers that would exchange KV of different shapes.

        Raises:
            StartError: two of them differ.
        """
        if self.fleet.kind != "vllm":
            return
        urls = {
            member.name: self.fleet.url(member.index) for member in self.fleet.members if member.role is not Role.NONE
        }
        urls |= {peer.name or peer.url: peer.url for peer in self.fleet.peers if peer.role is not Role.NONE}
        incompatible, silent = await incompatible_engines(urls, client)
        if incompatible:
            raise StartError(f"engines that exchange KV must be compatible: {'; '.join(incompatible)}")
        for message in silent:
            self.notify(f"warning: {message}")

    def _write_proxy_config(self) -> None:
        """Write the proxy's settings, with the transports that the engines' logs proved."""
        proven = {
            found.name: Transport(found.transport) for found in self.state.processes if found.transport is not None
        }
        self.proxy_access.write_config(self.fleet.proxy_config(proven), self.run_dir / PROXY_CONFIG)

    def _launch(self, spec: ProcessSpec) -> ManagedProcess:
        process = ManagedProcess(spec, self.run_dir / f"{spec.name}.log")
        self.processes.append(process)
        found = ProcessState(
            name=spec.name,
            kind=spec.kind,
            pid=0,
            created_unix_s=0.0,
            url=spec.url,
            bootstrap_url=spec.bootstrap_url,
            log=str(process.log_path),
        )
        if spec.member is not None:
            found.role, found.devices = spec.member.role.value, list(spec.member.devices)
            found.events_url = self.fleet.events_url(spec.member.index)
            if spec.kind == "vllm" and spec.member.role is not Role.NONE:
                found.configured_transport = spec.member.vllm.transfer.protocol.value
        self.state.processes.append(found)
        self.start_process(process)
        return process

    def start_process(self, process: ManagedProcess) -> None:
        """Start a process, for the first time or again.

        Raises:
            StartError: the operating system refused, or the proxy's certificate cannot be read (or see `set_status`).
        """
        if process.spec.kind == "proxy":
            try:
                self.proxy_access.read_certificate()
            except ValueError as error:
                raise StartError(str(error)) from error
        process.start()
        found = self.state_of(process)
        found.pid, found.created_unix_s, found.mark = process.pid, process.created_unix_s, process.mark
        self.set_status(process, "starting")

    async def until_ready(self, process: ManagedProcess, client: httpx.AsyncClient, deadline: float) -> None:
        """Wait until every ready URL answers 200, then check the effective configuration and the KV transport.

        Raises:
            StartError: the process ended first, the time is up, or its configuration is not the one given.
        """
        if process.spec.kind == "proxy":
            async with self.proxy_access.client() as own:
                await self._until_answering(process, own, deadline)
        else:
            await self._until_answering(process, client, deadline)
        problems = await asyncio.to_thread(effective_config_problems, process)
        if problems:
            raise StartError("; ".join(problems))
        found = self.state_of(process)
        transport, message = prove_transport(process, Transport(found.transport) if found.transport else None)
        if message:
            self.notify(f"warning: {message}")
        found.transport = transport.value if transport else None
        self.set_status(process, "ready")

    async def _until_answering(self, process: ManagedProcess, client: httpx.AsyncClient, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        for url in process.spec.ready_urls:
            answer = "no answer yet"
            while True:
                if process.exited():
                    raise self._exited_early(process)
                try:
                    response = await client.get(url)
                    if response.status_code == 200:
                        break
                    answer = f"status {response.status_code}"
                except httpx.HTTPError as error:
                    answer = type(error).__name__
                if loop.time() > deadline:
                    raise StartError(
                        f"{process.spec.name} was not ready within {self.fleet.ready_timeout_s:g} s: {url}: {answer}; "
                        f"the end of {process.log_path}:\n{process.log_tail()}"
                    )
                await asyncio.sleep(_READY_POLL_S)

    def _exited_early(self, process: ManagedProcess) -> StartError:
        code = process.reap()
        what = "the fleet" if self.state_of(process).status == "ready" else "it"
        return StartError(
            f"{process.spec.name} exited with code {code} before {what} was ready; the end of {process.log_path}:\n"
            f"{process.log_tail()}"
        )

    async def _stop(self, status: str) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        if not self.processes:
            return
        self.state.status = "stopping"
        self._record_state()
        # The proxy first, until it has drained, so that no engine vanishes during one of its requests.
        proxies = [process for process in self.processes if process.spec.kind == "proxy" and not process.exited()]
        if proxies:
            self.notify(f"stopping: requests in progress have up to {self.fleet.proxy_stop_s:g} s; again: at once")
        await stop_processes(proxies, self.fleet.proxy_stop_s, self._hurry)
        await stop_processes(self.processes, self.fleet.stop_grace_s, self._hurry)
        for process in self.processes:
            found = self.state_of(process)
            if found.status != "exited":
                found.status, found.exit_code = "stopped", process.exit_code
        self.state.status = status
        self._record_state()
        self.processes = []

    def state_of(self, process: ManagedProcess) -> ProcessState:
        """Record of a process in the state file."""
        return next(found for found in self.state.processes if found.name == process.spec.name)

    def set_status(self, process: ManagedProcess, status: str, exit_code: int | None = None) -> None:
        """Set a process's status, in memory and on disk.

        Raises:
            StartError: the state cannot be written, and the fleet is still being started.
        """
        found = self.state_of(process)
        found.status, found.exit_code = status, exit_code
        if self.state.status == "starting" and self._watching is None:
            self._require_state()
        else:
            self._record_state()

    def record_late_state(self) -> None:
        """Write the state again if the last attempt failed."""
        if self._files.failing(self.run_dir / STATE_FILE):
            self._record_state()

    def _record_state(self) -> None:
        """Write the state, or report that it cannot be written: supervision does not depend on it."""
        with self._files.tolerated(
            self.run_dir / STATE_FILE, "the fleet is supervised as before, `status` and `down` read an older state"
        ):
            write_state(self.run_dir, self.state)

    def _require_state(self) -> None:
        """Write the state of a fleet being started. Raises StartError: `status` and `down` would not find the fleet."""
        with required():
            write_state(self.run_dir, self.state)


def new_run_dir(prefix: str, root: Path = Path("runs")) -> Path:
    """A run directory named after the moment: ``runs/PREFIX-YYYYMMDD-HHMMSS``."""
    return root / f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}"
