"""Warm, worked by hand: queue, own prefill, others, room, and their consequences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.costs.formulas import Costs, PrefillModel
from policies.costs.short_step import ShortStep
from policies.routing.joint import Joint
from policies.routing.migrate import Migrate
from policies.routing.warm import Warm
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import InstanceView, Reason, RequestView
from tests.policies.builders import ask, cases, fleet_of, idle, score_of

COSTS = Costs(PrefillModel(fixed_s=0.1, s_per_token=1e-4, s_per_token_squared=1e-8))
"""10,000 new tokens take 0.1 + 1 + 0.5 s cold, and 10,000 after 20,000 cached ones 0.1 + 1 + 2.5 s."""
ASKED = ask(10_000)


def fleet(*views: InstanceView) -> FleetSnapshot:
    return fleet_of(*views, costs=COSTS)


def terms(view: InstanceView, policy: Warm = Warm(), request: RequestView = ASKED) -> dict[str, float]:  # noqa: B008
    choice = policy.choose(request, fleet(view))
    (score,) = choice.scores
    assert choice.reason is Reason.LOWEST_SCORE
    found = dict(score.inputs)
    assert found.pop("cached_tokens") == view.cached_tokens
    assert score.score == pytest.approx(sum(found.values()))
    return found


def test_an_idle_instance_costs_the_prefill_alone() -> None:
    found = terms(InstanceView("a"))
    assert found == {"queue_s": 0, "crowd_s": 0, "room_s": 0, "own_s": pytest.approx(1.6), "others_s": 0}


def test_cached_tokens_spare_the_prefill_but_are_attended_to() -> None:
    own = terms(InstanceView("a", cached_tokens=20_000), request=ask(30_000))["own_s"]
    assert own == pytest.approx(0.1 + 1e-4 * 10_000 + 1e-8 * 10_000 * (20_000 + 5_000))


def test_the_queue_is_its_prefills_half_of_one_done_without_what_they_share() -> None:
    """Three of 4,000 tokens each: 0.4 + 0.08 s of work apiece; the fixed 0.1 s is not counted again."""
    view = InstanceView("a", requests=3, prefilling=3, pending_prefill_tokens=12_000)
    assert terms(view)["queue_s"] == pytest.approx(2.5 * (0.4 + 1e-8 * 4_000 * 2_000))


def test_a_queue_counts_for_more_by_the_crowd() -> None:
    view = InstanceView("a", requests=8, prefilling=3, pending_prefill_tokens=12_000)
    found = terms(view)
    assert found["crowd_s"] == pytest.approx(0.25 * 8 * found["queue_s"])
    assert terms(view, Warm(queue_crowd=0.0))["crowd_s"] == 0


def test_others_are_the_prefill_for_every_request_in_flight() -> None:
    view = InstanceView("a", requests=16)
    assert terms(view, Warm(step_s=0.0))["others_s"] == pytest.approx(1.6 * 16)
    assert terms(view, Warm(others_weight=0.5, step_s=0.0))["others_s"] == pytest.approx(0.8 * 16)


def test_a_prefill_that_shares_no_step_stalls_the_streams_for_longer() -> None:
    alone = InstanceView("a", requests=16)
    joins = alone._replace(prefilling=1, pending_prefill_tokens=500)
    assert terms(alone)["others_s"] == pytest.approx((1.6 + 0.04) * 16)
    assert terms(joins)["others_s"] == pytest.approx(1.6 * 16)


def test_short_prefills_gather_in_one_instance_s_steps() -> None:
    """Two instances with equal streams: the short prompt goes where a similar one is queued, the long one does not."""
    quiet, busy = InstanceView("quiet", requests=20), InstanceView("busy", requests=20)
    busy = busy._replace(prefilling=1, pending_prefill_tokens=200)
    long = busy._replace(pending_prefill_tokens=20_000)
    published = Costs()
    assert Warm().choose(ask(200), fleet_of(quiet, busy, costs=published)).instance == "busy"
    assert Warm(step_s=0.0).choose(ask(200), fleet_of(quiet, busy, costs=published)).instance == "quiet"
    assert Warm().choose(ask(200), fleet_of(quiet, long, costs=published)).instance == "quiet"


LEARNED = COSTS._replace(short_step=ShortStep(0.012, 0.0005))


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        (Warm(), 0.012),
        (Warm(step_s=0.02), 0.02),  # the learned time is not surely less than half of it
        (Warm(step_s=0.0), 0.0),
        (Warm(learned_step=False), 0.04),
        (Joint(), 0.012),
        (Migrate(), 0.012),
    ],
)
def test_a_learned_step_replaces_one_that_is_surely_twice_as_long(policy: Warm, seconds: float) -> None:
    alone, other = InstanceView("a", requests=16), InstanceView("b", requests=16, prefilling=1)
    found = policy.choose(ASKED, fleet_of(alone, other._replace(pending_prefill_tokens=500), costs=LEARNED))
    assert score_of(found, "a").inputs["others_s"] == pytest.approx((1.6 + seconds) * 16)
    assert score_of(found, "b").inputs["others_s"] == pytest.approx(1.6 * 16)


@given(cases())
def test_the_quick_choice_knows_of_a_learned_step(case: tuple[RequestView, FleetSnapshot]) -> None:
    request, whole = case
    learned = whole._replace(costs=LEARNED)
    columns = FleetColumns.of(learned.instances)
    place = Warm().quick(request, learned, columns).place
    assert columns.instance[place] == Warm().choose(request, learned).instance


def test_published_constants_only_include_the_step() -> None:
    alone = fleet_of(InstanceView("a", requests=16), costs=LEARNED)
    inputs = score_of(Warm(learned=False).choose(ASKED, alone), "a").inputs
    assert inputs["others_s"] == pytest.approx((PrefillModel().seconds(10_000, 0) + 0.04) * 16)


@pytest.mark.parametrize(
    ("in_flight", "room", "share"),
    [
        (80_000, 0.0, 0.0),  # with this prompt exactly the share of the pool
        (85_000, 30 * 0.05, 0.05),  # half of this prompt is too much
        (180_000, 30 * 1.0, 0.1),  # a pool's worth must be freed first; this prompt is a tenth of a pool
    ],
)
def test_room_is_waited_for_and_what_is_taken_of_it_others_wait_for(in_flight: int, room: float, share: float) -> None:
    used, promised = in_flight // 2, in_flight - in_flight // 2
    view = InstanceView("a", requests=4, kv_capacity_tokens=100_000, kv_used_tokens=used, kv_promised_tokens=promised)
    found = terms(view)
    assert found["room_s"] == pytest.approx(room)
    assert found["others_s"] == pytest.approx(1.64 * 4 + 30 * share * 4)
    without = terms(view, Warm(hold_s=0.0))
    assert without["room_s"] == 0
    assert without["others_s"] == pytest.approx(1.64 * 4)


def test_if_another_instance_has_room_only_requests_in_prefill_wait_for_it() -> None:
    full = InstanceView("full", requests=4, prefilling=1, kv_capacity_tokens=100_000, kv_used_tokens=85_000)
    roomy = InstanceView("roomy", kv_capacity_tokens=100_000)
    choice = Warm().choose(ASKED, fleet(full, roomy))
    assert score_of(choice, "full").inputs["room_s"] == pytest.approx(30 * 0.05)
    assert score_of(choice, "full").inputs["others_s"] == pytest.approx(1.6 * 4 + 30 * 0.05 * 1)
    both = Warm().choose(ASKED, fleet(full, roomy._replace(kv_used_tokens=95_000)))
    assert score_of(both, "full").inputs["others_s"] == pytest.approx(1.6 * 4 + 30 * 0.05 * 4)


def test_a_pool_of_unknown_size_counts_as_having_room() -> None:
    assert terms(InstanceView("a", kv_used_tokens=10**9))["room_s"] == 0


def test_a_session_stays_until_leaving_saves_more_than_its_history_costs() -> None:
    """Home has 28,000 of 30,000 cached: 0.1 + 0.2 + 0.58 s there, 0.1 + 3 + 4.5 s elsewhere: 6.72 s more."""
    request = ask(30_000, session_id="s")
    free = InstanceView("free")

    def chosen(queued_prefills: int) -> str:
        home = InstanceView(
            "home", cached_tokens=28_000, requests=1, prefilling=1, pending_prefill_tokens=queued_prefills
        )
        return Warm(others_weight=0.0, queue_crowd=0.0).choose(request, fleet(home, free)).instance

    # half of one queued prefill: 30,000 tokens are 3 + 4.5 s, 60,000 tokens 6 + 18 s
    assert chosen(30_000) == "home"
    assert chosen(60_000) == "free"


def test_a_long_prompt_goes_where_it_stalls_few_and_a_short_one_where_it_need_not_wait() -> None:
    quiet = InstanceView("quiet", requests=1, prefilling=1, pending_prefill_tokens=20_000)  # 2 s of queue
    crowded = InstanceView("crowded", requests=25)
    assert Warm().choose(ask(20_000), fleet(quiet, crowded)).instance == "quiet"
    assert Warm().choose(ask(100), fleet(quiet, crowded)).instance == "quiet"
    assert Warm().choose(ask(100), fleet(quiet, crowded._replace(requests=8))).instance == "crowded"


def test_what_prefills_really_take_is_learned() -> None:
    slower = COSTS.prefill
    for _ in range(50):
        slower = slower.observe(10_000, 0, 0.0, 3.2)
    slow = fleet_of(InstanceView("a"), costs=Costs(slower))
    assert score_of(Warm().choose(ASKED, slow), "a").inputs["own_s"] == pytest.approx(3.2, rel=0.02)
    published = PrefillModel().predict(10_000).seconds
    assert score_of(Warm(learned=False).choose(ASKED, slow), "a").inputs["own_s"] == pytest.approx(published)
    assert score_of(Warm().choose(ASKED, fleet_of(InstanceView("a"))), "a").inputs["own_s"] == pytest.approx(published)


def test_equal_candidates_take_turns() -> None:
    taken = [Warm().choose(ASKED, fleet_of(*idle(4), costs=COSTS, sequence=s)).instance for s in range(4)]
    assert sorted(taken) == ["inst-0", "inst-1", "inst-2", "inst-3"]


@given(case=cases(), more=st.integers(1, 50_000))
def test_more_cached_never_costs_more_and_more_queued_never_less(
    case: tuple[RequestView, FleetSnapshot], more: int
) -> None:
    request, snapshot = case
    view = snapshot.instances[0]._replace(decoding_tokens=0)
    before = Warm().choose(request, fleet(view)).scores[0].score
    warmer = view._replace(cached_tokens=min(view.cached_tokens + more, request.prompt_tokens - 1))
    assert Warm().choose(request, fleet(warmer)).scores[0].score <= before * (1 + 1e-9)
    if view.prefilling:
        busier = view._replace(pending_prefill_tokens=view.pending_prefill_tokens + more)
        assert Warm().choose(request, fleet(busier)).scores[0].score >= before * (1 - 1e-9)


@given(case=cases())
def test_every_term_is_a_time_and_the_score_is_their_sum(case: tuple[RequestView, FleetSnapshot]) -> None:
    request, snapshot = case
    for view, score in zip(
        snapshot.instances, Warm().choose(request, snapshot._replace(costs=COSTS)).scores, strict=True
    ):
        found = dict(score.inputs)
        assert found.pop("cached_tokens") == view.cached_tokens
        assert all(seconds >= 0 for seconds in found.values())
        assert score.score == pytest.approx(sum(found.values()))


@pytest.mark.parametrize(
    "bad",
    [
        {"others_weight": -0.1},
        {"queue_crowd": -0.1},
        {"step_s": -1},
        {"hold_s": -1},
        {"pool_share": 0.0},
        {"pool_share": 1.1},
    ],
)
def test_parameters_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"warm: {next(iter(bad))} must"):
        Warm(**bad)  # type: ignore[arg-type]


UNEQUAL = COSTS._replace(slowness={"slow": 3.0, "quick": 0.5})


def test_prefills_steps_and_the_answer_take_longer_on_a_slow_instance() -> None:
    slow = InstanceView("slow", requests=16)
    queued = InstanceView("quick", requests=16, prefilling=2, pending_prefill_tokens=20_000)
    found = Warm().choose(ASKED, fleet_of(slow, queued, InstanceView("middle"), costs=UNEQUAL))
    inputs = score_of(found, "slow").inputs
    assert inputs["own_s"] == pytest.approx(3 * 1.6)
    assert inputs["others_s"] == pytest.approx(3 * (1.6 + 0.04) * 16)
    assert inputs["answer_s"] == pytest.approx(3 * 3.0)
    assert inputs["slowness"] == 3.0
    alike = Warm().choose(ASKED, fleet_of(slow, queued, costs=COSTS))
    assert score_of(found, "quick").inputs["queue_s"] == pytest.approx(score_of(alike, "quick").inputs["queue_s"] / 2)
    assert score_of(found, "middle").inputs["answer_s"] == 3.0
    assert not score_of(alike, "slow").inputs.keys() & {"answer_s", "slowness"}


@pytest.mark.parametrize("policy", [Warm(learned=False), Warm(learned_slowness=False), Joint(learned_slowness=False)])
def test_without_learning_all_instances_count_as_equally_fast(policy: Warm) -> None:
    fleet = fleet_of(InstanceView("slow"), InstanceView("quick", requests=1), costs=UNEQUAL)
    assert policy.choose(ASKED, fleet).instance == "slow"
    assert Warm().choose(ASKED, fleet).instance == "quick"


@given(cases())
def test_the_quick_choice_knows_of_slow_instances(case: tuple[RequestView, FleetSnapshot]) -> None:
    request, whole = case
    names = [view.instance for view in whole.instances]
    unequal = whole._replace(costs=COSTS._replace(slowness=dict(zip(names, (4.0, 0.25, 2.0), strict=False))))
    columns = FleetColumns.of(unequal.instances)
    for policy in (Warm(), Joint(), Migrate()):
        place = policy.quick(request, unequal, columns).place
        assert columns.instance[place] == policy.choose(request, unequal).instance
