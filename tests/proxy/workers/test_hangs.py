"""Workers that hang are replaced. Where limits are short, killing a healthy worker too only makes a test slower."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.policies.test_registry import declare
from tests.proxy.serve_process import until
from tests.proxy.workers.conftest import StartWorkers, Workers

pytestmark = [pytest.mark.fleet, pytest.mark.first, pytest.mark.timeout(600)]

SHORT_S = 3.0
LONG_S = 10.0
"""Much longer than a healthy worker on a loaded machine is silent."""

HANGING = '''
import pathlib
import threading
from dataclasses import dataclass
from typing import ClassVar

from policies.types import CandidateScore, Choice, Reason


@dataclass(frozen=True)
class Hanging:
    """Takes the first instance. Waits for a lock that it has itself, once, if the file is there."""

    name: ClassVar[str] = "hanging"
    file: str = ""

    def choose(self, request, fleet):
        try:
            pathlib.Path(self.file).unlink()
        except FileNotFoundError:
            scores = tuple(CandidateScore(view.instance, 0.0, {}) for view in fleet.instances)
            return Choice(scores[0].instance, Reason.LOWEST_SCORE, scores)
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
'''


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait longer than for anything that a worker does, for what comes after ends and starts of some.

    What fails meanwhile, as its worker hangs or is killed, is repeated.
    """
    async with asyncio.timeout(300):
        while True:
            with contextlib.suppress(httpx.HTTPError, AssertionError, KeyError):
                if await holds():
                    return
            await asyncio.sleep(0.1)


def all_serve_without(workers: Workers, pid: int) -> Callable[[], Awaitable[bool]]:
    """True if a process is gone and connections reach every worker."""

    async def holds() -> bool:
        if psutil.pid_exists(pid):
            return False
        async with workers.new_client() as client:
            answer = await client.get("/ready?verbose", timeout=5)
        [condition] = [each for each in answer.json()["conditions"] if each["name"] == "workers"]
        if not condition["ok"]:
            return False
        await workers.completed(16)
        return all(row["started"] for row in await workers.stats())

    return holds


async def test_a_stopped_worker_is_replaced_and_its_streams_end(start_workers: StartWorkers) -> None:
    workers = await start_workers(2, worker_silence_s=SHORT_S)
    for engine in workers.engines:
        engine.tokens, engine.token_delay_s = 400, 0.1  # until the worker is replaced

    async def streamed() -> bool:
        """True if the stream was complete."""
        async with workers.new_client() as client:
            body = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 400, "stream": True}
            lines = []
            with contextlib.suppress(httpx.HTTPError):
                async with client.stream("POST", "/v1/completions", json=body, timeout=300) as answer:
                    async for line in answer.aiter_lines():
                        lines.append(line)
            return "data: [DONE]" in lines

    streams = [asyncio.create_task(streamed()) for _ in range(12)]

    async def all_run() -> bool:
        return sum(row["in_flight"] for row in await workers.stats()) == 12

    await until(all_run)
    rows = {row["worker"]: row for row in await workers.stats()}
    victim = rows[0]["pid"]
    os.kill(victim, signal.SIGSTOP)

    async def gone() -> bool:
        return not psutil.pid_exists(victim)

    await eventually(gone)
    for engine in workers.engines:
        engine.token_delay_s = 0.0
    async with asyncio.timeout(300):
        complete = sum(await asyncio.gather(*streams))
    assert complete <= rows[1]["in_flight"]
    for engine in workers.engines:
        engine.tokens = 4
    await eventually(all_serve_without(workers, victim))

    async def forgotten() -> bool:
        return not any((await workers.get("/stats"))["ledger"].values())

    await eventually(forgotten)

    async def counted() -> bool:
        """Read again, as `/metrics` waits for workers that are away."""
        return await workers.metric("warmroute_worker_restarts_total", worker="0", reason="hung") >= 1

    await eventually(counted)
    row = (await workers.stats())[0]
    assert row["hung"] >= 1
    assert row["restarts"] >= row["hung"]
    log = "".join(workers.served.lines)
    killed = f"worker 0 (process {victim}, stopped) has shown no life for "
    assert killed in log
    assert f"(process {victim}) showed no life for " in log
    assert "it did not write them" in log.partition(killed)[2].partition("\n")[0]


async def test_a_worker_whose_event_loop_is_blocked_is_replaced_and_the_log_has_the_place(
    start_workers: StartWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_hanging.py").write_text(HANGING, encoding="utf-8")
    declare(tmp_path, "acme-hanging", "[warmroute.routing]\nhanging = acme_hanging:Hanging\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    flag = tmp_path / "hang"
    policy = {"name": "hanging", "params": {"file": str(flag)}}
    workers = await start_workers(2, worker_silence_s=SHORT_S, policy=policy)
    processes = {row["pid"] for row in await workers.stats()}
    flag.touch()
    body = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 4}
    async with workers.new_client() as client:
        with pytest.raises(httpx.TransportError) as caught:
            await client.post("/v1/completions", json=body, timeout=300)
    assert not isinstance(caught.value, httpx.TimeoutException), "its connection ends with the worker"
    [line] = [each for each in workers.served.lines if "has shown no life for " in each][:1]
    victim = next(pid for pid in processes if f"(process {pid}, " in line)
    await eventually(all_serve_without(workers, victim))
    stacks = line.partition("its threads: ")[2]
    assert "acme_hanging.py" in stacks
    assert "in choose" in stacks


async def test_workers_that_were_stopped_together_with_their_parent_live_on(start_workers: StartWorkers) -> None:
    workers = await start_workers(2, worker_silence_s=LONG_S)
    before = [row["pid"] for row in await workers.stats()]
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(LONG_S / 20)  # the parent reads what they had sent
    workers.served.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(LONG_S + 2)
    finally:
        workers.served.send(signal.SIGCONT)
        await asyncio.sleep(LONG_S / 10)  # it looks before they can answer
        for pid in before:
            os.kill(pid, signal.SIGCONT)
    for _ in range(4):
        await until(workers.ready)
        await asyncio.sleep(LONG_S / 20)
    assert [row["pid"] for row in await workers.stats()] == before
    assert not any("no life" in line for line in workers.served.lines)
