"""Shadow index, exact index and prompts in flight as one prediction."""

from __future__ import annotations

from policies.predict.blocks import hash_token_blocks
from policies.predict.exact_index import PLAIN_ROOT, StoredBlocks
from policies.predict.predictor import Match
from policies.predict.promises import LINGER_S, Promises
from policies.state import Commitment, FleetState
from policies.types import CachePrediction, IndexSource, InstanceView, RequestView
from tests.policies.builders import decision_for

SIZE = 16


def ask(ids: list[int], **fields: object) -> RequestView:
    hashes = hash_token_blocks(ids, SIZE, PLAIN_ROOT)
    return RequestView("req", len(ids), hashes, float(SIZE))._replace(**fields)  # type: ignore[arg-type]


def fleet(*trusted: str) -> FleetState:
    state = FleetState()
    for name in ("a", "b"):
        state.add_instance(name)
        state.predictor.exact.follow(name)
        if name in trusted:
            state.predictor.exact.reset(name)
    return state


def see(state: FleetState, request: RequestView, name: str, now_s: float = 0.0) -> InstanceView:
    views = state.snapshot(request, now_s, state.instances).instances
    return next(view for view in views if view.instance == name)


def commit(state: FleetState, request: RequestView, decode_on: str, prefill_on: str | None = None) -> Commitment:
    snapshot = state.snapshot(request, 0.0, state.instances)
    return state.commit(request, snapshot, decision_for(request, decode_on, prefill_on), 0.0)


def stores(state: FleetState, name: str, ids: list[int]) -> None:
    blocks = len(ids) // SIZE
    names = [(name, number, tuple(ids[: (number + 1) * SIZE])).__hash__() for number in range(blocks)]
    state.predictor.exact.store(name, StoredBlocks(names, None, ids[: blocks * SIZE], SIZE, blocks))


IDS = list(range(165))


def test_a_trusted_instance_is_predicted_by_its_events_others_by_the_shadow_and_both_are_shown() -> None:
    state, request = fleet("a"), ask(IDS)
    for name in ("a", "b"):
        commit(state, request, name).release()
    for now_s in (0.0, LINGER_S / 2):
        seen = see(state, request, "a", now_s)
        assert (seen.index_source, seen.cached_tokens) == (IndexSource.EXACT, 160)
    seen = see(state, request, "a", 2 * LINGER_S)
    assert CachePrediction.of(seen) == CachePrediction(IndexSource.EXACT, 160, 0)
    assert (seen.cached_tokens, seen.holds_class) == (0, False)
    stores(state, "a", IDS[:80])
    assert CachePrediction.of(see(state, request, "a", 9.0)) == CachePrediction(IndexSource.EXACT, 160, 80)
    assert CachePrediction.of(see(state, request, "b", 9.0)) == CachePrediction(IndexSource.SHADOW, 160, None)


def test_text_and_salted_prompts_are_predicted_by_the_shadow() -> None:
    state = fleet("a", "b")
    request = ask(IDS, plain=False)
    commit(state, request, "a").release()
    assert CachePrediction.of(see(state, request, "a")) == CachePrediction(IndexSource.SHADOW, 160, None)
    assert not len(state.predictor.promises)


def test_a_sibling_sees_what_a_request_in_flight_will_have_stored() -> None:
    state = fleet("a", "b")
    first = commit(state, ask(IDS), "a")
    sibling = ask([*IDS[:100], *range(900, 999)])
    assert see(state, sibling, "a").cached_tokens == 96
    assert see(state, sibling, "b").cached_tokens == 0
    stores(state, "a", IDS[:32])  # the first chunk is stored, the rest still promised
    assert see(state, sibling, "a").cached_tokens == 96
    first.retract("a")
    assert see(state, sibling, "a").cached_tokens == 32
    first.release()


def test_a_promise_ends_when_the_events_have_come_or_a_little_later() -> None:
    state = fleet("a", "b")
    kept, late = commit(state, ask(IDS), "a"), commit(state, ask([7] * 64), "a")
    stores(state, "a", IDS)
    kept.release()
    kept.release()
    assert len(state.predictor.promises) == 1
    late.release()
    assert see(state, ask([7] * 64), "a", 1.0).cached_tokens == 48
    assert see(state, ask([7] * 64), "a", 1.1 + LINGER_S).cached_tokens == 0
    assert not len(state.predictor.promises)


