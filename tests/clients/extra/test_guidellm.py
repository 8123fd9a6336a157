"""GuideLLM against the proxy; the features are the rows of docs/clients.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.extra.rig import EXTRA, MODEL, Client, Recorded, check_traffic

pytestmark = [*EXTRA, pytest.mark.asyncio(loop_scope="module")]


async def benchmark(client: Client, url: str, tokenizer: Path, backend: str, data: str) -> dict[str, Any]:
    """Ten requests, one after the other; the metrics."""
    client.variables = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    report = client.folder / "report.json"
    done = await client.run(
        *("bin/guidellm", "run", "--backend", f"kind=openai_http,target={url},model={MODEL}{backend}"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=10"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=1500,output_tokens=10{data}"),
        *("--output", f"kind=json,path={report}", "--disable-console-interactive"),
    )
    assert done.checked
    return json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0]["metrics"]


async def test_conversations_streamed(
    client_of: Callable[[str], Client], fleet_url: str, recorded: Recorded, tokenizer: Path
) -> None:
    metrics = await benchmark(client_of("guidellm"), fleet_url, tokenizer, "", ",turns=2")
    assert metrics["request_totals"]["successful"] == 10
    rows = await recorded.new(10)
    assert {(row["endpoint"], row["stream"]) for row in rows} == {("/v1/chat/completions", True)}
    assert len({row["session_id"] for row in rows}) == 5
    assert {row["session_source"] for row in rows} == {"prefix"}
    check_traffic("guidellm", rows)


async def test_completions(
    client_of: Callable[[str], Client], fleet_url: str, recorded: Recorded, tokenizer: Path
) -> None:
    backend = ",request_format=/v1/completions,stream=false"
    metrics = await benchmark(client_of("guidellm"), fleet_url, tokenizer, backend, "")
    assert metrics["request_totals"]["successful"] == 10
    rows = await recorded.new(10)
    assert {(row["endpoint"], row["stream"]) for row in rows} == {("/v1/completions", False)}
    check_traffic("guidellm", rows)
