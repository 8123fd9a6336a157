"""Ends of workers and of their parent: killed, shut down, never started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from proxy.gather.peers import PROBE_S
from tests.proxy.serve_process import until, write_settings
from tests.proxy.workers.conftest import AUTHORIZED, StartWorkers, Workers

pytestmark = [pytest.mark.fleet, pytest.mark.first]


async def whose(workers: Workers) -> dict[int, int]:
    """Process id by worker."""
    return {row["worker"]: row["pid"] for row in await workers.stats()}


async def until_they_shut_down(workers: Workers, count: int, since: int = 0) -> None:
    """Wait until so many workers have begun their shutdown, then let the engines end their answers at once.

    Lines of the log before ``since`` do not count.
    """

    async def begun() -> bool:
        return sum("shutting down: " in line for line in workers.served.lines[since:]) == count

    await until(begun)
    for engine in workers.engines:
        engine.token_delay_s = 0.0


@contextlib.contextmanager
def slow_streams(workers: Workers) -> Iterator[None]:
    """Streams of 400 tokens, which end when a test sets the delay of tokens to zero; then the engines' usual ones."""
    usual = [(engine.tokens, engine.token_delay_s) for engine in workers.engines]
    for engine in workers.engines:
        engine.tokens, engine.token_delay_s = 400, 0.1
    try:
        yield
    finally:
        for engine, (tokens, delay_s) in zip(workers.engines, usual, strict=True):
            engine.tokens, engine.token_delay_s = tokens, delay_s


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_worker_breaks_its_streams_only_and_is_started_again(two_workers: Workers) -> None:
    workers = two_workers
    await workers.completed(20)
    policy, restarts = (await workers.get("/policy"))["name"], (await workers.stats())[0]["restarts"]
    before = await workers.metric("warmroute_requests_total")
    await workers.served.client.put("/policy", headers=AUTHORIZED, json={"name": "round_robin"})
    with slow_streams(workers):

        async def streamed() -> bool:
            """True if the stream was complete."""
            async with workers.new_client() as client:
                body = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 60, "stream": True}
                lines = []
                with contextlib.suppress(httpx.HTTPError):
                    async with client.stream("POST", "/v1/completions", json=body) as answer:
                        async for line in answer.aiter_lines():
                            lines.append(line)
                return "data: [DONE]" in lines

        streams = [asyncio.create_task(streamed()) for _ in range(16)]

        async def all_run() -> bool:
            return sum(row["in_flight"] for row in await workers.stats()) == 16

        await until(all_run)
        spread = {row["worker"]: row["in_flight"] for row in await workers.stats()}
        victim = (await whose(workers))[0]
        await workers.kill(victim)
        for engine in workers.engines:
            engine.token_delay_s = 0.0
        complete = sum(await asyncio.gather(*streams))
    assert complete == spread[1]

    async def again() -> bool:
        return await workers.ready() and (await workers.stats())[0]["restarts"] == restarts + 1

    await until(again)
    assert (await whose(workers))[0] != victim
    assert "SIGKILL" in (await workers.stats())[0]["last_end"]

    async def settled() -> bool:
        """True if nothing is in flight: a worker counts a stream after its client has the end of it."""
        return not any((await workers.get("/stats"))["ledger"].values())

    await until(settled)
    # Counters that were shown stay: a smaller sum would be read as a restart.
    assert await workers.metric("warmroute_requests_total") >= before + complete
    await workers.completed(20)
    for _ in range(8):
        async with workers.new_client() as client:
            assert (await client.get("/policy")).json()["name"] == "round_robin"
    restored = await workers.served.client.put("/policy", headers=AUTHORIZED, json={"name": policy})
    assert restored.json()["name"] == policy


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_that_is_ended_finishes_its_requests_and_is_replaced_while_the_proxy_stays_ready(
    two_workers: Workers,
) -> None:
    workers = two_workers
    restarts = sum(row["restarts"] for row in await workers.stats())
    with slow_streams(workers):
        requests = [asyncio.create_task(workers.completed(1, stream=True)) for _ in range(8)]

        async def all_run() -> bool:
            return sum(row["in_flight"] for row in await workers.stats()) == 8

        await until(all_run)
        before = (await whose(workers))[1]
        mark = len(workers.served.lines)
        os.kill(before, signal.SIGTERM)
        await until_they_shut_down(workers, 1, since=mark)
        await asyncio.gather(*requests)

    async def replaced() -> bool:
        async with workers.new_client() as client:
            answer = await client.get("/ready?verbose")
        [condition] = [each for each in answer.json()["conditions"] if each["name"] == "workers"]
        return condition["ok"] and f"{restarts + 1} restart" in condition["detail"] and answer.status_code == 200

    await until(replaced)
    assert (await whose(workers))[1] != before


