"""A fleet over the nodes of a Ray cluster, and the proxy on this machine: started, watched, and always stopped.

Ray decides where engines run and starts an actor again on another node after the loss of its own. What it reports goes
to the proxy as a file (`discovery.source: file`), so an engine that moves is a change of one line.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import msgspec

from launch.engines.commands import proxy_spec
from launch.fleet.file import FleetFile
from launch.freshness.proof import FRESH_FILE, FreshProof, StaleEngineError
from launch.on_ray.actor import EngineActor, Report
from launch.on_ray.cluster import Cluster, LostError
from launch.run.files import FileReports, replace_file, required
from launch.run.processes import ManagedProcess, StartError, finish_despite_cancellation, stop_processes
from launch.run.proxy_access import ProxyAccess
from launch.run.state import STATE_FILE, ProcessState, new_record, write_state
from launch.run.supervisor import PROXY_CONFIG, Notify

INSTANCES_FILE = "instances.json"
"""The set of engines that can be used, for the proxy."""
NODES_FILE = "nodes.json"
"""State and node of every instance, for people."""
_LOOK_S = 0.5
_CALL_S = 5.0
_PROVE_S = 60.0
_MAX_BACKOFF_S = 30.0


@dataclass(slots=True)
class Placed:
    """One instance as its actor last reported it."""

    name: str
    report: Report | None = None
    lost: bool = False
    """Its actor does not answer."""
    log_offset: int = 0
    restarts: int = 0
    restart_at_s: float | None = None
    """Time of its next start, on the event loop's clock."""

    @property
    def usable(self) -> bool:
        """True if requests may be sent to it."""
        return not self.lost and self.report is not None and self.report.status == "ready"

    @property
    def status(self) -> str:
        """One word for people."""
        return "lost" if self.lost else "starting" if self.report is None else self.report.status