def test_both_legs_of_a_hand_off_promise_and_a_p_that_failed_does_not() -> None:
    state, request = fleet("a", "b"), ask(IDS)
    commitment = commit(state, request, "a", "b")
    assert [see(state, request, name).cached_tokens for name in ("a", "b")] == [160, 160]
    commitment.retract("b")
    assert [see(state, request, name).cached_tokens for name in ("a", "b")] == [160, 0]
    commitment.release()


def test_a_restart_and_a_departure_void_what_was_promised() -> None:
    state, request = fleet("a", "b"), ask(IDS)
    commitments = [commit(state, request, name) for name in ("a", "b")]
    state.restarted("a")
    state.remove_instance("b")
    assert not len(state.predictor.promises)
    assert see(state, request, "a").cached_tokens == 0
    for commitment in commitments:
        commitment.release()
    assert not len(state.predictor.promises)


def never(block: int, number: int) -> bool:
    return False


def test_a_promise_that_was_kept_late_does_not_outlive_its_eviction() -> None:
    state = fleet("a", "b")
    commit(state, ask(IDS), "a").release()
    stores(state, "a", IDS)
    assert see(state, ask(IDS), "a").cached_tokens == 160
    state.predictor.exact.clear("a")
    assert see(state, ask(IDS), "a").cached_tokens == 0


def test_blocks_reported_and_evicted_before_a_lookup_are_no_longer_promised() -> None:
    state = fleet("a", "b")
    first = commit(state, ask(IDS), "a")
    first.release()
    assert see(state, ask(IDS), "a").cached_tokens == 160, "its events are on their way"
    stores(state, "a", IDS)
    names = [("a", number, tuple(IDS[: (number + 1) * SIZE])).__hash__() for number in range(10)]
    state.predictor.exact.remove("a", names)
    assert see(state, ask(IDS), "a").cached_tokens == 0
    assert len(state.predictor.promises) == 0


def test_a_cache_that_was_emptied_keeps_no_promise_of_a_finished_request() -> None:
    state = fleet("a", "b")
    commit(state, ask(IDS), "a").release()
    state.predictor.exact.clear("a")
    assert see(state, ask(IDS), "a").cached_tokens == 0


def test_the_deepest_of_many_promises_counts() -> None:
    promises = Promises()
    chain = hash_token_blocks(range(1600), SIZE)
    other = hash_token_blocks([*range(320), *range(9000, 9600)], SIZE)
    promises.add("a", other)
    numbers = [promises.add("a", chain[:length]) for length in (3, 50, 20, 50)]
    assert promises.match("a", chain, 0, 0.0, never) == 50
    assert promises.match("a", chain, 70, 0.0, never) == 70
    assert promises.match("a", other, 0, 0.0, never) == len(other)
    assert promises.match("a", [], 0, 0.0, never) == 0
    assert promises.match("b", chain, 5, 0.0, never) == 5
    for number in numbers[1:]:
        promises.drop(number)
        promises.drop(number)
    assert promises.match("a", chain, 0, 0.0, never) == 20


def test_of_a_lower_bound_and_the_shadow_index_the_one_with_more_predicts() -> None:
    state = FleetState()
    state.add_instance("a")
    exact = state.predictor.exact
    exact.follow("a")
    exact.reset_partial("a")
    ids = list(range(10 * SIZE))
    exact.store("a", StoredBlocks([0, 1], None, ids[: 2 * SIZE], SIZE, 2))
    request = ask(ids)
    assert state.predictor.match(request, 0.0) == Match({"a": 0}, {"a": 2})
    state.index.insert("a", request.block_hashes[:5])
    assert state.predictor.match(request, 0.0) == Match({"a": 5}, {})
    exact.reset("a")
    assert state.predictor.match(request, 0.0) == Match({"a": 5}, {"a": 0})


def test_one_instance_is_looked_up_in_the_exact_index_where_that_is_complete() -> None:
    state, request = fleet("a"), ask(IDS)
    for name in ("a", "b"):
        commit(state, request, name).release()
    stores(state, "a", IDS[:80])
    assert [state.predictor.match_one(name, request) for name in ("a", "b")] == [5, 10]
    assert state.predictor.match_one("a", request._replace(plain=False)) == 10
    state.predictor.exact.reset_partial("a")
    assert state.predictor.match_one("a", request) == 10