async def test_a_hung_worker_is_reported_at_once_and_logged_once(start_workers: StartWorkers) -> None:
    workers = await start_workers(2, worker_silence_s=0)
    processes = await whose(workers)
    # Less than the bound on other admin requests, and more than a slow machine needs.
    kept = httpx.Limits(keepalive_expiry=None)
    async with httpx.AsyncClient(base_url=workers.served.url, timeout=5, limits=kept, trust_env=False) as client:
        # The connection is kept, so the worker that has it answers every request of this test.
        asked = int((await client.get("/policy", headers=AUTHORIZED)).headers["x-warmroute-worker"])
        hung = 1 - asked

        async def condition() -> dict[str, Any]:
            answer = await client.get("/ready?verbose")
            assert answer.status_code == 200, answer.text
            [found] = [each for each in answer.json()["conditions"] if each["name"] == "workers"]
            return dict(found)

        async def ok() -> bool:
            return bool((await condition())["ok"])

        async def logged_end() -> bool:
            return any(f"worker {hung} answers again" in line for line in workers.served.lines[mark:])

        mark = len(workers.served.lines)
        os.kill(processes[hung], signal.SIGSTOP)
        try:
            found = await condition()
            assert not found["ok"]
            assert found["detail"] == f"1 of 2 workers serve; worker {hung} does not answer"
            assert "SIGKILL" in found["remedy"]
            assert (await condition())["since_unix_s"] == found["since_unix_s"]
        finally:
            os.kill(processes[hung], signal.SIGCONT)
        await until(ok)
    await until(logged_end)
    log = "".join(workers.served.lines[mark:]).partition(f"worker {hung} answers again")[0]
    silences = [line for line in log.splitlines() if f"worker {hung} does not answer" in line]
    assert len(silences) == 1, silences
    assert silences[0].endswith(f"worker {hung} does not answer GET /ready: no answer within {PROBE_S:g} s")


async def test_sigterm_drains_all_workers_and_the_exit_status_is_zero(start_workers: StartWorkers) -> None:
    workers = await start_workers(2)
    processes = list((await whose(workers)).values())
    for engine in workers.engines:
        engine.tokens, engine.token_delay_s = 400, 0.1  # until the workers shut down
    requests = [asyncio.create_task(workers.completed(1, stream=True)) for _ in range(8)]

    async def all_run() -> bool:
        return sum(row["in_flight"] for row in await workers.stats()) == 8

    await until(all_run)
    for pid in (workers.served.pid, *processes):  # as a service manager may do
        os.kill(pid, signal.SIGTERM)
    await until_they_shut_down(workers, 2)
    assert await workers.served.ended() == 0
    await asyncio.gather(*requests)
    assert not any(psutil.pid_exists(pid) for pid in processes)


async def test_no_worker_outlives_a_killed_parent(start_workers: StartWorkers) -> None:
    workers = await start_workers(2)
    processes = [psutil.Process(pid) for pid in (await whose(workers)).values()]
    workers.served.send(signal.SIGKILL)
    await workers.served.ended()

    async def gone() -> bool:
        return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)

    await until(gone)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_hangup_makes_all_workers_read_their_settings(two_workers: Workers) -> None:
    workers, other = two_workers, "http://127.0.0.1:9"
    first, second = (engine.url for engine in workers.engines)
    settings = workers.folder / "proxy.yaml"
    text = settings.read_text(encoding="utf-8")
    # Once there, once back.
    for written, expected in ((text.replace(second, other), {first, other}), (text, {first, second})):
        settings.write_text(written, encoding="utf-8")
        workers.served.send(signal.SIGHUP)

        async def changed(expected: set[str] = expected) -> bool:
            urls = set()
            for _ in range(6):
                async with workers.new_client() as client:
                    urls |= {row["url"] for row in (await client.get("/instances")).json()["instances"]}
            return urls == expected

        await until(changed)
    await until(workers.ready)


async def test_workers_that_start_after_a_reload_have_what_the_others_have(
    start_workers: StartWorkers, tmp_path: Path
) -> None:
    workers = await start_workers(2)
    client = workers.served.client
    await client.delete("/instances/inst-1?grace_s=0", headers=AUTHORIZED)
    await client.put("/policy", headers=AUTHORIZED, json={"name": "lmetric", "planner": "cost_model"})
    await client.put("/admission", headers=AUTHORIZED, json={"name": "session_cap", "params": {"sessions": 7}})
    settings = tmp_path / "proxy.yaml"
    written = yaml.safe_load(settings.read_text(encoding="utf-8"))
    changed = {**written, "policy": {"name": "round_robin"}, "admission": {"reject_above_s": 9.0}}
    settings.write_text(yaml.safe_dump(changed), encoding="utf-8")
    assert (await client.post("/reload", headers=AUTHORIZED)).json()["result"] == "applied"

    async def state(worker: int) -> tuple[str, str, str]:
        """Policy, planner and admission rule of a worker."""
        found: dict[str, dict[str, Any]] = {}
        while len(found) < 2:
            async with workers.new_client() as each:
                for path in {"/policy", "/admission"} - set(found):
                    answer = await each.get(path)
                    if answer.headers["x-warmroute-worker"] == str(worker):
                        found[path] = answer.json()
        policy = found["/policy"]
        return policy["name"], policy["planner"], found["/admission"]["name"]

    expected = ("round_robin", "cost_model", "session_cap")
    assert await state(0) == expected
    for process in (await whose(workers)).values():
        await workers.kill(process)

    async def again() -> bool:
        try:
            return await workers.ready() and all(row["restarts"] == 1 for row in await workers.stats())
        except httpx.HTTPError:
            return False  # no worker listens

    await until(again)
    assert (await state(0), await state(1)) == (expected, expected)
    rows = (await workers.get("/instances"))["instances"]
    assert [row["name"] for row in rows] == ["inst-0", "inst-1"]


async def test_workers_that_cannot_start_end_the_parent_with_their_status(tmp_path: Path) -> None:
    config = tmp_path / "proxy.yaml"
    write_settings(
        config,
        {
            "workers": 2,
            "instances": [{"url": "http://127.0.0.1:9"}],
            "logs": {"access": str(tmp_path)},
        },
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "--config", str(config)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        _, log = await process.communicate()
    assert process.returncode == 2
    assert b"before it served" in log
