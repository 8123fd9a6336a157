"""Offloads in virtual time: both legs, learning from them, and every failure of a hand-off."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from policies.types import Role
from replayer.replay.plan import PlanOptions
from sim.offline.options import HandOffBounds
from sim.offline.simulate import SimResult
from tests.sim.offline.offline_runs import agents, conversation, run, trace_of

HEAVY = trace_of(conversation((0.0, 500, 20), (60.0, 520, 20)))
"""32k tokens, then a few more."""
ALWAYS = {"min_decode_requests": 0}
"""Offload every heavy request, even if D is idle."""


def offloads(result: SimResult) -> Counter[str]:
    return Counter(row["offload_reason"] for row in result.decisions)


def test_a_heavy_prefill_runs_on_p_and_d_pulls_it() -> None:
    result = run(HEAVY, "session_sticky", "threshold", ALWAYS, role=Role.KV_BOTH, instances=2, decisions=True)
    first, second = result.decisions
    assert first["offload_reason"] == "chosen"
    assert first["prefill_instance"] not in {None, first["instance"]}
    assert first["attempts"] == []
    assert first["legs"].keys() == {"prefill", "transfer"}
    stages = first["stages_ms"]
    # P leg, D leg up to its first token: together the time to first token, as the proxy reports it.
    assert stages["prefill_leg"] + stages["decode_leg_first_byte"] == pytest.approx(stages["first_byte"], abs=0.01)
    record = result.run.records[0]
    assert record.prefill_instance == first["prefill_instance"]
    assert (record.cached_tokens, record.predicted_cached_tokens) == (0, 0)
    assert record.completion_tokens == 20
    # The blocks that D pulled are in its cache, where the next turn finds them.
    assert second["instance"] == first["instance"]
    assert result.run.records[1].cached_tokens == 500 * 64
    producer = next(row for row in result.instances if row.instance == first["prefill_instance"])
    assert producer.requests == 1
    assert set(result.ledger.values()) == {0}


def test_static_roles_send_every_prefill_away() -> None:
    trace = agents(120, rate_per_s=2.0, length_scale=0.2)
    result = run(trace, "least_loaded", "static_pd", prefill_instances=2, decisions=True)
    producers = {"inst-0", "inst-1"}
    for record in result.run.records:
        assert record.ok
        assert record.instance not in producers
        assert record.prefill_instance is None or record.prefill_instance in producers
    assert offloads(result)["chosen"] > 50
    assert sum(row.external_tokens for row in result.instances) > 0


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        ({"prefill_timeout_s": 0.5}, "fell_back_p_timeout"),
        ({"first_token_timeout_s": 0.01}, "fell_back_d_timeout"),
    ],
)
def test_a_leg_that_is_late_falls_back_and_is_counted_by_its_reason(bounds: dict[str, float], reason: str) -> None:
    result = run(
        HEAVY,
        "session_sticky",
        "threshold",
        ALWAYS,
        role=Role.KV_BOTH,
        instances=2,
        decisions=True,
        bounds=HandOffBounds(**bounds),
    )
    first = result.decisions[0]
    assert first["offload_reason"] == reason
    assert first["prefill_instance"] is None
    assert [attempt["offload"] for attempt in first["attempts"]] == [reason]
    assert first["outcome"] == "ok"
    assert result.run.records[0].completion_tokens == 20
    assert result.run.records[0].ttft_s is not None
    assert result.run.records[0].ttft_s > max(bounds.values())
    assert set(result.ledger.values()) == {0}
    assert result.index_blocks[first["instance"]] >= 500


@pytest.mark.parametrize("abandoned_s", [0.05, 1000.0])
def test_a_pull_that_was_given_up_ends_by_its_first_token_or_its_bound(abandoned_s: float) -> None:
    """Afterwards all of D's blocks are free."""
    bounds = HandOffBounds(first_token_timeout_s=0.01, abandoned_s=abandoned_s)
    result = run(HEAVY, "session_sticky", "threshold", ALWAYS, role=Role.KV_BOTH, instances=2, bounds=bounds)
    assert [record.ok for record in result.run.records] == [True, True]
    decode = next(row for row in result.instances if row.instance == result.run.records[0].instance)
    # The two turns and the stopped leg.
    assert decode.requests == 3


def test_a_consumer_that_rejects_the_prompt_differs_from_one_that_fails() -> None:
    result = run(
        trace_of(conversation((0.0, 500, 5))),
        "least_loaded",
        "static_pd",
        instances=2,
        prefill_instances=1,
        pool_tokens=400 * 64,
        decisions=True,
    )
    (row,) = result.decisions
    assert row["status"] == 400
    assert not result.run.records[0].ok


def test_a_refused_prompt_does_not_break_the_pair() -> None:
    """All engines have the same limit, so D refuses it too: the client is at fault."""
    trace = trace_of(*[conversation((float(n), 500, 20), session=f"s-{n}", first_id=n) for n in range(12)])
    options: dict[str, Any] = {"role": Role.KV_BOTH, "instances": 2, "max_model_len": 20_000, "decisions": True}
    result = run(trace, "session_sticky", "threshold", ALWAYS, **options)
    assert {row["status"] for row in result.decisions} == {400}
    assert offloads(result) == {"fell_back_p_error": 12}


@pytest.mark.parametrize("policy", ["round_robin", "session_sticky"])
@pytest.mark.parametrize("planner", ["threshold", "cost_model"])
def test_under_load_nothing_is_left_behind(policy: str, planner: str) -> None:
    params: dict[str, Any] = {"min_gain": 0.0, "sigmas": 0.0} if planner == "cost_model" else {}
    result = run(
        agents(200, rate_per_s=20.0, length_scale=0.5),
        policy,
        planner,
        params,
        role=Role.KV_BOTH,
        transport="nvlink",
        pool_tokens=250_000,
        bounds=HandOffBounds(first_token_timeout_s=0.4, prefill_timeout_s=3.0, abandoned_s=1.0),
        plan=PlanOptions(time_scale=2.0),
        decisions=True,
    )
    assert len(result.run.records) == 200
    assert all(record.ok for record in result.run.records)
    assert set(result.ledger.values()) == {0}
    found = offloads(result)
    assert found["chosen"] > 0
    if planner == "threshold":
        assert any(reason.startswith("fell_back") for reason in found)
