"""A real trace, shortened, replayed over four real engines: each policy's expected cache hits."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from replayer.records.readable import format_percent
from replayer.records.runs import Run, read_run
from replayer.records.summary import summarise
from replayer.traces.ideal import ideal
from replayer.traces.loading import load_trace
from tests.engines.conftest import ROOT, StartProxy
from tests.engines.rig import BLOCK, REAL_ENGINES, Engines, Proxy, until_trusted

pytestmark = [*REAL_ENGINES, pytest.mark.traces]

REQUESTS = 44
TRACE_BLOCK = 64
"""Tokens of a block of the trace; each becomes one block of the engines, so prompts are a quarter as long."""
LONGEST_TOKENS = 16_000
"""Longest prompt of the trace in a chosen session: a processor's attention to four times as many takes minutes."""
MAX_OUTPUT_TOKENS = 12
SPEED = "50"
"""Times that of the trace: its 280 s then pass in 6 s."""
POLICIES: dict[str, dict[str, Any]] = {
    # A session never leaves its engine, so that a busy machine does not change what is hit.
    "session_sticky": {"overload_floor_tokens": 10**9},
    "round_robin": {},
}
WAITING = {"first_byte_s": 240, "total_s": 280, "idle_s": 120}
"""Requests queue on a busy machine; none may be given up."""


def shortened(folder: Path) -> Path:
    """Whole sessions of the public trace, about `REQUESTS` requests, with blocks of the engines' size."""
    traces = Path(os.environ.get("WARMROUTE_TRACES") or ROOT.parent / "shared" / "traces")
    public = traces / "agentic" / "derived_glm_like_sample1k.jsonl.gz"
    if not public.is_file():
        pytest.skip(f"public traces not found at {traces}; set WARMROUTE_TRACES")
    with gzip.open(public, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    root_of: dict[int, int] = {}
    turns: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        root_of[row["chat_id"]] = root_of.get(row["parent_chat_id"], row["chat_id"])
        turns.setdefault(root_of[row["chat_id"]], []).append(row)
    chosen: list[dict[str, Any]] = []
    for session in turns.values():
        short = max(row["input_length"] for row in session) <= LONGEST_TOKENS
        if short and len(session) >= 3 and len(chosen) + len(session) <= REQUESTS:
            chosen += session
    chosen.sort(key=lambda row: row["timestamp"])
    for row in chosen:
        blocks, rest = divmod(row["input_length"], TRACE_BLOCK)
        row["input_length"] = blocks * BLOCK + min(rest, BLOCK - 1 if rest else 0)
        row["output_length"] = min(row["output_length"], MAX_OUTPUT_TOKENS)
    path = folder / "short.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return path


async def warmroute(*arguments: str) -> str:
    """Run the command line; its output."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "warmroute",
        *arguments,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(child.communicate(), 400)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode == 0, out.decode()
    return out.decode()


async def replay(proxy: Proxy, trace: Path, output: Path, seed: int) -> Run:
    flags = ["--endpoint", proxy.url, "--token-low", "10", "--token-high", "2000", "--timeout-s", "280"]
    flags += ["--arrival-speed", SPEED, "--think-speed", SPEED, "--block-tokens", str(BLOCK), "--seed", str(seed)]
    await warmroute("replay", str(trace), "--output", str(output), "--label", output.stem, *flags)
    return read_run(output)


@pytest.mark.timeout(900)
async def test_sticky_sessions_hit_more_than_turns_dealt_round(
    engines: Engines, start_proxy: StartProxy, tmp_path: Path
) -> None:
    trace = shortened(tmp_path)
    apc: dict[str, float] = {}
    for policy, params in POLICIES.items():
        proxy = await start_proxy(
            0,
            1,
            2,
            3,
            events=True,
            policy={"name": policy, "params": params},
            offload={"planner": "never", "params": {}},
            timeouts=WAITING,
        )
        await until_trusted(proxy, *map(engines.name, range(4)))
        # The ids of the trace stand for other tokens each time: cached blocks are of no use.
        seed = int.from_bytes(os.urandom(3))
        run = await replay(proxy, trace, tmp_path / f"{policy}.jsonl", seed)
        summary = summarise(run)
        assert summary.complete
        assert summary.ok == summary.requests == summary.planned
        assert summary.requests >= REQUESTS * 0.8
        assert summary.apc is not None
        apc[policy] = summary.apc
        # Token ids, nothing evicted: the indexes predict exactly the engines' hits.
        assert summary.predicted_requests == summary.requests
        off = [
            (record.predicted_cached_tokens, record.cached_tokens)
            for record in run.records
            if record.predicted_cached_tokens != record.cached_tokens
        ]
        assert not off, (policy, off)
        assert summary.predicted_error_tokens.p99 == 0
        errors = (await proxy.settled())["prediction_error"]
        assert errors["used"] == {"exact": summary.requests, "shadow": 0}
        for source in ("exact", "shadow"):
            found = errors["side_by_side"][source]
            assert (found["requests"], found["absolute_error_tokens"]) == (summary.requests, 0), (policy, errors)
        (tmp_path / f"{policy}-breakdown.jsonl").write_text(
            (await proxy.client.get("/breakdown", params={"limit": 10_000, "format": "jsonl"})).text
        )
        await engines.until_idle(0, 1, 2, 3)
    # One session's turns hit all blocks that one shared, unbounded cache would have.
    best = ideal(load_trace(trace, block_tokens=BLOCK), instances=4)
    assert apc["session_sticky"] == pytest.approx(best.sticky_apc, abs=0.02)
    assert apc["session_sticky"] > 1.3 * apc["round_robin"] > 0, apc
    await check_reports(tmp_path, apc)


async def check_reports(folder: Path, apc: dict[str, float]) -> None:
    """`warmroute summary` and `warmroute report` agree on these runs."""
    for policy in POLICIES:
        reported = json.loads(await warmroute("summary", str(folder / f"{policy}.jsonl"), "--json"))
        assert reported["apc"] == apc[policy]
        assert reported["predicted_error_tokens"]["p99"] == reported["predicted_bias_tokens"] == 0
    breakdowns = [
        part for policy in POLICIES for part in ("--breakdown", f"{policy}={folder / policy}-breakdown.jsonl")
    ]
    runs = [str(folder / f"{policy}.jsonl") for policy in POLICIES]
    # Each run has different tokens, so only --force compares them.
    reported = await warmroute("report", *runs, *breakdowns, "--force", "--output", str(folder / "report.html"))
    assert "report.html" in reported
    page = (folder / "report.html").read_text()
    for policy in POLICIES:
        assert policy in page
        assert format_percent(apc[policy]) in page
