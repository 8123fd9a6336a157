"""Simulated engines as real processes on free ports, which can be killed and restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


WORKERS = 8
"""Processes of pytest that have ports of their own; of more, two would take each other's."""
_FIRST_PORT, _PORTS = 11_000, 750
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_numbers = count(os.getpid() % _PORTS)


def free_port() -> int:
    """A free port below the range for outgoing connections, which could take it before it is used."""
    while True:
        port = _FIRST_PORT + _PORTS * (_WORKER % WORKERS) + next(_numbers) % _PORTS
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def free_ports(count: int) -> int:
    """The first of ``count`` consecutive free ports."""
    while True:
        first = free_port()
        rest = [free_port() for _ in range(count - 1)]
        if rest == list(range(first + 1, first + count)):
            return first


@dataclass
class SimEngine:
    """One ``python -m sim`` process."""

    log: Path
    flags: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    bootstrap_port: int = field(default_factory=free_port)
    address: str = "127.0.0.1"
    """Address on which ``flags`` make it listen."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    @property
    def bootstrap_url(self) -> str:
        return f"http://127.0.0.1:{self.bootstrap_port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "sim", "--port", str(self.port), "--bootstrap-port", str(self.bootstrap_port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, *self.flags], cwd=ROOT, stdout=log, stderr=log)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(timeout=10)
            self.process = None

    async def healthy(self, client: httpx.AsyncClient) -> None:
        for _ in range(1800):
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            try:
                if (await client.get(f"{self.url}/health")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.05)
        raise AssertionError(f"engine on {self.url} did not come up: {self.log.read_text()}")


async def start_engines(
    number_of_engines: int, folder: Path, *flags: str, models: Sequence[str] = ()
) -> list[SimEngine]:
    """``number_of_engines`` engines, all healthy; the caller kills them. ``models``: of each; none: the default."""
    engines = [
        SimEngine(folder / f"engine-{number}.log", (*flags, "--model", models[number]) if models else flags)
        for number in range(number_of_engines)
    ]
    for engine in engines:
        engine.start()
    try:
        async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
            await asyncio.gather(*(engine.healthy(client) for engine in engines))
    except BaseException:
        for engine in engines:
            engine.kill()
        raise
    return engines
