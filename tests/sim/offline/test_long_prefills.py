"""Steps that a long prompt shares with short ones: ``--long-prefill-token-threshold`` in virtual time."""

from __future__ import annotations

import pytest

from policies.registry import make_routing
from replayer.records.runs import RequestRecord
from sim.offline.simulate import SimOptions, SimulationError, simulate
from tests.sim.offline.offline_runs import ROOMY_TOKENS, conversation, trace_of

SHORT = range(1, 11)
TRACE = trace_of(
    conversation((0.0, 1_500, 5), session="long"),
    *[conversation((1.0 + 0.2 * each, 10, 5), session=f"short-{each}", first_id=1_000 * each) for each in SHORT],
)
"""A prompt of 96k tokens is being computed when ten of 640 tokens arrive."""


def records(threshold: int, policy: str = "warm", scheduling_policy: str = "fcfs") -> dict[str, RequestRecord]:
    options = SimOptions(
        instances=1,
        pool_tokens=ROOMY_TOKENS,
        scheduling_policy=scheduling_policy,
        long_prefill_token_threshold=threshold,
    )
    result = simulate(TRACE, options, make_routing(policy, {}))
    assert set(result.ledger.values()) == {0}
    assert result.run.header.options["long_prefill_token_threshold"] == threshold
    return {each.session_id: each for each in result.run.records}


def first_token_s(record: RequestRecord) -> float:
    assert record.first_token_s is not None
    return record.first_token_s


@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
def test_short_prompts_are_answered_while_a_long_one_is_computed(scheduling_policy: str) -> None:
    whole, shared = (records(each, scheduling_policy=scheduling_policy) for each in (0, 4096))
    for name in (f"short-{each}" for each in SHORT):
        assert first_token_s(whole[name]) >= first_token_s(whole["long"])  # its last chunk shares a step
        assert first_token_s(shared[name]) < first_token_s(shared["long"])
        waited_s = first_token_s(shared[name]) - shared[name].scheduled_s
        assert waited_s < 0.3 * (first_token_s(whole[name]) - whole[name].scheduled_s)
    # It pays for them, and for more steps, but not twice.
    assert first_token_s(whole["long"]) < first_token_s(shared["long"]) < 1.5 * first_token_s(whole["long"])


def test_a_threshold_of_the_whole_budget_changes_nothing() -> None:
    assert list(records(8192).values()) == list(records(0).values())


def test_a_threshold_above_the_longest_request_is_refused_as_by_vllm() -> None:
    options = SimOptions(
        instances=1, pool_tokens=ROOMY_TOKENS, max_model_len=100_000, long_prefill_token_threshold=100_001
    )
    with pytest.raises(SimulationError, match=r"long_prefill_token_threshold 100001 is not in 0 \.\. 100000"):
        simulate(TRACE, options, make_routing("warm", {}))
