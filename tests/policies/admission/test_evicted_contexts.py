"""Lost contexts: those that no instance holds any more, not those of sessions that moved."""

from __future__ import annotations

import pytest

from policies.state import FleetState
from policies.types import RequestView, Role
from tests.policies.builders import BLOCK_TOKENS, ask_ids, ask_new, decision_for

CONTEXT = 1_600
GROWTH = 160
NOW_S = 5.0


def fleet(*, pool_tokens: int = 0, roles: tuple[Role, ...] = (Role.KV_BOTH,) * 3) -> FleetState:
    """Instances named inst-0, inst-1, ...; their engines report cached tokens."""
    state = FleetState()
    for number, role in enumerate(roles):
        state.add_instance(f"inst-{number}", role)
        if pool_tokens:
            state.set_capacity(f"inst-{number}", pool_tokens, float(BLOCK_TOKENS))
    for tokens, cached in ((64, 0), (96, 64)):
        request = ask_new(9, tokens, session_id="warm-up")._replace(request_id=f"warm-up-{tokens}")
        run(state, request, "inst-0", reported=cached)
    return state


def turn(number: int) -> RequestView:
    """A turn of the session, each ``GROWTH`` tokens longer than the one before."""
    request = ask_ids(list(range(CONTEXT + number * GROWTH)), session_id="session")
    return request._replace(request_id=f"turn-{number}")


def run(
    state: FleetState, request: RequestView, decode_on: str, prefill_on: str | None = None, *, reported: int | None
) -> None:
    """Send a request and end it; ``reported``: cached tokens of the instance that computed its prompt."""
    decoders = [name for name in state.instances if name not in state.producers]
    snapshot = state.snapshot(request, NOW_S, decoders, state.producers)
    chosen = snapshot.view(decode_on)
    assert chosen is not None
    decision = decision_for(request, decode_on, prefill_on, chosen.cached_tokens)
    state.commit(request, snapshot, decision, NOW_S).release(NOW_S, 0.0, reported)


def lost(state: FleetState) -> tuple[float, int]:
    """Share of the time and tokens."""
    return state.accounts.losses.share(len(state.instances), NOW_S), state.accounts.losses.tokens


def seconds_share(state: FleetState, prompt_tokens: int, before_tokens: int, held_tokens: int) -> float:
    """Share that a fleet has which has recomputed this once."""
    other = FleetState()
    other.accounts._losses.sent("a", state.costs.prefill, prompt_tokens, before_tokens, held_tokens, NOW_S)
    return other.accounts.losses.share(len(state.instances), NOW_S)


def test_a_session_that_moves_between_instances_which_keep_its_blocks_loses_nothing() -> None:
    state = fleet()
    run(state, turn(0), "inst-0", reported=0)
    for number, name in enumerate(("inst-1", "inst-0", "inst-2", "inst-1"), start=1):
        # inst-1 and inst-2 compute the context for the first time, then continue their own.
        cached = {1: 0, 2: CONTEXT, 3: 0, 4: CONTEXT + GROWTH}[number]
        run(state, turn(number), name, reported=cached)
        assert lost(state) == (0.0, 0)


@pytest.mark.parametrize("name", ["inst-0", "inst-1"])
def test_a_context_that_was_evicted_is_lost_wherever_it_is_computed_again(name: str) -> None:
    state = fleet(pool_tokens=2 * CONTEXT)
    run(state, turn(0), "inst-0", reported=0)
    run(state, ask_new(1, 2 * CONTEXT, session_id="other"), "inst-0", reported=0)
    assert lost(state) == (0.0, 0)
    request = turn(1)
    run(state, request, name, reported=0)
    assert lost(state) == (pytest.approx(seconds_share(state, request.prompt_tokens, CONTEXT, 0)), CONTEXT)


def test_a_context_that_its_own_engine_does_not_have_as_predicted_is_lost() -> None:
    state = fleet()
    run(state, turn(0), "inst-0", reported=0)
    request = turn(1)
    run(state, request, "inst-0", reported=0)
    assert lost(state) == (pytest.approx(seconds_share(state, request.prompt_tokens, CONTEXT, 0)), CONTEXT)


def test_of_a_context_that_its_engine_does_not_have_only_what_no_other_instance_holds_is_lost() -> None:
    state = fleet()
    run(state, turn(0), "inst-1", reported=0)
    run(state, turn(1), "inst-0", reported=0)
    request = turn(2)
    run(state, request, "inst-0", reported=0)
    share = seconds_share(state, request.prompt_tokens, CONTEXT + GROWTH, CONTEXT)
    assert lost(state) == (pytest.approx(share), GROWTH)


def test_an_engine_that_has_more_than_predicted_corrects_a_loss() -> None:
    state = fleet(pool_tokens=2 * CONTEXT)
    run(state, turn(0), "inst-0", reported=0)
    run(state, ask_new(1, 2 * CONTEXT, session_id="other"), "inst-0", reported=0)
    run(state, turn(1), "inst-0", reported=CONTEXT)
    assert lost(state) == (pytest.approx(0.0, abs=1e-12), 0)


def test_a_hand_off_computes_a_prompt_again_that_another_instance_holds_and_nothing_is_lost() -> None:
    state = fleet()
    run(state, turn(0), "inst-0", reported=0)
    run(state, turn(1), "inst-0", "inst-1", reported=0)  # D holds the context
    assert lost(state) == (0.0, 0)
    run(state, turn(2), "inst-0", "inst-2", reported=0)  # and P of the last turn
    assert lost(state) == (0.0, 0)


def test_after_a_hand_off_the_cached_tokens_are_those_of_the_instance_that_prefilled() -> None:
    state = fleet()
    run(state, turn(0), "inst-1", reported=0)
    request = turn(1)
    run(state, request, "inst-0", "inst-1", reported=0)  # P had evicted it; D never had it
    assert lost(state) == (pytest.approx(seconds_share(state, request.prompt_tokens, CONTEXT, 0)), CONTEXT)


def test_an_instance_that_only_prefills_holds_contexts_too() -> None:
    state = fleet(roles=(Role.KV_CONSUMER, Role.KV_CONSUMER, Role.KV_PRODUCER))
    run(state, turn(0), "inst-0", "inst-2", reported=0)
    state.restarted("inst-0")
    run(state, turn(1), "inst-1", reported=0)
    assert lost(state) == (0.0, 0)


def test_what_an_instance_held_that_restarted_or_left_is_lost() -> None:
    for leave in (FleetState.restarted, FleetState.remove_instance):
        state = fleet()
        run(state, turn(0), "inst-2", reported=0)
        leave(state, "inst-2")
        run(state, turn(1), "inst-1", reported=0)
        assert lost(state)[1] == CONTEXT
