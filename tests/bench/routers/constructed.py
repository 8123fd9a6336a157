"""Records of a comparison without engines."""

from __future__ import annotations

from typing import Any

import msgspec

from bench.routers.records import CacheProof, EngineCounters, RequestFigures, RouterRecord, RoutersConditions
from replayer.records.runs import RequestRecord, RunHeader, latencies

CONDITIONS = RoutersConditions(
    trace_sha256="abc",
    prompt_mode="tokens",
    think_speed=1.0,
    idle_gap_cap_s=10.0,
    request_limit=None,
    length_scale=1.0,
    seed=0,
    token_low=1000,
    token_high=100_000,
    engine_speed=1.0,
    engines=2,
)


def replayed(session: int, turn: int, seconds: float, **fields: Any) -> RequestRecord:
    """A request that was due every 10 s and had its first token after half of ``seconds``."""
    due_s = 10.0 * turn + session
    times = latencies(
        scheduled_s=due_s,
        sent_s=due_s + 0.01,
        first_token_s=due_s + seconds / 2,
        last_token_s=due_s + seconds,
        finished_s=due_s + seconds + 0.002,
        completion_tokens=11,
    )
    record = RequestRecord(
        request_id=f"abc-{session}-{turn}",
        session_id=f"s{session}",
        turn=turn,
        chat_id=100 * session + turn,
        trace_timestamp_s=due_s,
        scheduled_s=due_s,
        sent_s=due_s + 0.01,
        first_token_s=due_s + seconds / 2,
        finished_s=due_s + seconds + 0.002,
        **times._asdict(),
        input_length=1000 * turn,
        output_length=11,
        wait_s=5.0,
        wait_after_end=True,
        own_prefix_tokens=1000 * (turn - 1),
        prompt_tokens=1000 * turn,
        completion_tokens=11,
        cached_tokens=900 * (turn - 1),
        ok=True,
    )
    return msgspec.structs.replace(record, **fields)


def routed(label: str, repeat: int, seconds: float, *, sessions: int = 24, **fields: Any) -> RouterRecord:
    """A run of sessions of four turns, all of which took ``seconds``, a little more by session."""
    records = [
        replayed(number, turn, seconds * (1 + 0.02 * number)) for number in range(sessions) for turn in (1, 2, 3, 4)
    ]
    record = RouterRecord(
        label=label,
        repeat=repeat,
        load=1.0,
        conditions=CONDITIONS,
        router=f"{label} 1.0",
        command=["router"],
        hardware="two GPUs",
        engine_versions=["0.20.2", "0.20.2"],
        pool_tokens=[160_432, 160_432],
        planned=len(records),
        total_s=100.0,
        router_cpu_s=0.96,
        proofs=[CacheProof("http://127.0.0.1:1", 496.0, 0.0)],
        counters=[EngineCounters(prompt_tokens=1000.0, cached_tokens=600.0, lookup_tokens=5000.0, hit_tokens=100.0)],
        header=RunHeader(
            label=label, trace="t", trace_sha256="abc", offered={"requests": len(records), "ideal_apc": 0.99}
        ),
        requests=[RequestFigures.of(each) for each in records],
    )
    return msgspec.structs.replace(record, **fields)
