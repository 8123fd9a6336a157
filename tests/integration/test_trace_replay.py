"""A real agentic trace through the proxy and eight engines: nothing lost, cache hits as the trace foretells."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replayer.plan import PlanOptions
from replayer.replay import ReplayOptions, replay_trace
from replayer.summary import summarise
from replayer.trace import load_trace
from tests.integration.conftest import StartCluster

SCALE = 20.0
# All of the trace's blocks fit: what is measured is routing, not eviction.
POOL_TOKENS = 4_000_000
# Round-robin's figure is that of the trace's own order. The slower h20 is near saturation there, turns finish late, and
# the order in which they come is the machine's as much as the trace's (APC .20 to .21 over several runs).
PROFILE = "h200"


def public_trace(name: str) -> Path:
    folder = Path(os.environ.get("WARMROUTE_TRACES") or Path(__file__).parents[3] / "shared" / "traces")
    path = folder / name
    if not path.is_file():
        pytest.skip(f"public traces not found at {folder}; set WARMROUTE_TRACES")
    return path


@pytest.mark.traces
@pytest.mark.fleet
@pytest.mark.quiet
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("fleet")
@pytest.mark.parametrize(("policy", "published_apc"), [("session_sticky", 0.622), ("round_robin", 0.199)])
async def test_replay_of_a_public_trace_loses_nothing_and_hits_as_published(
    start_cluster: StartCluster, tmp_path: Path, policy: str, published_apc: float
) -> None:
    trace = load_trace(public_trace("agentic/derived_glm_like_sample1k.jsonl.gz"))
    cluster = await start_cluster(
        8,
        "--time-scale",
        str(SCALE),
        "--kv-capacity-tokens",
        str(POOL_TOKENS),
        "--profile",
        PROFILE,
        policy={"name": policy},
        ledger={"recent_half_life_s": 30.0 / SCALE},
    )
    options = ReplayOptions(endpoint=cluster.url, label=policy, clock_scale=SCALE, plan=PlanOptions())
    run = await replay_trace(trace, tmp_path / "run.jsonl", options)
    summary = summarise(run)
    assert (summary.ok, summary.requests) == (1007, 1007)
    assert summary.apc == pytest.approx(published_apc, abs=0.02)
    exact = sum(record.predicted_cached_tokens == record.cached_tokens for record in run.records)
    assert exact / len(run.records) >= 0.99
    stats = (await cluster.client.get("/stats")).json()
    assert not any(stats["ledger"].values())
    assert stats["requests"]["outcomes"] == {"ok": 1007}
