"""One engine on a node of a Ray cluster: the actor that starts it, watches it and reads its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Collection
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import msgspec

from launch.engines.commands import KINDS, ProcessSpec, engine_specs
from launch.fleet.file import FleetFile
from launch.freshness.proof import StaleEngineError, prove_fresh
from launch.run.effective import effective_config_problems
from launch.run.processes import ManagedProcess, StartError, stop_processes
from launch.run.state import ProcessState

NAMESPACE = "warmroute"
"""Ray namespace of all fleets."""
_PROBE_S = 2.0
_LOG_BYTES = 256 * 1024
"""Longest piece of a log in one report."""
_DEVICES = "CUDA_VISIBLE_DEVICES"


class Report(msgspec.Struct, kw_only=True):
    """State of an actor's engine."""

    name: str
    node_id: str
    node_ip: str
    pid: int
    """Of the engine's guard on its node; 0: it does not run."""
    starts: int
    """Times this actor has started it."""
    since_unix_s: float
    """Start of this actor, by its node's clock."""
    status: str
    """starting, ready or exited."""
    instance: dict[str, Any]
    """Its entry in the proxy's settings."""
    problem: str | None = None
    """Reason why it cannot be used."""
    log: bytes = b""
    """Its log from the offset that was asked for."""
    log_offset: int = 0
    """Offset after that piece."""


class EngineActor:
    """An engine on the node where Ray has placed this actor.

    Ray runs it again on another node when its node is lost. The engine ends with the actor's process, however that
    ends (`launch.run.guard`).

    Args:
        fleet: the whole fleet.
        index: of this instance.
    """

    def __init__(self, fleet: FleetFile, index: int) -> None:
        import ray

        context = ray.get_runtime_context()
        self._node_id = context.get_node_id()
        # As the node has registered itself: a look at this host's interfaces finds another one.
        self._node_ip = next(each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == self._node_id)
        address = self._node_ip if fleet.host == "127.0.0.1" else fleet.host
        # A copy without values that were worked out for the launcher's own machine.
        self._fleet = FleetFile(
            **{**fleet.model_dump(exclude_unset=True), "host": address, "advertise_host": self._node_ip}
        )
        self._index = index
        self._folder = Path(tempfile.mkdtemp(prefix="warmroute-engine-"))
        self._process = ManagedProcess(self._spec(), self._folder / "engine.log")
        self._since_unix_s = time.time()
        self._starts = 0
        self._ready = False
        self._problem: str | None = None
        self.start()

    def start(self) -> None:
        """Start the engine, for the first time or again."""
        self._ready, self._problem = False, None
        lacking = [*KINDS[self._fleet.kind].problems(self._fleet, os.environ), *self._taken()]
        if lacking:
            self._problem = "; ".join(lacking)
            return
        try:
            self._process.start()
            self._starts += 1
        except StartError as error:
            self._problem = str(error)

    def report(self, log_offset: int = 0) -> bytes:
        """The engine's state now, and its log from an offset on, as a JSON `Report`."""
        status = self._status()
        log, offset = self._log(log_offset)
        member = self._fleet.members[self._index]
        return msgspec.json.encode(
            Report(
                name=member.name,
                node_id=self._node_id,
                node_ip=self._node_ip,
                pid=self._process.pid,
                starts=self._starts,
                since_unix_s=self._since_unix_s,
                status=status,
                instance=self._fleet.proxy_config()["instances"][self._index],
                problem=self._problem,
                log=log,
                log_offset=offset,
            )
        )

    def prove(self, previous_engine_ids: Collection[str] = ()) -> bytes:
        """Proof of freshness by this node's clock, processes and GPUs, as JSON; its ``engines`` have the problems."""
        spec, path = self._process.spec, self._folder / "fresh.json"
        state = ProcessState(
            name=spec.name,
            kind=spec.kind,
            pid=self._process.pid,
            created_unix_s=self._process.created_unix_s,
            url=spec.url,
            bootstrap_url=spec.bootstrap_url,
            log=str(self._process.log_path),
            devices=list(spec.member.devices) if spec.member else [],
        )
        with contextlib.suppress(StaleEngineError):  # the proof has the reasons
            asyncio.run(
                prove_fresh(
                    [state], since_unix_s=self._since_unix_s, previous_engine_ids=previous_engine_ids, path=path
                )
            )
        return path.read_bytes()

    def stop(self) -> None:
        """End the engine and its whole process tree, within the fleet's ``stop_grace_s``."""
        asyncio.run(stop_processes([self._process], self._fleet.stop_grace_s))

    def _spec(self) -> ProcessSpec:
        spec = engine_specs(self._fleet)[self._index]
        given = os.environ.get(_DEVICES)
        if spec.member is None or not spec.member.devices or given is None:
            return spec
        # Ray has chosen the GPUs of this actor.
        return replace(spec, environment={**spec.environment, _DEVICES: given})

    def _taken(self) -> list[str]:
        taken = []
        for port, owner in chain.from_iterable(self._fleet.members[self._index].ports()):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self._fleet.host, port))
                except OSError as error:
                    taken.append(f"port {port} for {owner} is not free on {self._node_ip} ({error.strerror})")
        return taken

    def _status(self) -> str:
        if self._problem is not None or self._process.exited():
            if self._problem is None:
                self._problem = f"ended with code {self._process.reap()}"
            self._ready = False
            return "exited"
        if not self._ready:
            self._ready = self._answers()
            if self._ready and (problems := effective_config_problems(self._process)):
                self._problem = "; ".join(problems)
        return "ready" if self._ready else "starting"

    def _answers(self) -> bool:
        try:
            with httpx.Client(timeout=_PROBE_S, trust_env=False) as client:
                return all(client.get(url).status_code == 200 for url in self._process.spec.ready_urls)
        except httpx.HTTPError:
            return False

    def _log(self, offset: int) -> tuple[bytes, int]:
        try:
            with self._process.log_path.open("rb") as log:
                log.seek(offset)
                piece = log.read(_LOG_BYTES)
        except OSError:
            return b"", offset
        return piece, offset + len(piece)
