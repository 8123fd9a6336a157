"""Static prefill/decode disaggregation: roles are respected, sessions return to their P, every refusal has a reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from policies.classes import ClassThresholds
from policies.decide import decide
from policies.offload.static_pd import StaticPd
from policies.registry import make_routing
from policies.state import Commitment, FleetState
from policies.types import (
    Connector,
    Decision,
    InstanceView,
    OffloadPlan,
    OffloadReason,
    RequestClass,
    RequestView,
    Role,
)
from tests.policies.builders import ask, ask_ids, ask_new, fleet_of

REQUEST = ask(2_000, max_tokens=100)
D = InstanceView("d", role=Role.KV_CONSUMER, kv_capacity_tokens=100_000)
P = InstanceView("p", role=Role.KV_PRODUCER)


class PdFleet:
    """A fleet of producers and consumers, routed as by the proxy."""

    def __init__(self, producers: int, consumers: int, policy: str = "session_sticky") -> None:
        self.state = FleetState()
        self.policy = make_routing(policy)
        self.producers = [f"p{i}" for i in range(producers)]
        self.consumers = [f"d{i}" for i in range(consumers)]
        for role, names in ((Role.KV_PRODUCER, self.producers), (Role.KV_CONSUMER, self.consumers)):
            for name in names:
                self.state.add_instance(name, role)
                self.state.set_capacity(name, 738_432, 16.0)

    def route(self, request: RequestView, without: tuple[str, ...] = ()) -> tuple[Decision, Commitment]:
        producers = [name for name in self.producers if name not in without]
        fleet = self.state.snapshot(request, 0.0, self.consumers, producers)
        decision = decide(request, fleet, self.policy, StaticPd(), ClassThresholds())
        return decision, self.state.commit(request, fleet, decision, 0.0)


def finish(commitment: Commitment) -> None:
    commitment.end_prefill()
    commitment.handed_over()
    commitment.decode.first_token()
    commitment.release()


@pytest.mark.parametrize(("producers", "consumers"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("policy", ["linear", "lmetric", "session_sticky", "unified", "round_robin"])
def test_producers_never_decode_and_consumers_never_prefill_for_others(
    producers: int, consumers: int, policy: str
) -> None:
    pd = PdFleet(producers, consumers, policy)
    open_commitments, prefills, decodes = [], Counter[str](), Counter[str]()
    for number in range(48):
        decision, commitment = pd.route(ask_new(number, 4_000, session_id=f"s{number}"))
        assert decision.offload.reason is OffloadReason.CHOSEN
        assert decision.prefill_on in pd.producers
        assert decision.decode_on in pd.consumers
        prefills[str(decision.prefill_on)] += 1
        decodes[decision.decode_on] += 1
        open_commitments.append(commitment)
    assert set(prefills) == set(pd.producers)
    assert set(prefills.values()) == {48 // producers}
    assert set(decodes) == set(pd.consumers)
    for commitment in open_commitments:
        finish(commitment)
    assert not any(pd.state.ledger.totals().values())
    assert (pd.state.offloads_in_flight, pd.state.holds.total()) == (0, 0)


@pytest.mark.parametrize(("producers", "consumers"), [(4, 4), (6, 2)])
def test_turns_of_a_session_return_to_the_p_that_computed_the_turns_before(producers: int, consumers: int) -> None:
    pd = PdFleet(producers, consumers)
    prompts = {f"s{n}": [n * 1_000_000 + i for i in range(8_000 + 640 * n)] for n in range(8)}
    went: dict[str, list[tuple[str | None, str]]] = {name: [] for name in prompts}
    for turn in range(4):
        for name, prompt in prompts.items():
            decision, commitment = pd.route(ask_ids(prompt, session_id=name))
            prefill_view_cached = 0 if turn == 0 else len(prompt) - 1_600
            assert commitment.workload.prefill is not None
            assert commitment.workload.prefill.cached_tokens >= prefill_view_cached - 16
            went[name].append((decision.prefill_on, decision.decode_on))
            finish(commitment)
            prompt.extend(range(900_000_000 + turn * 10_000, 900_000_000 + turn * 10_000 + 1_600))
    assert all(len(set(places)) == 1 for places in went.values())
    assert len({places[0][0] for places in went.values()}) == producers


def test_a_session_leaves_its_p_only_for_less_work() -> None:
    pd = PdFleet(2, 1)
    prompt = list(range(8_000))
    first, commitment = pd.route(ask_ids(prompt))
    finish(commitment)
    longer = ask_ids([*prompt, *range(1_000_000, 1_004_000)])
    stays, commitment = pd.route(longer)
    assert stays.prefill_on == first.prefill_on
    commitment.release()
    # With 12,000 tokens queued there, computing all 12,000 on the other P is faster than 12,000 + 4,000.
    pd.state.ledger.acquire(str(first.prefill_on), 12_000, 12_000, 0.0)
    other = ask_ids([*prompt, *range(2_000_000, 2_004_000)])
    assert pd.route(other)[0].prefill_on != first.prefill_on


def test_without_producers_the_consumers_compute_for_themselves() -> None:
    pd = PdFleet(4, 4)
    decision, commitment = pd.route(ask_new(1, 4_000), without=tuple(pd.producers))
    assert (decision.prefill_on, decision.offload.reason) == (None, OffloadReason.NO_PREFILL_CANDIDATE)
    assert decision.decode_on in pd.consumers
    commitment.release()
    assert pd.route(ask_new(2, 4_000), without=("p0", "p1", "p2"))[0].prefill_on == "p3"


def plan(decode: InstanceView = D, *others: InstanceView, request: RequestView = REQUEST, **fields: Any) -> OffloadPlan:
    return StaticPd().plan(request, decode, RequestClass.WARM, fleet_of(decode, *(others or (P,)), **fields))


@pytest.mark.parametrize(
    ("reason", "answer"),
    [
        (OffloadReason.CHOSEN, plan()),
        (OffloadReason.CHOSEN, plan(request=ask(256))),
        (OffloadReason.CHOSEN, plan(offloads_in_flight=255)),
        (OffloadReason.CHOSEN, plan(D._replace(kv_capacity_tokens=0))),
        (OffloadReason.BELOW_THRESHOLD, plan(request=ask(255))),
        (OffloadReason.BELOW_THRESHOLD, plan(D._replace(cached_tokens=1_745))),
        (OffloadReason.ROLE_FORBIDS, plan(D._replace(role=Role.KV_PRODUCER))),
        (OffloadReason.CAP_REACHED, plan(offloads_in_flight=256)),
        (OffloadReason.NO_ROOM_ON_D, plan(D._replace(kv_used_tokens=97_901))),
        (OffloadReason.NO_PREFILL_CANDIDATE, plan(D, P._replace(role=Role.KV_CONSUMER))),
        (OffloadReason.NO_PREFILL_CANDIDATE, plan(D, P._replace(connector=Connector.NIXL))),
        (OffloadReason.PAIR_BROKEN, plan(broken_pairs=frozenset({("p", "d")}))),
    ],
)
def test_every_reason_is_reached_for_any_class(reason: OffloadReason, answer: OffloadPlan) -> None:
    assert answer.reason is reason
    assert answer.prefill_on == ("p" if reason is OffloadReason.CHOSEN else None)


@pytest.mark.parametrize("params", [{"max_in_flight": 0}, {"min_new_tokens": -1}])
def test_bad_parameters_are_refused(params: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="max_in_flight must be at least 1 and min_new_tokens at least 0"):
        StaticPd(**params)
