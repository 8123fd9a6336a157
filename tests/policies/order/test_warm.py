"""``warm`` where engines order prefills: a short prompt waits for less of a queue than a long one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.costs.formulas import Costs, PrefillModel
from policies.costs.order import wait_s
from policies.routing.warm import Warm
from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, InstanceView, QueuedPrefill
from tests.policies.builders import ask, fleet_of

NOW_S = 50.0
MODEL = PrefillModel(fixed_s=0.1, s_per_token=1e-4, s_per_token_squared=1e-8)
QUEUE = tuple(QueuedPrefill(due_s, 1.2) for due_s in (49.0, 60.0, 64.4))
"""Three prefills, of 10,000 tokens or so; the one being computed was due first."""
PLAIN = InstanceView("a", requests=4, prefilling=3, pending_prefill_tokens=30_000)
ORDERED = PLAIN._replace(queue=QUEUE)
SHORT, LONG = ask(100), ask(60_000)


def fleet(*views: InstanceView) -> FleetSnapshot:
    return fleet_of(*views, costs=Costs(MODEL, now_s=NOW_S))


def scored(view: InstanceView, prompt_tokens: int, policy: Warm = Warm()) -> CandidateScore:  # noqa: B008
    return policy.choose(ask(prompt_tokens), fleet(view)).scores[0]


def test_a_short_prompt_waits_for_less_and_a_long_one_for_the_same() -> None:
    assert scored(ORDERED, 100).score < scored(PLAIN, 100).score
    assert scored(ORDERED, 60_000) == scored(PLAIN, 60_000)


def test_half_of_the_overtaken_share_of_the_queue_is_not_waited_for() -> None:
    """Both that wait are overtaken: 2.4 s of the 3 s that are left."""
    whole, less = (scored(view, 100).inputs for view in (PLAIN, ORDERED))
    assert less["queue_s"] == pytest.approx(whole["queue_s"] * (1 - 0.5 * 0.8))
    assert less["crowd_s"] == pytest.approx(0.25 * 4 * less["queue_s"])
    assert (less["own_s"], less["others_s"]) == (whole["own_s"], whole["others_s"])
    certain = scored(ORDERED, 100, Warm(overtakes=1.0)).inputs["queue_s"]
    assert certain == pytest.approx(whole["queue_s"] * (1 - 0.8))


def test_only_those_that_are_due_later_are_overtaken() -> None:
    """10,000 tokens take 1.6 s: due 25.6 s from now."""
    assert wait_s(MODEL.seconds(10_000, 0), 10.0) == pytest.approx(25.6)
    before, after = ((*QUEUE[:2], QueuedPrefill(NOW_S + at_s, 1.2)) for at_s in (25.5, 25.7))
    assert scored(PLAIN._replace(queue=before), 10_000) == scored(PLAIN, 10_000)
    assert scored(PLAIN._replace(queue=after), 10_000).score < scored(PLAIN, 10_000).score


def test_a_request_without_a_priority_overtakes_all_that_wait() -> None:
    message = LONG._replace(has_priority=False)
    found = {view: Warm(overtakes=1.0).choose(message, fleet(view)).scores[0].inputs for view in (PLAIN, ORDERED)}
    assert found[ORDERED]["queue_s"] == pytest.approx(found[PLAIN]["queue_s"] * (1 - 0.8))


def test_cached_tokens_make_a_prompt_short() -> None:
    assert (
        scored(ORDERED._replace(cached_tokens=59_999), 60_000).score
        < scored(PLAIN._replace(cached_tokens=59_999), 60_000).score
    )


@pytest.mark.parametrize("policy", [Warm(slowdown=0.0), Warm(overtakes=0.0)])
@pytest.mark.parametrize("prompt_tokens", [100, 60_000])
def test_the_order_may_be_ignored(policy: Warm, prompt_tokens: int) -> None:
    assert scored(ORDERED, prompt_tokens, policy) == scored(PLAIN, prompt_tokens, policy)


def test_a_short_prompt_goes_where_it_overtakes() -> None:
    other = PLAIN._replace(instance="b", pending_prefill_tokens=28_000)
    choices = [Warm().choose(each, fleet(ORDERED, other)).instance for each in (SHORT, LONG)]
    assert choices == ["a", "b"]


@given(
    queue=st.lists(st.builds(QueuedPrefill, st.floats(0, 200), st.floats(0, 30)), min_size=1, max_size=5),
    prompt_tokens=st.integers(1, 100_000),
    overtakes=st.floats(0, 1),
)
def test_a_queue_costs_between_nothing_and_what_it_would_without_an_order(
    queue: list[QueuedPrefill], prompt_tokens: int, overtakes: float
) -> None:
    policy, view = Warm(overtakes=overtakes), PLAIN._replace(queue=tuple(queue))
    queue_s, whole_s = (scored(each, prompt_tokens, policy).inputs["queue_s"] for each in (view, PLAIN))
    assert -1e-9 <= queue_s <= whole_s


@pytest.mark.parametrize("bad", [{"slowdown": -0.1}, {"overtakes": -0.1}, {"overtakes": 1.1}])
def test_parameters_of_the_order_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"warm: {next(iter(bad))} must"):
        Warm(**bad)  # type: ignore[arg-type]
