"""Specialists: their number, its damping and bounds, and which instances they are."""

from __future__ import annotations

import pytest

from policies.offload.specialists import (
    ABSENT_S,
    FULLEST,
    KEEPS,
    MOST_BUSY,
    MOST_LOST,
    ROOM,
    SETTLED_S,
    SHARE,
    FleetLoad,
    Specialists,
    designated,
    wanted,
)
from policies.state import FleetState
from policies.types import InstanceView, RequestClass, RequestView, Role
from tests.policies.builders import ask, ask_new, decision_for, idle

POOL = 1_000_000


def load(share: float, instances: int = 8, **fields: float) -> FleetLoad:
    values = {"working_set_tokens": 0, "pool_tokens": POOL * instances, "lost_share": 0.0, **fields}
    return FleetLoad(share, instances, **values)  # type: ignore[arg-type]


def test_the_number_follows_three_quarters_of_the_share_of_long_prefills() -> None:
    edge = 0.5 / SHARE
    assert [wanted(0, load(share, 64)) for share in (0.0, edge - 0.01, edge + 0.01, 8.0)] == [0, 0, 1, 1]
    number = 0
    for _ in range(10):
        number = wanted(number, load(3.1 / SHARE, 64))
    assert number == 3


def test_it_shrinks_one_by_one_and_only_a_quarter_below_the_edge() -> None:
    assert wanted(3, load(2.3 / SHARE, 64)) == 3  # round says 2, but 2.25 is the limit
    assert wanted(3, load(2.2 / SHARE, 64)) == 2
    assert wanted(1, load(0.3 / SHARE)) == 1
    assert wanted(1, load(0.2 / SHARE)) == 0


@pytest.mark.parametrize(("instances", "most"), [(3, 0), (4, 1), (7, 1), (8, 2), (15, 3), (16, 4), (64, 16)])
def test_the_size_of_the_fleet_bounds_it(instances: int, most: int) -> None:
    number = 0
    for _ in range(20):
        number = wanted(number, load(100.0, instances))
    assert number == most


def test_the_working_set_must_fit_the_pools_of_the_others() -> None:
    others = 3 * POOL
    assert wanted(0, load(4.0, 4, working_set_tokens=int(ROOM * others))) == 1
    assert wanted(0, load(4.0, 4, working_set_tokens=int(ROOM * others) + 1)) == 0
    assert wanted(1, load(4.0, 4, working_set_tokens=int(KEEPS * ROOM * others))) == 1
    assert wanted(1, load(4.0, 4, working_set_tokens=int(KEEPS * ROOM * others) + 1)) == 0
    assert wanted(0, load(4.0, 4, pool_tokens=0, working_set_tokens=1)) == 0


def test_none_is_added_to_a_large_fleet_whose_pools_fill() -> None:
    fullest, fits = int(FULLEST * 16 * POOL), int(ROOM * 14 * POOL)
    assert fullest < fits
    assert [wanted(1, load(4.0, 16, working_set_tokens=tokens)) for tokens in (fullest, fullest + 1, fits)] == [2, 1, 1]
    assert [wanted(0, load(4.0, 16, working_set_tokens=tokens)) for tokens in (fullest, fullest + 1, fits)] == [1, 0, 0]


def test_there_are_none_while_contexts_are_recomputed() -> None:
    assert wanted(0, load(4.0, lost_share=MOST_LOST * 1.01)) == 0
    assert wanted(1, load(4.0, lost_share=MOST_LOST * 1.01)) == 1
    assert wanted(1, load(4.0, lost_share=MOST_LOST * KEEPS * 1.01)) == 0


def test_specialists_are_those_that_can_send_then_the_instances_with_the_fewest_streams_then_sessions() -> None:
    views = (
        InstanceView("busy", requests=3, prefilling=1, role=Role.KV_BOTH),
        InstanceView("homes", requests=2, prefilling=2, sessions=4, role=Role.KV_BOTH),
        InstanceView("few", requests=1, prefilling=1, sessions=2, role=Role.KV_BOTH),
        InstanceView("plain"),
        InstanceView("consumer", role=Role.KV_CONSUMER),
    )
    assert designated((), 2, views) == ("few", "homes")
    assert designated(("busy",), 2, views) == ("busy", "few")
    assert designated(("busy", "few"), 1, views) == ("busy",)
    assert designated((), 9, views) == ("few", "homes", "busy", "plain")
    assert designated((), 1, views[3:]) == ("plain",), "a fleet without KV roles has specialists too"