class RayFleet:
    """Engines on a Ray cluster and a proxy here; an asynchronous context manager.

    Args:
        fleet: the fleet to run.
        run_dir: directory for logs, the proxy's settings and the state; created when missing.
        source: the fleet's file.
        address: of the Ray cluster; None: see `Cluster`.
        with_proxy: False starts the engines only.
        notify: called with a sentence for each event that an operator should know.
        hurry: once set, the stop does not wait for requests in progress.
    """

    def __init__(
        self,
        fleet: FleetFile,
        run_dir: Path,
        *,
        source: Path,
        address: str | None = None,
        with_proxy: bool = True,
        notify: Notify = lambda message: None,
        hurry: asyncio.Event | None = None,
    ) -> None:
        self.fleet = fleet
        self.run_dir = run_dir
        self.placed = {member.name: Placed(member.name) for member in fleet.members}
        self._notify = notify
        self._files = FileReports(notify)
        self._hurry = hurry
        self._with_proxy = with_proxy
        self._cluster = Cluster(fleet, source.stem, address)
        self._access = ProxyAccess(fleet)
        self._proxy: ManagedProcess | None = None
        self._watching: asyncio.Task[None] | None = None
        self._written = b""
        self.state = new_record(fleet, str(source), with_proxy=with_proxy)

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
        """Wait until the proxy has exited; returns the reason. Engines that are lost are waited for."""
        while True:
            if self._watching is not None and self._watching.done():
                await self._watching
            if self._proxy is not None and self._proxy.exited():
                return "the proxy is gone"
            await asyncio.sleep(_LOOK_S)

    async def prove_fresh(self) -> FreshProof:
        """Proof of freshness from every node, by its own clock, processes and GPUs; written to ``fresh.json``.

        Raises:
            StaleEngineError: an engine is not fresh, or could not be asked.
        """
        try:
            found = await asyncio.gather(
                *(asyncio.to_thread(self._cluster.call, name, EngineActor.prove, _PROVE_S) for name in self.placed)
            )
        except LostError as error:
            raise StaleEngineError(f"an engine could not be asked: {error}") from error
        proofs = [msgspec.json.decode(each, type=FreshProof) for each in found]
        for name, text in zip(self.placed, found, strict=True):
            (self.run_dir / f"fresh-{name}.json").write_bytes(text)
        worst = next((proof.gpus for proof in proofs if not proof.fresh), proofs[0].gpus)
        proof = FreshProof(
            checked_unix_s=max(each.checked_unix_s for each in proofs),
            since_unix_s=min(each.since_unix_s for each in proofs),
            previous_engine_ids=[],
            engines=[engine for each in proofs for engine in each.engines],
            gpus=worst,
        )
        (self.run_dir / FRESH_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(proof), indent=2))
        reasons = [f"{engine.instance}: {'; '.join(engine.problems)}" for engine in proof.engines if engine.problems]
        if not proof.fresh:
            raise StaleEngineError("; ".join(reasons) or f"GPUs: {worst.reason}")
        return proof

    async def _start(self) -> None:
        if self.fleet.pair_warmup.mode != "off":
            raise StartError("pair_warmup: not for engines on a Ray cluster; leave it off with --on ray")
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._require_state()
        self._notify(await asyncio.to_thread(self._cluster.open))
        _own_signals_again()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self.fleet.ready_timeout_s
        await asyncio.to_thread(self._cluster.place, self.fleet.ready_timeout_s)
        while not all(each.usable for each in self.placed.values()):
            await self._look()
            failed = [each for each in self.placed.values() if each.report and each.report.status == "exited"]
            if failed or loop.time() > deadline_s:
                raise StartError(self._why_not(deadline_s))
            await asyncio.sleep(_LOOK_S)
        with required():
            self._write()
        if self._with_proxy:
            await self._start_proxy(deadline_s)
        self.state.status = "ready"
        self._require_state()
        self._watching = asyncio.create_task(self._watch(), name="fleet-watch")

    def _why_not(self, deadline_s: float) -> str:
        lines = []
        for each in self.placed.values():
            if not each.usable:
                log = self.run_dir / f"{each.name}.log"
                tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
                problem = each.report.problem if each.report else None
                lines.append(
                    f"{each.name} is {each.status}: {problem or 'not ready in time'}; the end of {log}:\n{tail}"
                )
        return "\n".join(lines) or f"not ready within {self.fleet.ready_timeout_s:g} s"

    async def _start_proxy(self, deadline_s: float) -> None:
        """Write the proxy's settings, start it, and wait until it is ready. Raises StartError."""
        config = self.fleet.proxy_config()
        config["instances"] = [peer.model_dump(mode="json", exclude_defaults=True) for peer in self.fleet.peers]
        path = str((self.run_dir / INSTANCES_FILE).resolve())
        config["discovery"] = {"source": "file", "file": {"path": path}, "interval_s": _LOOK_S}
        self._access.write_config(config, self.run_dir / PROXY_CONFIG)
        try:
            self._access.read_certificate()
        except ValueError as error:
            raise StartError(str(error)) from error
        spec = proxy_spec(self.fleet, self.run_dir / PROXY_CONFIG)
        proxy = self._proxy = ManagedProcess(spec, self.run_dir / "proxy.log")
        proxy.start()
        self.state.processes = [
            ProcessState(
                name="proxy",
                kind="proxy",
                pid=proxy.pid,
                created_unix_s=proxy.created_unix_s,
                url=spec.url,
                log=str(proxy.log_path),
                mark=proxy.mark,
            )
        ]
        self._require_state()
        async with self._access.client() as client:
            while not await _answers(client, spec.ready_urls[0]):
                if proxy.exited():
                    raise StartError(f"the proxy ended before it was ready:\n{proxy.log_tail()}")
                if asyncio.get_running_loop().time() > deadline_s:
                    raise StartError(f"the proxy was not ready in time:\n{proxy.log_tail()}")
                await asyncio.sleep(_LOOK_S)
        self.state.processes[0].status = "ready"

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._look()
            # Tried again every time until it is written.
            with self._files.tolerated(self.run_dir / INSTANCES_FILE, "the proxy does not follow engines that move"):
                self._write()

    async def _look(self) -> None:
        """Read every actor's report, and start engines again that have ended."""
        await asyncio.gather(*(self._read(each) for each in self.placed.values()))

    async def _read(self, placed: Placed) -> None:
        call, name = self._cluster.call, placed.name
        try:
            text = await asyncio.to_thread(call, name, EngineActor.report, _CALL_S, placed.log_offset)
            report = msgspec.json.decode(text, type=Report)
            before = placed.report
            if before is not None and before.since_unix_s != report.since_unix_s:
                # Another actor, with another log.
                self._notify(f"{name} was started again by Ray on {report.node_ip}, node {report.node_id[:8]}")
                placed.report, placed.log_offset = report, 0
                return
            await self._took(placed, report)
        except LostError as error:
            # Before the first report the actor is being placed, or its first start takes long.
            if placed.report is not None and not placed.lost:
                placed.lost = True
                self._notify(
                    f"{name} does not answer on node {placed.report.node_id[:8]} ({error}); Ray starts it again"
                )

    async def _took(self, placed: Placed, report: Report) -> None:
        """Keep a report. Raises LostError: the engine should start again, and its actor does not answer."""
        before = placed.report
        placed.report, placed.lost = report, False
        self._append(placed, report)
        if report.status != "exited":
            placed.restart_at_s = None
            return
        now_s = asyncio.get_running_loop().time()
        if before is not None and before.status != "exited":
            self._notify(f"{placed.name} {report.problem}; log: {self.run_dir / placed.name}.log")
        if self.state.status != "ready" or self.fleet.restart != "on_failure":
            return
        if placed.restart_at_s is None and placed.restarts < self.fleet.max_restarts:
            pause_s = min(_MAX_BACKOFF_S, self.fleet.restart_backoff_s * 2**placed.restarts)
            placed.restart_at_s = now_s + pause_s
            self._notify(f"{placed.name} restarts in {pause_s:g} s (restart {placed.restarts + 1})")
        elif placed.restart_at_s is not None and now_s >= placed.restart_at_s:
            placed.restarts, placed.restart_at_s = placed.restarts + 1, None
            await asyncio.to_thread(self._cluster.call, placed.name, EngineActor.start, _CALL_S)

    def _append(self, placed: Placed, report: Report) -> None:
        """Append a report's piece of the log; a piece for which the disk has no room is asked for again."""
        path = self.run_dir / f"{placed.name}.log"
        if report.log:
            with self._files.tolerated(path, "the engine keeps its log on its node"), path.open("ab", 0) as log:
                placed.log_offset = report.log_offset - len(report.log) + log.write(report.log)

    def _write(self) -> None:
        """Replace the files with the engines that can be used and with the nodes, if they have changed.

        Raises:
            OSError: a file cannot be written, with its path.
        """
        usable = [each.report.instance for each in self.placed.values() if each.usable and each.report]
        nodes = [
            {
                "name": each.name,
                "status": each.status,
                "node_id": each.report.node_id if each.report else None,
                "node_ip": each.report.node_ip if each.report else None,
                "pid": each.report.pid if each.report else 0,
                "restarts": each.restarts,
            }
            for each in self.placed.values()
        ]
        text = msgspec.json.encode(usable) + msgspec.json.encode(nodes)
        if text == self._written:
            return
        for name, content in ((INSTANCES_FILE, usable), (NODES_FILE, nodes)):
            replace_file(self.run_dir / name, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
        self._written = text

    async def _stop(self, status: str) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        self.state.status = "stopping"
        self._record_state()
        if self._proxy is not None and not self._proxy.exited():
            self._notify(f"stopping: requests in progress have up to {self.fleet.proxy_stop_s:g} s; again: at once")
            await stop_processes([self._proxy], self.fleet.proxy_stop_s, self._hurry)
        await asyncio.to_thread(self._cluster.close, self.fleet.stop_grace_s)
        for process in self.state.processes:
            process.status = "stopped"
        self.state.status = status
        self._record_state()

    def _record_state(self) -> None:
        """Write the state, or report that it cannot be written: the stop does not depend on it."""
        with self._files.tolerated(self.run_dir / STATE_FILE, "`status` and `down` read an older state"):
            write_state(self.run_dir, self.state)

    def _require_state(self) -> None:
        """Write the state of a fleet being started. Raises StartError: `status` and `down` would not find the fleet."""
        with required():
            write_state(self.run_dir, self.state)


def _own_signals_again() -> None:
    """Put this process's signal handlers back: joining Ray replaces them by one that ends the process after 3 s."""
    if threading.current_thread() is not threading.main_thread():
        return
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.getsignal(signum))
        signal.siginterrupt(signum, False)


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.HTTPError:
        return False
