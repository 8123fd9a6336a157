"""The start of a real agentic trace through the proxy and four engines: no losses, and cache hits as predicted.

The whole trace is replayed in virtual time, here and in `tests/sim/offline/test_run.py`.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from policies.registry import make_routing
from replayer.records.summary import summarise
from replayer.replay.plan import PlanOptions
from replayer.replay.replay import ReplayOptions, replay_trace
from replayer.traces.loading import load_trace
from replayer.traces.trace import TraceRequest
from sim.offline.simulate import SimOptions, simulate
from tests.integration.conftest import StartCluster

TRACE = "agentic/derived_glm_like_sample1k.jsonl.gz"
SCALE = 20.0
# All of the trace's blocks fit: this measures routing, not eviction.
POOL_TOKENS = 4_000_000
# On the slower h20 the fleet is near saturation there, and turns finish late.
PROFILE = "h200"
INSTANCES, LIVE_INSTANCES = 8, 4
REQUESTS = 120
"""Of 1,007: four minutes of the trace, 12 s here."""


def hits(placed: Iterable[tuple[TraceRequest, object]]) -> float:
    """Share of the prompt tokens cached by instances that never evict, given the assignment in order."""
    held: defaultdict[object, set[int]] = defaultdict(set)
    cached = total = 0.0
    for request, instance in placed:
        blocks = sum(1 for _ in itertools.takewhile(held[instance].__contains__, request.hash_ids))
        cached += blocks * request.input_length / max(1, len(request.hash_ids))
        total += request.input_length
        held[instance].update(request.hash_ids)
    return cached / total


def public_trace(name: str) -> Path:
    folder = Path(os.environ.get("WARMROUTE_TRACES") or Path(__file__).parents[3] / "shared" / "traces")
    path = folder / name
    if not path.is_file():
        pytest.skip(f"public traces not found at {folder}; set WARMROUTE_TRACES")
    return path


@pytest.mark.traces
def test_turns_taken_by_each_instance_in_its_order_hit_as_published() -> None:
    trace = load_trace(public_trace(TRACE))
    in_turn = ((request, number % INSTANCES) for number, request in enumerate(trace.requests))
    assert hits(in_turn) == pytest.approx(0.199, abs=0.02)


@pytest.mark.traces
def test_the_whole_trace_hits_as_its_placements_say() -> None:
    trace = load_trace(public_trace(TRACE))
    options = SimOptions(instances=INSTANCES, pool_tokens=POOL_TOKENS, profile=PROFILE)
    run = simulate(trace, options, make_routing("session_sticky")).run
    requests = {request.chat_id: request for request in trace.requests}
    sent = sorted(run.records, key=lambda record: record.sent_s or 0.0)
    expected = hits((requests[each.chat_id], each.instance) for each in sent)
    assert summarise(run).apc == pytest.approx(expected, abs=0.005)
    assert expected == pytest.approx(0.622, abs=0.02)


@pytest.mark.traces
@pytest.mark.fleet
async def test_replay_of_a_public_trace_loses_nothing_and_hits_as_predicted(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    # A session never leaves its engine, so that a busy machine does not change what is hit.
    policy, params = "session_sticky", {"overload_floor_tokens": 10**9}
    trace, plan = load_trace(public_trace(TRACE)), PlanOptions(request_limit=REQUESTS)
    cluster = await start_cluster(
        LIVE_INSTANCES,
        "--engine-speed",
        str(SCALE),
        "--kv-capacity-tokens",
        str(POOL_TOKENS),
        "--profile",
        PROFILE,
        policy={"name": policy, "params": params},
        ledger={"recent_half_life_s": 30.0 / SCALE},
    )
    options = ReplayOptions(endpoint=cluster.url, label=policy, clock_scale=SCALE, plan=plan)
    run = await replay_trace(trace, tmp_path / "run.jsonl", options)
    summary = summarise(run)
    assert (summary.ok, summary.requests) == (REQUESTS, REQUESTS)
    sent = sorted(run.records, key=lambda record: record.sent_s or 0.0)
    requests = {request.chat_id: request for request in trace.requests}
    assert summary.apc == pytest.approx(hits((requests[each.chat_id], each.instance) for each in sent), abs=0.01)
    virtual = SimOptions(instances=LIVE_INSTANCES, pool_tokens=POOL_TOKENS, profile=PROFILE, plan=plan)
    simulated = summarise(simulate(trace, virtual, make_routing(policy, params)).run)
    assert summary.apc == pytest.approx(simulated.apc, abs=0.02)
    exact = sum(record.predicted_cached_tokens == record.cached_tokens for record in run.records)
    # Requests that begin at the same moment may find less of their common prefix than predicted.
    assert exact >= REQUESTS - 2
    stats = (await cluster.client.get("/stats")).json()
    assert not any(stats["ledger"].values())
    assert stats["requests"]["outcomes"] == {"ok": REQUESTS}