def decided(
    book: Specialists, views: tuple[InstanceView, ...], now_s: float, heavy: bool = True, **fields: float
) -> tuple[str, ...]:
    """Specialists after a decision among ``views``, on the load of the fleet and at its share of long prefills."""
    instances = len(book.pools(views, now_s, heavy=heavy))
    book.update(views, load(fields.pop("share", book.share(now_s)), instances, **fields), now_s, heavy=heavy)
    return book.names


def updated(book: Specialists, now_s: float, share_s: float = 1e4, names: int = 8, **fields: float) -> tuple[str, ...]:
    book.prefilled("inst-0", share_s, now_s)
    return decided(book, idle(names), now_s, True, **fields)


def test_the_share_is_of_time_and_right_from_the_start() -> None:
    book = Specialists()
    book.began(0.0)
    assert book.share(0.0) == 0.0
    for second in range(1, 1201):
        book.prefilled("inst-0", 2.0, float(second))
        if second in {60, 600, 1200}:
            assert book.share(float(second)) == pytest.approx(2.0, rel=0.02)
    assert book.share(1260.0) == pytest.approx(1.0, rel=0.02)


def test_a_specialist_stretches_answers_by_the_share_of_its_time_that_long_prefills_take() -> None:
    book = Specialists()
    book.began(0.0)
    assert book.stretches(0.0) == {}
    for second in range(1, 601):
        book.prefilled("inst-0", 0.5, float(second))
        book.prefilled("inst-1", 9.0, float(second))
    assert book.stretches(600.0) == {}, "there are none"
    for _ in range(2):
        decided(book, idle(8), 600.0)
    stretches = book.stretches(600.0)
    assert list(stretches) == ["inst-0", "inst-1"] == list(book.names)
    assert stretches["inst-0"] == pytest.approx(2.0, rel=0.02)
    assert stretches["inst-1"] == pytest.approx(1 / (1 - MOST_BUSY)), "more work than time"
    assert book.stretches(660.0)["inst-0"] == pytest.approx(1 / 0.75, rel=0.02)
    book.restarted("inst-0")
    assert book.stretches(600.0)["inst-0"] == 1.0, "it has nothing to compute any more"
    book.forget("inst-1")
    assert book.stretches(600.0) == {"inst-0": 1.0}


def test_a_session_has_a_recent_context_with_each_model() -> None:
    book = Specialists()
    for number, (model, tokens) in enumerate((("large", 50_000), ("small", 100), ("large", 60_000))):
        book.sent(ask(tokens, session_id="s", model=model), "inst-0", float(number), 100, heavy=False)
    assert book.contexts.by_instance("") == {"inst-0": 60_100}
    state = FleetState()
    state.add_instance("inst-0")
    state.specialists = book
    book.names = ("inst-0",)
    asking = ask(70_000, session_id="s", model="large")
    assert state.snapshot(asking, 3.0, ["inst-0"]).contexts.tokens == {"inst-0": 100}


def test_none_is_added_before_the_bounds_held_for_a_while() -> None:
    book = Specialists()
    book.began(0.0)
    assert updated(book, SETTLED_S - 1) == ()
    assert updated(book, SETTLED_S, lost_share=1.0) == ()
    assert updated(book, SETTLED_S + 1) == ()
    assert updated(book, 2 * SETTLED_S - 1) == ()
    assert updated(book, 2 * SETTLED_S) == ("inst-0",)


def test_one_that_is_no_candidate_for_long_or_left_is_replaced() -> None:
    book = Specialists()
    book.began(0.0)
    assert updated(book, 100.0, names=4) == ("inst-0",)
    rest = idle(5)[1:]
    assert decided(book, rest, 200.0, share=9.0) == ("inst-0",)
    assert decided(book, rest, 200.0 + ABSENT_S, share=9.0) == ("inst-0",)
    assert decided(book, rest, 201.0 + ABSENT_S, share=9.0, heavy=False) == ("inst-0",)
    assert decided(book, rest[:3], 201.0 + ABSENT_S, share=9.0) == ("inst-0",), "none of these may be one"
    assert decided(book, rest, 201.0 + ABSENT_S, share=9.0) == ("inst-1",)
    book.forget("inst-1")
    assert book.names == ()


