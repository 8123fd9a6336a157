"""The public traces: published figures found again, every trap seen where it is known to be."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from replayer.replay.plan import PlanOptions, make_plan
from replayer.replay.prompts import PromptBuilder
from replayer.traces.ideal import ideal
from replayer.traces.loading import LoadOptions, load
from replayer.traces.sample import profile
from replayer.traces.trace import load_trace

pytestmark = pytest.mark.traces


def test_published_cache_figures_are_those_of_bisection_over_the_ids_as_stored(public_traces: Path) -> None:
    path = public_traces / "agentic" / "derived_glm_like_sample1k.jsonl.gz"
    figures = ideal(load(path, LoadOptions(chain="keep")))
    assert round(figures.shared_apc, 3) == 0.647
    assert round(figures.round_robin_apc, 3) == 0.199
    assert round(figures.sticky_apc, 3) == 0.622


def test_chained_as_an_engine_chains_them_the_figures_are_a_little_lower(public_traces: Path) -> None:
    trace = load_trace(public_traces / "agentic" / "derived_glm_like_sample1k.jsonl.gz")
    figures = ideal(trace)
    assert figures.shared_apc == pytest.approx(0.6435, abs=5e-4)
    assert figures.round_robin_apc == pytest.approx(0.1942, abs=5e-4)
    assert figures.sticky_apc == pytest.approx(0.6215, abs=5e-4)
    assert any("different parents" in note for note in trace.notes)


def test_the_two_hour_trace_has_its_published_statistics(public_traces: Path) -> None:
    trace = load(public_traces / "agentic" / "derived_glm_like_2h.jsonl.zst", LoadOptions(chain="keep"))
    figures = profile(trace)
    assert (figures.requests, figures.sessions, trace.block_tokens, trace.tail) == (6010, 1711, 64, "floor")
    assert [round(x, 3) for x in (figures.shared_apc, figures.round_robin_apc, figures.sticky_apc)] == [
        0.698,
        0.310,
        0.668,
    ]
    assert round(figures.intra_session_share, 3) == 0.912
    assert figures.input_mean == pytest.approx(34_300, rel=0.01)
    assert figures.output_p50 == 215


def test_a_small_limit_starts_cold(public_traces: Path) -> None:
    path = public_traces / "agentic" / "derived_glm_like_2h.jsonl.zst"
    figures = ideal(load(path, LoadOptions(chain="keep", limit=200)))
    assert [round(x, 3) for x in (figures.shared_apc, figures.round_robin_apc, figures.sticky_apc)] == [
        0.560,
        0.126,
        0.545,
    ]


def test_mooncake_is_in_milliseconds_with_partial_last_blocks_and_guessed_sessions(public_traces: Path) -> None:
    trace = load_trace(public_traces / "mooncake" / "conversation_trace.jsonl.gz")
    assert (len(trace.requests), trace.block_tokens, trace.tail) == (12_031, 512, "ceil")
    assert trace.duration_s == pytest.approx(3537, abs=1)
    figures = ideal(trace)
    assert round(figures.shared_apc, 3) == 0.373
    assert round(figures.round_robin_apc, 3) == 0.139
    assert 7_500 < len(trace.sessions()) < 8_500
    given = load_trace(public_traces / "mooncake" / "conversation_trace_with_derived_sessions.jsonl.gz")
    assert len(given.sessions()) == 8_056
    assert round(ideal(given).sticky_apc, 3) == 0.354
    assert round(ideal(given).intra_session_share, 3) == 0.861


def test_raw_conversations_get_their_own_ids_and_short_gaps(public_traces: Path) -> None:
    trace = load_trace(public_traces / "raw_weka" / "kv-cache-tester_raw_6traces.tar.zst")
    sessions = trace.sessions()
    assert len(sessions) == 6
    assert (trace.block_tokens, trace.tail) == (64, "floor")
    blocks = [set().union(*(turn.hash_ids for turn in turns)) for turns in sessions.values()]
    assert sum(map(len, blocks)) == len(set().union(*blocks))
    for turns in sessions.values():
        for before, after in pairwise(turns):
            assert after.timestamp_s - before.timestamp_s <= 60.0 + (before.api_time_s or 0.0) + 1e-6


@pytest.mark.parametrize("name", ["miniswe.jsonl.zst", "taubench.jsonl.zst"])
def test_agent_text_is_in_microseconds(public_traces: Path, name: str) -> None:
    trace = load_trace(public_traces / "agent_text" / name)
    assert 60 < trace.duration_s < 3600
    assert all(request.text for request in trace.requests)


def test_estimated_counts_have_an_id_too_many_now_and_then(public_traces: Path) -> None:
    trace = load_trace(public_traces / "agent_text" / "miniswe_hashed64_est.jsonl.gz")
    assert len(trace.requests) == 402
    assert "4 requests had one id too many; the last was dropped" in trace.notes


def test_prompts_of_a_real_trace_have_their_lengths_and_the_plan_every_request(public_traces: Path) -> None:
    trace = load_trace(public_traces / "agentic" / "kct_v6_sample1k.jsonl.gz", limit=60)
    builder = PromptBuilder(trace.block_tokens)
    for request in trace.requests[::10]:
        assert builder.tokens_json(request).count(b",") + 1 == request.input_length
    plan = make_plan(trace, PlanOptions())
    assert sorted(step.request.chat_id for session in plan.sessions for step in session.steps) == sorted(
        request.chat_id for request in trace.requests
    )
