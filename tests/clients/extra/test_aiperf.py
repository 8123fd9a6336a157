"""AIPerf against the proxy; the features are the rows of docs/clients.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.extra.rig import EXTRA, MODEL, Client, Recorded, check_traffic

pytestmark = [*EXTRA, pytest.mark.asyncio(loop_scope="module")]


async def profile(client: Client, url: str, tokenizer: Path, *arguments: str) -> dict[str, Any]:
    """One run; the exported statistics."""
    folder = client.folder / "artifacts"
    load = ("--concurrency", "2", "--synthetic-input-tokens-mean", "1200", "--output-tokens-mean", "10")
    done = await client.run(
        *("bin/aiperf", "profile", "--model-names", MODEL, "--url", url, "--tokenizer", str(tokenizer), *load),
        *("--ui-type", "none", "--no-gpu-telemetry", "--artifact-dir", str(folder), *arguments),
    )
    export = folder / "profile_export_aiperf.json"
    assert export.is_file(), done.checked[-4000:] + done.err[-4000:]
    return json.loads(export.read_text(encoding="utf-8"))


async def test_conversations_streamed(
    client_of: Callable[[str], Client], fleet_url: str, recorded: Recorded, tokenizer: Path
) -> None:
    sessions = ("--num-sessions", "4", "--session-turns-mean", "3")
    found = await profile(client_of("aiperf"), fleet_url, tokenizer, "--streaming", *sessions)
    assert found["request_count"]["avg"] == 12
    assert found["time_to_first_token"]["count"] == 12
    rows = await recorded.new(12)
    assert {(row["endpoint"], row["stream"]) for row in rows} == {("/v1/chat/completions", True)}
    assert Counter(Counter(row["session_id"] for row in rows).values()) == {3: 4}
    check_traffic("aiperf", rows)


async def test_responses(
    client_of: Callable[[str], Client], fleet_url: str, recorded: Recorded, tokenizer: Path
) -> None:
    requests = ("--endpoint-type", "responses", "--request-count", "10")
    found = await profile(client_of("aiperf"), fleet_url, tokenizer, *requests)
    assert found["request_count"]["avg"] == 10
    rows = await recorded.new(10)
    assert {(row["endpoint"], row["stream"]) for row in rows} == {("/v1/responses", False)}
    check_traffic("aiperf", rows)