def test_one_that_few_requests_can_use_stays() -> None:
    book = Specialists()
    book.began(0.0)
    assert updated(book, 100.0, names=4) == ("inst-0",)
    for turn in range(1, 9):
        now_s, bound = 100.0 + turn * 0.9 * ABSENT_S, idle(4)[turn % 3 + 1 :]
        assert decided(book, bound, now_s, share=0.9, heavy=turn % 4 != 0) == ("inst-0",), "a retry"
        assert turn % 2 or decided(book, idle(4), now_s, share=0.9, heavy=False) == ("inst-0",)
    model = tuple([InstanceView(f"other-{number}", role=Role.KV_BOTH) for number in range(2)])
    for second in range(200, 400):
        assert decided(book, model, float(second), share=0.9, heavy=False) == ("inst-0",), "long prompts come seldom"


def test_one_is_added_where_long_prompts_may_run_and_only_if_the_candidates_are_enough() -> None:
    book = Specialists()
    book.began(0.0)
    chat = tuple([InstanceView(f"chat-{number}", role=Role.KV_BOTH) for number in range(8)])
    busy = tuple([view._replace(requests=9) for view in idle(8)])
    assert decided(book, chat, 100.0, share=9.0, heavy=False) == ()
    assert decided(book, busy[:3], 100.0, share=9.0) == ()
    assert decided(book, busy, 100.0, share=9.0) == ("inst-0",)
    assert decided(book, chat, 100.0, share=9.0, heavy=False) == ("inst-0",)
    assert decided(book, busy[:7], 100.0, share=9.0) == ("inst-0",), "one of seven"
    assert decided(book, busy, 161.0, share=9.0, heavy=False) == ("inst-0",), "long prompts may have ended"
    assert decided(book, busy, 160.0, share=9.0, heavy=False) == ("inst-0", "inst-1")
    assert decided(book, busy, 100.0, share=9.0) == ("inst-0", "inst-1"), "two of eight, though the fleet has sixteen"
    assert decided(book, chat, 100.0, share=9.0) == ("inst-0", "inst-1", "chat-0"), "this model has long ones too"
    assert decided(book, chat[:1], 100.0, share=0.0, heavy=False) == ("inst-0", "inst-1"), "any may remove one"


def test_the_bounds_are_those_of_all_instances_that_any_request_may_use() -> None:
    state, names = fleet_state(8, 1_000_000)
    for second in range(200):
        request = ask_new(second, 60_000, session_id=f"s-{second % 20}")._replace(request_id=f"heavy-{second}")
        route(state, request, names, float(second), names[second % 8])
    assert len(state.specialists.names) == 2
    for second in range(200, 260):
        few = ask_new(second, 300)._replace(request_id=f"few-{second}")
        route(state, few, names[:2], float(second), names[0])
        if second % 15 == 0:
            heavy = ask_new(second, 60_000, session_id="s-0")._replace(request_id=f"heavy-{second}")
            route(state, heavy, names, float(second), names[second % 8])
        assert len(state.specialists.names) == 2


def test_one_whose_role_changes_is_none_any_more() -> None:
    book = Specialists()
    book.began(0.0)
    assert updated(book, 100.0) == ("inst-0",)
    assert updated(book, 101.0) == ("inst-0", "inst-1")
    changed = (idle(1)[0]._replace(role=Role.KV_CONSUMER), *idle(8)[1:])
    assert decided(book, changed, 102.0) == ("inst-1", "inst-2")


def test_a_retry_is_no_return_and_its_long_prefill_counts_once() -> None:
    state, names = fleet_state(8, 10_000_000)
    once, _ = fleet_state(8, 10_000_000)
    for number in range(40):
        now_s, request = 30.0 * number, ask_new(number, 60_000)._replace(request_id=f"once-{number}")
        for each, attempts in ((state, 2), (once, 1)):
            for attempt in range(attempts):
                route(each, request, names, now_s, names[(number + attempt) % 8])
    assert state.specialists.share(now_s) == once.specialists.share(now_s) > 0.0
    assert state.specialists.contexts.return_share == once.specialists.contexts.return_share < 1.0


