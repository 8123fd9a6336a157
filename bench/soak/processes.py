"""The processes of a run: the proxy as users start it, and simulated engines that are killed and restarted."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import sys
from pathlib import Path

import aiohttp
import yaml

from bench.soak.plan import MODEL, POLITE_KEY, TENANT_KEY, SoakPlan
from launch.engines.commands import ProcessSpec
from launch.run.processes import ManagedProcess, stop_processes

READY_S = 60.0
_PORTS = range(22_000, 29_000)
"""Below the kernel's range for outgoing connections, which could take a port before it is bound, and above the ports
that other tests choose at the same time.
"""


class SoakError(Exception):
    """The run could not be made."""


def free_port(draw: random.Random) -> int:
    """A free port."""
    while True:
        port = draw.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def engine_process(number: int, port: int, plan: SoakPlan, folder: Path) -> ManagedProcess:
    """One simulated engine; all have the same seed, so equal requests have equal answers on each."""
    command = (
        *(sys.executable, "-m", "sim", "--port", str(port), "--role", "none", "--model", MODEL),
        *("--engine-speed", str(plan.time_scale), "--flush-ms", str(plan.flush_ms)),
    )
    spec = ProcessSpec(f"engine-{number}", "sim", command, url=f"http://127.0.0.1:{port}")
    return ManagedProcess(spec, folder / f"engine-{number}.log")


def proxy_process(port: int, engines: list[ManagedProcess], plan: SoakPlan, folder: Path) -> ManagedProcess:
    """The proxy in front of them: resuming, with keys. Small rings fill early; memory is constant from then on."""
    settings = {
        "port": port,
        "instances": [{"name": engine.spec.name, "url": engine.spec.url} for engine in engines],
        "health": {"interval_s": 0.5},
        "timeouts": {"first_byte_s": 60.0, "idle_s": 20.0, "total_s": 120.0, "header_s": 3.0, "body_s": 5.0},
        "limits": {"body_bytes": plan.body_bytes},
        "resume": {"enabled": "always"},
        "keys": {
            "client": [
                {"name": "polite", "sha256": _digest(POLITE_KEY)},
                {"name": "hostile", "sha256": _digest(TENANT_KEY), "max_concurrent": 8},
            ]
        },
        "breakdown": {
            "capacity": 1_000,
            "jsonl_path": str(folder / "breakdown.jsonl"),
            "jsonl_files": 1_000,  # every row is compared with the clients' requests
            "rejected_to_jsonl": True,
        },
        "grace_s": 10.0,
    }
    path = folder / "proxy.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = (sys.executable, "-m", "warmroute", "serve", "--config", str(path))
    spec = ProcessSpec("proxy", "proxy", command, url=f"http://127.0.0.1:{port}", drop_environment_prefix="WARMROUTE_")
    return ManagedProcess(spec, folder / "proxy.log")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def until_ready(process: ManagedProcess, session: aiohttp.ClientSession, path: str = "/health") -> None:
    """Wait until the process answers 200.

    Raises:
        SoakError: it exited, or took longer than ``READY_S``.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + READY_S
    while loop.time() < deadline_s:
        if process.exited():
            raise SoakError(f"{process.spec.name} ended:\n{process.log_tail()}")
        try:
            async with session.get(process.spec.url + path, timeout=aiohttp.ClientTimeout(total=2)) as answer:
                if answer.status == 200:
                    return
        except (aiohttp.ClientError, TimeoutError):
            pass
        await asyncio.sleep(0.1)
    raise SoakError(f"{process.spec.name} did not answer within {READY_S:g} s:\n{process.log_tail()}")


class Reaper:
    """Kills engines with SIGKILL at random and restarts them; at most half of the fleet is down at a time."""

    def __init__(self, engines: list[ManagedProcess], plan: SoakPlan) -> None:
        self._engines = engines
        self._plan = plan
        self._draw = random.Random(plan.seed)
        self._down: set[int] = set()
        self.kills = 0

    async def run(self) -> None:
        """Run until cancelled; every engine it killed is restarted first."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await asyncio.sleep(self._draw.expovariate(1 / self._plan.kill_every_s))
                    up = [number for number in range(len(self._engines)) if number not in self._down]
                    if len(up) > max(1, len(self._engines) // 2):
                        group.create_task(self._cycle(self._draw.choice(up)))
        finally:
            for number in sorted(self._down):
                self._engines[number].start()

    async def _cycle(self, number: int) -> None:
        engine = self._engines[number]
        self._down.add(number)
        for process in engine.tree():
            process.kill()
        self.kills += 1
        await stop([engine])
        await asyncio.sleep(self._draw.uniform(0.1, 2 * self._plan.down_s))
        engine.start()
        self._down.discard(number)


async def stop(processes: list[ManagedProcess]) -> None:
    """Stop the processes: SIGTERM, then SIGKILL."""
    await stop_processes(processes, 15.0)
