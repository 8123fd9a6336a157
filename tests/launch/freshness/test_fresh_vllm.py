"""The proof of freshness against the metric names of vLLM 0.18.1: a warm-up request of any kind makes it stale."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from aiohttp import web

from launch.engines.commands import ProcessSpec
from launch.freshness.gpus import NONE, UNKNOWN, GpuProof
from launch.freshness.proof import EngineFacts, FreshProof, StaleEngineError, prove_fresh
from launch.hardware.gpus import Gpu, GpuInventory, GpuProcess
from launch.run.processes import ManagedProcess
from launch.run.state import ProcessState
from tests.launch.conftest import REPOSITORY, free_base

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "prompt_tokens",
    "generation_tokens",
)
NO_GPU = GpuInventory(reason="no NVIDIA driver")


def exposition(started_unix_s: float | None, *, without: tuple[str, ...] = (), **values: float) -> str:
    """A page as vLLM writes it, all zero but ``values``."""
    label = '{engine="0",model_name="tiny"}'
    lines = []
    for name in GAUGES:
        lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{label} {values.get(name, 0.0)}"]
    for name in COUNTERS:
        lines += [
            f"# TYPE vllm:{name}_total counter",
            f"vllm:{name}_total{label} {values.get(name, 0.0)}",
            f"# TYPE vllm:{name}_created gauge",
            f"vllm:{name}_created{label} 1.7952e+09",
        ]
    lines.append("# TYPE vllm:request_success_total counter")
    for reason in ("stop", "length", "abort"):
        value = values.get(f"success_{reason}", 0.0)
        lines.append(f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="tiny"}} {value}')
    if started_unix_s is not None:
        lines += ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {started_unix_s}"]
    return "\n".join(line for line in lines if not any(f"vllm:{name}" in line for name in without)) + "\n"


@asynccontextmanager
async def engine(metrics: str, version: str | None = "0.18.1") -> AsyncIterator[str]:
    """An HTTP server that answers as an engine does; its URL."""

    async def answer_metrics(request: web.Request) -> web.Response:
        return web.Response(text=metrics)

    async def answer_version(request: web.Request) -> web.Response:
        return web.json_response({"version": version})

    app = web.Application()
    app.router.add_get("/metrics", answer_metrics)
    if version is not None:
        app.router.add_get("/version", answer_version)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_base()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def remote(url: str) -> ProcessState:
    return ProcessState(name="e", kind="vllm", pid=0, created_unix_s=0, url=url, log="")


async def prove(metrics: str, *, since_unix_s: float, process: Callable[[str], ProcessState] = remote) -> FreshProof:
    async with engine(metrics) as url:
        return await prove_fresh([process(url)], since_unix_s=since_unix_s, gpus=NO_GPU)


async def test_an_engine_that_did_nothing_is_fresh(tmp_path: Path) -> None:
    now = time.time()
    async with engine(exposition(now)) as url:
        path = tmp_path / "fresh.json"
        proof = await prove_fresh([remote(url)], since_unix_s=now - 1, gpus=NO_GPU, path=path)
    assert (proof.fresh, proof.schema, proof.engines[0].version) == (True, 2, "0.18.1")
    assert (proof.gpus.status, proof.warnings) == (NONE, [])
    assert msgspec.json.decode(path.read_bytes(), type=FreshProof) == proof


@pytest.mark.parametrize(
    ("name", "reported"),
    [(name, f"vllm:{name}") for name in GAUGES]
    + [(name, f"vllm:{name}_total") for name in COUNTERS]
    + [("success_abort", "vllm:request_success_total")],
)
async def test_one_figure_above_zero_makes_it_stale(name: str, reported: str) -> None:
    now = time.time()
    figures: dict[str, Any] = {name: 0.5}
    with pytest.raises(StaleEngineError, match=rf"e: {reported} is 0\.5, not 0"):
        await prove(exposition(now, **figures), since_unix_s=now - 1)


async def test_a_warm_up_request_makes_it_stale() -> None:
    now = time.time()
    warm = exposition(now, prefix_cache_queries=8, prompt_tokens=8, generation_tokens=1, success_length=1)
    with pytest.raises(StaleEngineError) as caught:
        await prove(warm, since_unix_s=now - 1)
    for reported in ("prefix_cache_queries_total is 8", "prompt_tokens_total is 8", "request_success_total is 1"):
        assert reported in str(caught.value)


async def test_what_may_be_absent_and_what_may_not() -> None:
    now = time.time()
    optional = ("external_prefix_cache", "generation_tokens", "prefix_cache_hits", "prefix_cache_queries", "request")
    assert (await prove(exposition(now, without=optional), since_unix_s=now - 1)).fresh
    with pytest.raises(StaleEngineError, match="does not report vllm:kv_cache_usage_perc"):
        await prove(exposition(now, without=("kv_cache_usage_perc",)), since_unix_s=now - 1)
    with pytest.raises(StaleEngineError, match=r"reports none of vllm:prefix_cache_queries_total, vllm:prompt_tokens"):
        await prove(exposition(now, without=("prefix_cache_queries", "prompt_tokens")), since_unix_s=now - 1)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[ManagedProcess]:
    """A process as the launcher starts engines."""
    process = ManagedProcess(
        ProcessSpec(name="e", kind="vllm", command=(sys.executable, "-c", "import time; time.sleep(60)")),
        tmp_path / "e.log",
    )
    process.start()
    yield process
    process.kill_hard()
    process.reap()


async def test_the_process_behind_it_is_identified(started: ManagedProcess) -> None:
    def own(url: str) -> ProcessState:
        return ProcessState(
            name="e", kind="vllm", pid=started.pid, created_unix_s=started.created_unix_s, url=url, log=""
        )

    created = started.created_unix_s
    proof = await prove(exposition(created + 1), since_unix_s=created - 5, process=own)
    (facts,) = proof.engines
    assert (facts.pid, facts.process_started_unix_s) == (started.pid, created)
    assert facts.command_sha256 == hashlib.sha256("\0".join(started.spec.command).encode()).hexdigest()

    # Several API servers: no start time in /metrics, so the kernel's counts.
    assert (await prove(exposition(None), since_unix_s=created - 1, process=own)).fresh
    with pytest.raises(StaleEngineError, match=r"started 60\.0 s before the arm did"):
        await prove(exposition(None), since_unix_s=created + 60, process=own)
    with pytest.raises(StaleEngineError, match="does not report process_start_time_seconds"):
        await prove(exposition(None), since_unix_s=created - 1)

    # A leftover engine on the port answers in place of the one that was started.
    with pytest.raises(StaleEngineError, match=r"the process behind its URL started 30\.0 s before the one"):
        await prove(exposition(created - 30), since_unix_s=created - 60, process=own)


async def test_a_recycled_pid_is_not_taken_for_the_engine() -> None:
    now = time.time()

    def another(url: str) -> ProcessState:
        return ProcessState(name="e", kind="vllm", pid=os.getpid(), created_unix_s=now - 86400, url=url, log="")

    (facts,) = (await prove(exposition(now), since_unix_s=now - 1, process=another)).engines
    assert (facts.pid, facts.process_started_unix_s, facts.command_sha256) == (0, None, None)


async def test_strangers_on_its_gpus_refuse_it_and_the_unknown_is_reported(
    monkeypatch: pytest.MonkeyPatch, started: ManagedProcess
) -> None:
    now = time.time()

    def gpus(*pids: int) -> GpuInventory:
        used = [GpuProcess(pid=pid, name="python3", memory_bytes=2 * 10**9) for pid in pids]
        return GpuInventory(
            gpus=[
                Gpu(index=0, uuid="GPU-0", name="H200", memory_total_bytes=1, memory_used_bytes=1 << 33, processes=used)
            ]
        )

    def own(url: str) -> ProcessState:
        return ProcessState(
            name="e", kind="vllm", pid=started.pid, created_unix_s=started.created_unix_s, url=url, log=""
        )

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    child = next(process.pid for process in _children(started.pid))
    async with engine(exposition(now)) as url:

        async def check(inventory: GpuInventory) -> FreshProof:
            return await prove_fresh([own(url)], since_unix_s=started.created_unix_s - 5, gpus=inventory)

        assert (await check(gpus(child))).gpus.status == "ok"
        with pytest.raises(
            StaleEngineError, match=rf"GPU 0: process {os.getpid()} \(.*, 2\.0 GB\) is not of this fleet"
        ):
            await check(gpus(child, os.getpid()))
        unknown = await check(gpus())
    assert (unknown.fresh, unknown.gpus.status) == (True, UNKNOWN)
    assert "lists no process of the fleet" in unknown.warnings[0]


def _children(pid: int) -> list[psutil.Process]:
    """The guard's children, once it has any."""
    for _ in range(400):
        if found := psutil.Process(pid).children(recursive=True):
            return found
        time.sleep(0.01)
    raise AssertionError("the guard started nothing")


def test_the_document_names_every_key_of_fresh_json() -> None:
    text = (REPOSITORY / "docs" / "fleet.md").read_text(encoding="utf-8")
    table = text[text.index("## What `fresh.json` holds") : text.index("## GPU telemetry")]
    keys = {*FreshProof.__struct_fields__, *EngineFacts.__struct_fields__, *GpuProof.__struct_fields__}
    assert [key for key in sorted(keys - {"engines"}) if f"{key}`" not in table] == []


async def test_pages_that_a_real_engine_wrote() -> None:
    """`/metrics` of vLLM 0.18.1 on the CPU, cut to the checked figures: after start-up, and after requests."""
    data = Path(__file__).with_name("data")
    assert (await prove((data / "vllm-0.18.1-fresh.prom").read_text(), since_unix_s=0)).fresh
    with pytest.raises(StaleEngineError) as caught:
        await prove((data / "vllm-0.18.1-used.prom").read_text(), since_unix_s=0)
    for name in (*COUNTERS, "request_success"):
        assert f"vllm:{name}_total is " in str(caught.value)