def test_an_earlier_time_changes_nothing_for_the_worse() -> None:
    book = Specialists()
    book.prefilled("inst-0", 5.0, 100.0)
    book.prefilled("inst-0", 5.0, 90.0)
    assert book.share(80.0) == 0.0
    assert book.share(160.0) == pytest.approx(10.0 * 0.5 * 0.6931 / 60.0 / 0.5, rel=0.01)


def fleet_state(instances: int, pool_tokens: int) -> tuple[FleetState, list[str]]:
    """State of a fleet that can hand over KV, and the names of its instances."""
    state, names = FleetState(), [f"inst-{number}" for number in range(instances)]
    for name in names:
        state.add_instance(name, Role.KV_BOTH)
        state.set_capacity(name, pool_tokens, 16.0)
    return state, names


def route(state: FleetState, request: RequestView, candidates: list[str], now_s: float, decode_on: str) -> None:
    """Send a request, as HEAVY if it is long, and end it at once."""
    fleet = state.snapshot(request, now_s, candidates)
    kind = RequestClass.HEAVY if request.prompt_tokens > 20_000 else RequestClass.WARM
    decision = decision_for(request, decode_on)._replace(request_class=kind)
    state.commit(request, fleet, decision, now_s).release(now_s)


@pytest.mark.parametrize(("pool_tokens", "number"), [(30_000, 0), (60_000, 2)])
def test_idle_contexts_that_may_return_count_against_specialists(pool_tokens: int, number: int) -> None:
    state, names = fleet_state(8, pool_tokens)
    for turn in range(40):
        now_s, request = 10.0 * turn, ask_new(turn, 4_500, session_id=f"s-{turn}")
        state.specialists.prefilled("inst-0", 100.0, now_s)
        fleet = state.snapshot(request, now_s, names)
        decision = decision_for(request, names[turn % 8], names[(turn + 1) % 8])
        state.commit(request, fleet, decision, now_s).release(now_s)
    # 40 contexts of sessions that may return, and those that the first 500 s will bring.
    assert len(state.specialists.names) == number


def test_commits_count_heavy_prefills_and_snapshots_only_read() -> None:
    state, names = fleet_state(4, 10_000_000)
    for number in range(12):
        now_s, request = 10.0 * number, ask_new(number, 120_000)._replace(request_id=f"req-{number}")
        fleet = state.snapshot(request, now_s, names)
        assert tuple(fleet.specialists) == state.specialists.names
        decision = decision_for(request, names[number % 4], names[(number + 1) % 4])
        state.commit(request, fleet, decision, now_s).release(now_s)
    assert len(state.specialists.names) == 1
    [specialist] = state.specialists.names
    state.remove_instance(specialist)
    assert state.specialists.names == ()


def test_snapshots_have_the_contexts_of_other_sessions_while_there_are_specialists() -> None:
    state, names = fleet_state(4, 10_000_000)
    for number in range(12):
        now_s, request = 10.0 * number, ask_new(number, 120_000, session_id=f"s-{number}")
        fleet = state.snapshot(request, now_s, names)
        assert bool(fleet.contexts.tokens) == bool(fleet.specialists)
        decision = decision_for(request, names[number % 3], names[3])
        state.commit(request, fleet, decision, now_s).release(now_s)
    again = state.snapshot(ask_new(0, 120_000, session_id="s-0"), 130.0, names)
    assert again.contexts.return_share == 1.0
    assert dict(again.contexts.tokens) == {"inst-0": 360_000, "inst-1": 480_000, "inst-2": 480_000}
    state.restarted("inst-1")
    assert "inst-1" not in state.snapshot(request, 131.0, names).contexts.tokens
    assert again.contexts.tokens["inst-1"] == 480_000, "a snapshot does not change"


def test_contexts_that_nothing_follows_count_for_less() -> None:
    state, names = fleet_state(4, 10_000_000)
    for number in range(300):
        now_s, request = 10.0 * number, ask_new(number, 120_000, session_id=f"once-{number}")
        fleet = state.snapshot(request, now_s, names)
        decision = decision_for(request, names[number % 3], names[3])
        state.commit(request, fleet, decision, now_s).release(now_s)
    contexts = state.snapshot(request, now_s, names).contexts
    assert sum(contexts.tokens.values()) > 80 * 120_000
    assert contexts.return_share < 0.5
