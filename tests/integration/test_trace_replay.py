"""A real agentic trace through the proxy and eight engines: nothing lost, cache hits as the trace foretells."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev

import pytest

from replayer.plan import PlanOptions
from replayer.replay import ReplayOptions, replay_trace
from replayer.summary import summarise
from replayer.trace import Trace, TraceRequest, load_trace
from tests.integration.conftest import StartCluster

SCALE = 20.0
# All of the trace's blocks fit: what is measured is routing, not eviction.
POOL_TOKENS = 4_000_000
# On the slower h20 the fleet is near saturation there, turns finish late, and come in another order than the trace's.
PROFILE = "h200"
# Trace seconds by which a turn may come early or late on a shared machine: 50 ms at this scale.
JITTER_S = 1.0


def round_robin_apc(requests: Sequence[TraceRequest]) -> float:
    """Share of the prompt tokens found in the caches of eight instances that forget nothing, taken in turn."""
    held: list[set[int]] = [set() for _ in range(8)]
    cached = total = 0.0
    for number, request in enumerate(requests):
        cache = held[number % len(held)]
        blocks = sum(1 for _ in itertools.takewhile(cache.__contains__, request.hash_ids))
        cached += blocks * request.input_length / max(1, len(request.hash_ids))
        total += request.input_length
        cache.update(request.hash_ids)
    return cached / total


def spread_over_orders(trace: Trace) -> float:
    """Standard deviation of round-robin's APC when turns of different sessions change places.

    Whether a turn meets its session's last instance again is decided by how many others came in between.
    """
    draw = random.Random(1)

    def jittered() -> list[TraceRequest]:
        return sorted(trace.requests, key=lambda request: request.timestamp_s + draw.gauss(0, JITTER_S))

    return stdev(round_robin_apc(jittered()) for _ in range(60))


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
    tolerance = 3.5 * spread_over_orders(trace) if policy == "round_robin" else 0.02
    assert tolerance < 0.05
    assert summary.apc == pytest.approx(published_apc, abs=tolerance)
    exact = sum(record.predicted_cached_tokens == record.cached_tokens for record in run.records)
    assert exact / len(run.records) >= 0.99
    stats = (await cluster.client.get("/stats")).json()
    assert not any(stats["ledger"].values())
    assert stats["requests"]["outcomes"] == {"ok": 1007}
