"""Traces through a real OpenTelemetry collector, built by `make collector`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from proxy.tracing.exporter import TraceResult
from tests.integration.fleet import free_port
from tests.proxy.conftest import StartProxy
from tests.proxy.tracing.receiver import TraceReceiver, trace_receiver
from tests.proxy.tracing.test_traces import HAND_OFF, SAMPLED, TRACE, assert_one_tree

ROOT = Path(__file__).parents[3]
BINARY = Path(os.environ.get("WARMROUTE_COLLECTOR", ROOT / ".collector" / "out" / "otelcol-warmroute"))

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(not BINARY.exists(), reason="no OpenTelemetry collector: `make collector` builds it"),
]


@contextlib.asynccontextmanager
async def collector(folder: Path, to: TraceReceiver) -> AsyncIterator[str]:
    """A collector process that passes traces on to ``to``; its URL."""
    port = free_port()
    config = {
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"127.0.0.1:{port}"}}}},
        "exporters": {"otlphttp": {"endpoint": to.url, "compression": "none"}},
        "service": {
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["otlphttp"]}},
        },
    }
    path = folder / "collector.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    output = folder / "collector.log"
    with output.open("wb") as log:
        process = await asyncio.create_subprocess_exec(BINARY, "--config", path, stdout=log, stderr=log)
    try:
        for _ in range(1000):
            assert process.returncode is None, output.read_text(encoding="utf-8")
            if b"Everything is ready" in output.read_bytes():
                break
            await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_handed_off_request_arrives_complete_behind_a_real_collector(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    async with trace_receiver() as receiver, collector(tmp_path, receiver) as url:
        tracing = {"enabled": True, "endpoint": url, "sample_ratio": 0, "interval_s": 0.05}
        proxy = await start_proxy(**HAND_OFF, tracing=tracing)
        body = {"model": "stub", "prompt": list(range(200)), "max_tokens": 4}
        answer = await proxy.client.post("/v1/completions", json=body, headers=SAMPLED)
        assert answer.status_code == 200
        await receiver.got()
        assert proxy.core.tracing.results[TraceResult.EXPORTED] == 1
    assert_one_tree(receiver.spans)
    assert receiver.root().trace_id == TRACE
    assert receiver.root().attributes["gen_ai.usage.input_tokens"] == 200
    assert {span.name for span in receiver.spans} >= {"route", "prefill leg", "decode leg", "first token"}
    assert receiver.resources[0]["service.name"] == "warmroute"
