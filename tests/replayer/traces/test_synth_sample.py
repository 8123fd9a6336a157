"""Synthetic traces meet their targets and repeat byte by byte; samples keep whole sessions."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from replayer.traces.formats import bailian
from replayer.traces.loading import LoadOptions, load
from replayer.traces.repeat import repeated
from replayer.traces.sample import profile, sample
from replayer.traces.shorten import shortened
from replayer.traces.synth import SynthOptions, synthetic_trace
from replayer.traces.synth_targets import compare_with_targets
from replayer.traces.trace import Trace, TraceError

LOOSE = {
    "cross-session hits, share of tokens": 0.02,
    "gap between turns, requests, p90": 0.2,
    "output tokens, mean": 0.06,
}
"""Wider tolerances: a target that contradicts others, a tail of integers, a heavy-tailed mean."""


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic_trace(SynthOptions(requests=1000, seed=11))


def test_every_target_is_met(trace: Trace) -> None:
    for row in compare_with_targets(trace):
        assert abs(row.deviation) <= LOOSE.get(row.name, 0.03), (row.name, row.target, row.value)


@pytest.mark.parametrize(("scale", "gap"), [(0.1, 1.0), (1.0, 8.0)])
def test_scaled_targets_are_met_too(scale: float, gap: float) -> None:
    made = synthetic_trace(SynthOptions(requests=800, seed=3, length_scale=scale, gap_scale=gap))
    for row in compare_with_targets(made, scale, gap):
        tolerance = 0.2 if row.name.startswith("gap") else LOOSE.get(row.name, 0.05)
        assert abs(row.deviation) <= tolerance, (row.name, row.target, row.value)


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    written = []
    for seed in (5, 5, 6):
        path = tmp_path / "t.jsonl.gz"
        bailian.write(path, synthetic_trace(SynthOptions(requests=60, seed=seed)).requests)
        written.append(path.read_bytes())
    assert written[0] == written[1]
    assert written[0] != written[2]


def test_a_written_trace_passes_every_check_of_the_loader(trace: Trace, tmp_path: Path) -> None:
    bailian.write(tmp_path / "t.jsonl", trace.requests)
    back = load(tmp_path / "t.jsonl", LoadOptions(chain="error"))
    assert back.requests == trace.requests
    assert (back.block_tokens, back.tail, back.notes) == (64, "ceil", [])


def test_prompts_of_a_session_contain_the_one_before(trace: Trace) -> None:
    for turns in trace.sessions().values():
        for before, after in pairwise(turns):
            full = before.full_blocks(trace.block_tokens)
            assert after.hash_ids[:full] == before.hash_ids[:full]
            assert after.input_length >= before.input_length
            assert after.parent_chat_id == before.chat_id


def test_rate_sets_the_duration() -> None:
    slow = synthetic_trace(SynthOptions(requests=400, rate_per_s=2.0))
    fast = synthetic_trace(SynthOptions(requests=400, rate_per_s=20.0))
    assert slow.duration_s == pytest.approx(200.0, rel=0.2)
    assert fast.duration_s == pytest.approx(slow.duration_s / 10, rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        SynthOptions(requests=0),
        SynthOptions(rate_per_s=0.0),
        SynthOptions(length_scale=-1.0),
        SynthOptions(rate_per_s=math.nan),
        SynthOptions(gap_scale=math.inf),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: SynthOptions) -> None:
    with pytest.raises(TraceError, match="must be"):
        synthetic_trace(options)


@pytest.mark.parametrize("requests", [1, 2, 3, 10])
def test_tiny_traces_work(requests: int) -> None:
    made = synthetic_trace(SynthOptions(requests=requests))
    assert len(made.requests) == requests
    assert len(compare_with_targets(made)) == 14


@pytest.mark.parametrize("target", [1, 50, 200])
def test_a_sample_keeps_whole_sessions_in_order_near_the_target(trace: Trace, target: int) -> None:
    picked = sample(trace, target, seed=4)
    whole = trace.sessions()
    for name, turns in picked.sessions().items():
        assert [turn.chat_id for turn in turns] == [turn.chat_id for turn in whole[name]]
    times = [request.timestamp_s for request in picked.requests]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert abs(len(picked.requests) - target) <= 3 + 0.05 * target


def test_samples_repeat_by_seed_and_may_keep_their_times(trace: Trace) -> None:
    assert sample(trace, 80, seed=1).requests == sample(trace, 80, seed=1).requests
    assert sample(trace, 80, seed=1).requests != sample(trace, 80, seed=2).requests
    kept = sample(trace, 80, seed=1, rebase=False)
    original = {request.chat_id: request for request in trace.requests}
    assert all(request == original[request.chat_id] for request in kept.requests)
    with pytest.raises(TraceError, match="--target-requests"):
        sample(trace, 0)


def test_a_profile_counts(trace: Trace) -> None:
    figures = profile(trace)
    assert (figures.requests, figures.sessions) == (1000, len(trace.sessions()))
    assert figures.shared_apc >= figures.sticky_apc >= figures.round_robin_apc


def test_a_sample_of_agent_text_keeps_its_prompts(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    rows = [
        {"timestamp": turn * 1e6, "input": "system prompt é " * 20 * turn, "output": "ok", "session_id": session}
        for turn in range(1, 4)
        for session in ("a", "b")
    ]
    text.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    whole = load(text)
    bailian.write(tmp_path / "sample.jsonl", sample(whole, 3).requests)
    kept = load(tmp_path / "sample.jsonl").requests
    assert len(kept) == 3
    assert {request.text for request in kept} == {row["input"] for row in rows}
    # Copies and cuts of the prompts would not share what their blocks share.
    assert {request.text for request in repeated(whole, 2)} == {None}
    assert {request.text for request in shortened(whole, 0.5).requests} == {None}
