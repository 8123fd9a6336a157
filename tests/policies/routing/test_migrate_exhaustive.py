"""``migrate`` prices few instances and chooses what it would choose after pricing all of them by its docstring."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from policies.costs.book import transfer_job
from policies.costs.formulas import Costs
from policies.offload.base import may_receive, may_send
from policies.routing.migrate import Migrate
from policies.routing.warm import Warm
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Connector, OffloadReason, Reason, RequestView, Role, Transport
from tests.policies.builders import ask
from tests.policies.offload.test_few_are_priced import drawn_costs, drawn_view
from tests.policies.routing.test_joint_exhaustive import with_queue

LOOSE: dict[str, Any] = {"overload_s": 0.0, "overload_factor": 1.0, "affinity_gate": 0.1, "min_cached_tokens": 1}
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    LOOSE,
    {**LOOSE, "priced": False, "target_share": 0.99},
    {**LOOSE, "stream_s": 0.0, "min_gain_s": 0.0},
    {"hold_s": 0.0, "learned": False, "stream_s": 0.05, "overload_s": 0.2},
    {"overload_factor": 1.5, "max_in_flight": 1, "min_gain_s": 3.0},
    {**LOOSE, "overload_factor": 2.0, "overtakes": 1.0},
    {**LOOSE, "slowdown": 0.0},
)


def drawn(draw: random.Random) -> tuple[RequestView, FleetSnapshot]:
    """A request and a fleet of 1 to 64, half of the time full of ties; mostly one instance is a busy home."""
    prompt, size, ties = draw.choice((9_000, 20_000, 60_000, 150_000)), draw.choice((1, 2, 3, 8, 8, 64)), draw.random()
    names = [f"inst-{number}" for number in range(size)]
    draw.shuffle(names)
    views = [drawn_view(draw, name, prompt, ties=ties < 0.5) for name in names]
    if draw.random() < 0.8:  # all but the home may pull from it, and have less to do
        cold, busy = draw.choice((0, 0, prompt // 4)), draw.choice((8, 24, 60))
        able: dict[str, Any] = {"role": Role.KV_BOTH, "connector": Connector.MOONCAKE, "host": "h1"}
        transport = draw.choice((None, Transport.RDMA, Transport.NVLINK))
        for place, view in enumerate(views):
            light = draw.choice((0, 1, 4, 12))
            views[place] = view._replace(
                requests=light,
                prefilling=min(light, view.prefilling),
                cached_tokens=cold if draw.random() < 0.9 else view.cached_tokens,
                kv_capacity_tokens=draw.choice((738_432, 738_432, view.kv_capacity_tokens)),
                transport=transport,
                **(able if draw.random() < 0.9 else {}),
            )
        home = draw.randrange(size)
        views[home] = views[home]._replace(requests=busy, cached_tokens=prompt * 9 // 10, **able)
    if draw.random() < 0.5:
        views = [with_queue(draw, view) for view in views]
    request = ask(prompt, max_tokens=draw.randint(1, 8_000), session_id="s", has_priority=draw.random() < 0.8)
    return request._replace(may_offload=draw.random() < 0.95), FleetSnapshot(
        tuple(views),
        sequence=draw.randint(0, 99),
        pinned=draw.choice((None, draw.choice(names))),
        offloads_in_flight=draw.choice((0, 0, 0, 1, 4)),
        costs=draw.choice((None, drawn_costs(draw, names))),
        broken_pairs=frozenset((draw.choice(names), draw.choice(names)) for _ in range(draw.choice((0, 0, 4)))),
    )


def exhaustive(policy: Migrate, request: RequestView, fleet: FleetSnapshot) -> tuple[str, str | None, str]:
    """D, P (or None) and the result of looking at every instance, by the docstring."""
    views, costs = fleet.instances, fleet.costs or Costs()
    warm = Warm(
        policy.others_weight,
        hold_s=policy.hold_s,
        learned=policy.learned,
        slowdown=policy.slowdown,
        overtakes=policy.overtakes,
    ).choose(request, fleet)
    stays = warm.instance, None
    if not request.may_offload:
        return *stays, "cannot"
    terms = [score.inputs for score in warm.scores]
    loads = [
        term["queue_s"] + term["room_s"] + policy.stream_s * view.requests
        for term, view in zip(terms, views, strict=True)
    ]
    most = max(view.cached_tokens for view in views)
    holders = [place for place, view in enumerate(views) if view.cached_tokens == most]
    own = [place for place in holders if views[place].instance == fleet.pinned]
    home = own[0] if own else _first_by_tie_break(fleet, holders)
    if most < max(policy.min_cached_tokens, policy.affinity_gate * request.prompt_tokens):
        return *stays, "no home"
    if loads[home] <= policy.overload_s or len(views) == 1:
        return *stays, "light"
    if loads[home] * (len(views) - 1) <= policy.overload_factor * (sum(loads) - loads[home]):
        return *stays, "even"
    if fleet.offloads_in_flight >= policy.max_in_flight:
        return *stays, "cap"
    moves = []
    for place, target in enumerate(views):
        pair = views[home].instance, target.instance
        light = loads[place] <= policy.target_share * loads[home]
        sends = may_send(views[home], target) and pair not in fleet.broken_pairs
        if light and may_receive(target) and policy._has_room(request, target) and sends:
            moves.append((_moved_s(policy, request, fleet, costs, terms, home, place), place))
    place = [view.instance for view in views].index(warm.instance)
    stay_s = warm.scores[place].score + policy.stream_s * views[place].requests
    if not moves:
        return *stays, "no target"
    moved_s, target_place = min(moves)
    if policy.priced and moved_s + policy.min_gain_s > stay_s:
        return *stays, "does not pay"
    return views[target_place].instance, views[home].instance, "moves"


def _first_by_tie_break(fleet: FleetSnapshot, places: list[int]) -> int:
    def rank(place: int) -> tuple[int, float, int]:
        view = fleet.instances[place]
        return view.requests, view.recent_tokens, (place - fleet.sequence) % len(fleet.instances)

    return min(places, key=rank)


def _moved_s(
    policy: Migrate,
    request: RequestView,
    fleet: FleetSnapshot,
    costs: Costs,
    terms: Sequence[Mapping[str, float]],
    home: int,
    place: int,
) -> float:
    sender, target, term = fleet.instances[home], fleet.instances[place], terms[home]
    job = transfer_job(request, sender, target, fleet.offloads_in_flight, costs.bytes_per_token)
    transfer_s = costs.transfer.predict(job, costs.now_s).seconds
    first_s = max(term["queue_s"] + term["own_s"] + transfer_s, terms[place]["queue_s"])
    slowness = costs.slowness if policy.learned else {}
    slow = slowness.get(target.instance, 1.0)
    alone_s = 0.0 if sender.prefilling else policy.step_s * slowness.get(sender.instance, 1.0)
    stalled_s = policy.others_weight * sender.requests * (term["own_s"] + alone_s)
    decode_s = (policy.step_s * slow + policy.stream_s) * target.requests + (
        policy.answer_s * slow if slowness else 0.0
    )
    risk_s = costs.transfer.failure_rate((sender.instance, target.instance)) * first_s
    return first_s + term["crowd_s"] + policy._room_s(request, sender) + stalled_s + decode_s + risk_s


def test_few_are_priced_and_the_choice_is_that_of_all() -> None:
    draw, results = random.Random(21), Counter[str]()
    for _ in range(4_000):
        request, fleet = drawn(draw)
        policy = Migrate(**draw.choice(PARAMS))
        choice = policy.choose(request, fleet)
        pick = policy.quick(request, fleet, FleetColumns.of(fleet.instances))
        assert (fleet.instances[pick.place].instance, pick.reason) == (choice.instance, choice.reason)
        decode_on, prefill_on, result = exhaustive(policy, request, fleet)
        chosen_p = choice.plan.prefill_on if choice.plan is not None else None
        assert (choice.instance, chosen_p) == (decode_on, prefill_on)
        assert (choice.reason is Reason.SESSION_MIGRATED) is (result == "moves")
        assert result != "does not pay" or (choice.plan and choice.plan.reason is OffloadReason.DOES_NOT_PAY)
        results[result] += 1
    assert min(results.values()) > 40
    assert len(results) == 8
