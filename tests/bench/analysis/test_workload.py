"""Anatomy of a trace: known figures of constructed traces, the bound on memory, equal figures streamed and loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench.analysis.cli import application
from bench.analysis.commands.workload import DEFAULT_REMEMBER
from bench.analysis.workload import REMEMBER_BLOCKS, SeenBlocks, anatomy
from replayer.traces.formats import bailian
from replayer.traces.ideal import ideal
from replayer.traces.trace import Trace, TraceRequest

BLOCK = 16


def request(number: int, session: str, at_s: float, ids: list[int], **more: Any) -> TraceRequest:
    values: dict[str, Any] = {"input_length": BLOCK * len(ids), "output_length": 10} | more
    return TraceRequest(chat_id=number, session_id=session, timestamp_s=at_s, hash_ids=ids, **values)


def test_a_trace_worked_out_by_hand() -> None:
    requests = [
        request(0, "a", 0.0, [1, 2], input_length=40, output_length=8),
        request(1, "b", 1.0, [1, 3, 4]),
        request(2, "a", 5.0, [1, 2, 5, 6]),
        request(3, "b", 9.0, [1, 2, 7], subagent=True),
    ]
    found, _ = anatomy(requests, BLOCK, name="hand", model="m", kv_bytes_per_token=100.0, bin_s=3.0)
    assert (found.requests, found.sessions, found.subagent_requests) == (4, 2, 1)
    # Hits: none, block 1 of a's, blocks 1 and 2 of its own, blocks 1 (own) and 2 (a's).
    reuse = found.reuse
    prompt = 40 + 48 + 64 + 48
    assert reuse.cached_share == pytest.approx((1 + 2 + 2) * BLOCK / prompt)
    assert reuse.intra_session_share_of_hits == pytest.approx(3 / 5)
    assert reuse.cross_session_share_of_hits == pytest.approx(2 / 5)
    assert reuse.cross_session_share_of_tokens == pytest.approx(2 * BLOCK / prompt)
    assert reuse.forgotten_blocks == 0
    assert found.new_tokens.max == 40
    assert found.turns is not None
    assert found.turns.mean == 2
    assert found.gap_s is not None
    assert (found.gap_s.n, found.gap_s.mean, found.gap_s.max) == (2, 6.5, 8.0)
    assert found.gap_requests is not None
    assert found.gap_requests.mean == 2
    assert found.arrivals.per_s == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert found.arrivals.peak_per_s == pytest.approx(2 / 3)
    assert found.arrivals.dispersion == pytest.approx((2 / 9) / (4 / 3))
    assert found.prefill_share == pytest.approx(prompt / (prompt + 38))
    assert found.kv_bytes.max == 7400.0
    assert found.think_time_s is None


def test_classes_are_those_of_the_policies() -> None:
    lengths = [4_999, 5_000, 19_999, 20_000, 50_000]
    requests = [request(n, "", float(n), [], input_length=length) for n, length in enumerate(lengths)]
    found, _ = anatomy(requests, BLOCK, kv_bytes_per_token=1.0)
    assert [(row.name, row.requests) for row in found.classes] == [("WARM", 1), ("MEDIUM", 2), ("HEAVY", 2)]
    assert sum(row.new_token_share for row in found.classes) == pytest.approx(1.0)
    assert found.sessions is None
    assert found.turns is None


chains = st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 2), max_size=6)), min_size=1, max_size=25)


def chained(made: list[tuple[str, list[int]]]) -> list[TraceRequest]:
    names: dict[tuple[int, ...], int] = {}
    return [
        request(
            n, session, float(n), [names.setdefault(tuple(path[: end + 1]), len(names)) for end in range(len(path))]
        )
        for n, (session, path) in enumerate(made)
    ]


@given(chains)
@settings(max_examples=40, deadline=None)
def test_reuse_is_that_of_the_ideal_caches(made: list[tuple[str, list[int]]]) -> None:
    requests = chained(made)
    found, _ = anatomy(requests, BLOCK, kv_bytes_per_token=1.0)
    bound = ideal(Trace(requests=requests, block_tokens=BLOCK))
    assert found.reuse.cached_share == pytest.approx(bound.shared_apc)
    assert found.reuse.intra_session_share_of_hits == pytest.approx(bound.intra_session_share)


@given(chains, st.integers(2, 20))
@settings(max_examples=40, deadline=None)
def test_forgetting_bounds_memory_and_never_invents_reuse(made: list[tuple[str, list[int]]], remember: int) -> None:
    bounded, unbounded = SeenBlocks(remember), SeenBlocks(10**9)
    numbers = {"a": 0, "b": 1, "c": 2}
    for each in chained(made):
        full = len(each.hash_ids)
        known, own = bounded.use(each.hash_ids, full, numbers[each.session_id])
        really, really_own = unbounded.use(each.hash_ids, full, numbers[each.session_id])
        assert known <= really
        assert own <= min(known, really_own)
        # Two generations of half the bound, and the blocks of one request.
        assert len(bounded._young) + len(bounded._old) <= remember + 2 * 6


def test_what_was_used_lately_is_remembered() -> None:
    blocks = SeenBlocks(100)
    hits = []
    for turn in range(200):
        blocks.use([10_000 + 10 * turn + step for step in range(10)], 10, 1)
        hits.append(blocks.use([1, 2, 3], 3, 0))
    assert set(hits[1:]) == {(3, 3)}
    assert blocks.forgotten > 1000
    assert blocks.use([10_000], 1, 1) == (0, 0)


def test_streamed_and_loaded_give_the_same(tmp_path: Path) -> None:
    requests = chained([("a", [1] * k) if k % 2 else ("b", [2, *([1] * k)]) for k in range(1, 30)])
    path = tmp_path / "small.jsonl"
    bailian.write(path, requests)
    runner = CliRunner()
    answers = []
    for more in ([], ["--stream"]):
        result = runner.invoke(application(), ["workload", str(path), "--json", "--block-tokens", "16", *more])
        assert result.exit_code == 0, result.output
        answers.append(json.loads(result.stdout))
    answers[0].pop("notes")
    assert answers[1].pop("notes") == ["streamed: ids as stored, sessions as named in the file"]
    assert answers[0] == answers[1]
    assert answers[0]["requests"] == 29


def test_a_stream_out_of_order_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "late.jsonl"
    bailian.write(path, [request(0, "a", 5.0, [1]), request(1, "b", 1.0, [2])])
    result = CliRunner().invoke(application(), ["workload", str(path), "--stream", "--block-tokens", "16"])
    assert result.exit_code == 2
    assert "request 2 comes before the one above it" in result.output


def test_the_command_remembers_as_much_as_the_code() -> None:
    assert DEFAULT_REMEMBER == REMEMBER_BLOCKS


@pytest.mark.traces
def test_the_published_share_of_hits_within_sessions() -> None:
    folder = Path(os.environ.get("WARMROUTE_TRACES", Path(__file__).parents[4] / "shared" / "traces"))
    if not folder.is_dir():
        pytest.skip(f"public traces not found at {folder}; set WARMROUTE_TRACES")
    path = folder / "mooncake" / "conversation_trace_with_derived_sessions.jsonl.gz"
    result = CliRunner().invoke(application(), ["workload", str(path), "--json"])
    found = json.loads(result.stdout)
    assert round(found["reuse"]["intra_session_share_of_hits"], 3) == 0.861
    assert round(found["reuse"]["cached_share"], 3) == 0.373
    assert found["prompt_tokens"]["p50"] == pytest.approx(6_900, rel=0.01)
    assert found["prompt_tokens"]["p90"] == pytest.approx(27_400, rel=0.01)
