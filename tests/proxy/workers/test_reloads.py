"""SIGHUP to the parent of several workers."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from pathlib import Path

import psutil
import pytest
import yaml

from tests.proxy.serve_process import until
from tests.proxy.workers.conftest import StartWorkers

pytestmark = pytest.mark.fleet


async def test_no_change_over_http_comes_between_the_reloads_of_two_workers(start_workers: StartWorkers) -> None:
    workers = await start_workers(2)
    path = workers.folder / "proxy.yaml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump({**settings, "policy": {"name": "round_robin"}}), encoding="utf-8")
    pids = {row["worker"]: row["pid"] for row in await workers.stats()}
    sockets = [each.laddr for each in psutil.Process(pids[0]).net_connections("unix") if "worker-" in str(each.laddr)]
    lock = os.open(Path(str(sockets[0])).parent / "changes.lock", os.O_RDWR)

    async def free() -> bool:
        """True if a change may begin."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(lock, fcntl.LOCK_UN)
        return True

    os.kill(pids[1], signal.SIGSTOP)
    try:
        workers.served.send(signal.SIGHUP)
        await workers.served.logged("reload worker 0: .*policy.name: .* -> round_robin")
        assert not await free(), "worker 1 has not reloaded"
    finally:
        os.kill(pids[1], signal.SIGCONT)
    await workers.served.logged("reload worker 1: .*policy.name: .* -> round_robin")
    await until(free)
    os.close(lock)
    async with workers.new_client() as client:
        assert (await client.put("/policy", json={"name": "least_loaded"})).status_code == 200
    workers.served.send(signal.SIGHUP)
    await asyncio.gather(*(workers.served.logged(f"reload worker {each}: .* 0 differing") for each in range(2)))
