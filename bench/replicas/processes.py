"""Replicas as real processes, forked from one that has the imports, so that eight start in the time of one."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import socket
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import yaml

_CONTEXT = multiprocessing.get_context("forkserver")
_END_S = 10.0
_PORTS = (15_000, 32_000)


class ReplicaProcess:
    """One proxy on a port of its own."""

    def __init__(self, config: Path, settings: dict[str, Any]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        config.write_text(yaml.safe_dump({**settings, "port": port}), encoding="utf-8")
        self._process: ForkServerProcess = _CONTEXT.Process(target=_serve, args=(str(config),))
        self._process.start()

    @property
    def alive(self) -> bool:
        """True until it has ended."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Send SIGKILL, which a process cannot handle."""
        self._process.kill()

    def terminate(self) -> None:
        """Send SIGTERM, as a supervisor that stops it."""
        self._process.terminate()

    def ended(self) -> None:
        """Wait for its end, at most 10 s."""
        self._process.join(_END_S)

    def end(self) -> None:
        """Kill it and wait for its end."""
        self._process.kill()
        self.ended()
        self._process.close()


@contextlib.contextmanager
def replica_processes(
    count: int, folder: Path, settings: Callable[[int], dict[str, Any]]
) -> Iterator[list[ReplicaProcess]]:
    """Start replicas with ``settings(number)``, and end them; they may not listen yet."""
    _CONTEXT.set_forkserver_preload(["proxy.server", "proxy.sharing.redis_store"])
    started: list[ReplicaProcess] = []
    try:
        for number in range(count):
            started.append(ReplicaProcess(folder / f"replica-{number}.yaml", settings(number)))
        yield started
    finally:
        for each in started:
            each.end()


def free_port() -> int:
    """A port that nobody uses now, below those that the system gives to connections, which could take it meanwhile."""
    while True:
        port = random.randrange(*_PORTS)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _serve(config: str) -> None:
    from proxy.server import run
    from proxy.settings import load_settings

    run(load_settings(Path(config)), lambda: load_settings(Path(config)))
