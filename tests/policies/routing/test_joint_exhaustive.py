"""``joint`` prices few placements and chooses what it would choose after pricing all of them by its docstring."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from policies.costs.book import transfer_job
from policies.costs.formulas import Costs
from policies.costs.order import overtaken_share
from policies.offload.base import may_receive, may_send
from policies.routing.base import tie_break
from policies.routing.joint import Joint
from policies.routing.warm import Warm
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import (
    CandidateScore,
    Connector,
    ContextsView,
    InstanceView,
    OffloadReason,
    QueuedPrefill,
    RequestView,
    Role,
    Transport,
)
from tests.policies.builders import ask
from tests.policies.offload.test_few_are_priced import drawn_costs, drawn_view

PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"heavy_tokens": 1, "max_own_loss": 10.0},
    {"heavy_tokens": 500, "stream_s": 0.0},
    {"heavy_tokens": 1, "specialist_s": 0.0, "max_own_loss": 3.0, "others_weight": 0.5},
    {"heavy_tokens": 1, "learned": False, "hold_s": 0.0, "stream_s": 0.5},
    {"heavy_tokens": 1, "max_own_loss": 10.0, "queue_cost": 0.0},
    {"heavy_tokens": 1, "max_own_loss": 10.0, "slowdown": 0.5, "overtakes": 1.0},
    {"heavy_tokens": 1, "max_own_loss": 10.0, "slowdown": 0.0},
    {"heavy_tokens": 1, "max_own_loss": 10.0, "eviction_weight": 5.0},
    {"heavy_tokens": 1, "max_own_loss": 10.0, "eviction_weight": 0.0},
    {"heavy_tokens": 1, "max_own_loss": 10.0, "answer_s": 0.0},
    {"heavy_tokens": 1, "max_own_loss": 10.0, "learned_slowness": False},
)


def drawn(draw: random.Random) -> tuple[RequestView, FleetSnapshot]:
    """A request and a fleet of 1 to 64, half of the time full of ties, half of the time able to hand over."""
    prompt, size, ties = draw.choice((900, 20_000, 60_000, 150_000)), draw.choice((1, 2, 3, 8, 8, 64)), draw.random()
    names = [f"inst-{number}" for number in range(size)]
    draw.shuffle(names)
    views = [drawn_view(draw, name, prompt, ties=ties < 0.5) for name in names]
    specialists = draw.sample(names, draw.randint(0, max(1, size // 2)))
    if draw.random() < 0.7:  # all may hand over, and streams decode on all but the specialists
        able: dict[str, Any] = {"role": Role.KV_BOTH, "connector": Connector.MOONCAKE, "kv_capacity_tokens": 738_432}
        cold, transport = draw.random() < 0.5, draw.choice((None, Transport.RDMA, Transport.NVLINK))
        for place, view in enumerate(views):
            idle = view.instance in specialists and draw.random() < 0.7
            more = 0 if idle else draw.randint(8, 20)
            views[place] = view._replace(
                requests=0 if idle else view.requests + more,
                prefilling=0 if idle else view.prefilling,
                pending_prefill_tokens=0 if idle else view.pending_prefill_tokens,
                cached_tokens=0 if cold else view.cached_tokens,
                kv_used_tokens=draw.choice((0, 300_000)),
                transport=transport,
                host="h1",
                **able,
            )
    only = [drawn_view(draw, f"p-{number}", prompt, ties=ties < 0.5) for number in range(draw.choice((0, 0, 1, 4)))]
    ordered = draw.random() < 0.5
    if ordered:
        views, only = [with_queue(draw, view) for view in views], [with_queue(draw, view) for view in only]
    request = ask(prompt, max_tokens=draw.randint(1, 8_000))._replace(may_offload=draw.random() < 0.9)
    return request, FleetSnapshot(
        tuple(views),
        sequence=draw.randint(0, 99),
        offloads_in_flight=draw.randint(0, 3),
        costs=draw.choice((None, None, drawn_costs(draw, names))) if not ordered else drawn_costs(draw, names),
        broken_pairs=frozenset((draw.choice(names), draw.choice(names)) for _ in range(draw.choice((0, 0, 4)))),
        prefill_instances=(*views, *only) if only else (),
        specialists={name: draw.choice((1.0, 1.6, 20.0)) for name in (*specialists, *draw.choice(((), ("gone",))))},
        contexts=ContextsView(
            {name: draw.choice((0, 100_000, 700_000)) for name in names if draw.random() < 0.8}, draw.choice((1.0, 0.3))
        ),
    )


def with_queue(draw: random.Random, view: InstanceView) -> InstanceView:
    """An instance whose engine orders prefills; some of those queued are due after the time of ``drawn_costs``."""
    queued = [QueuedPrefill(draw.choice((60.0, 125.0, 500.0)), draw.random() * 5) for _ in range(view.prefilling)]
    return view._replace(queue=tuple(queued))


def exhaustive(
    policy: Joint, request: RequestView, fleet: FleetSnapshot
) -> tuple[str, str | None, dict[str, float], float]:
    """D, P (or None), the hand-off's terms if it is chosen, and the score: every placement priced."""
    warm = warm_of(policy).choose(request, fleet)
    names = [view.instance for view in fleet.instances]
    evictions = evictions_of(policy, request, fleet)
    scores = [
        each.score + sum(([evictions[each.instance]] if each.instance in evictions else []) + fee(policy, fleet, each))
        for each in warm.scores
    ]
    place = min(range(len(names)), key=lambda at: (scores[at], tie_break(fleet, at)))
    if request.prompt_tokens - fleet.instances[place].cached_tokens < policy.heavy_tokens:
        return names[place], None, {}, scores[place]
    queues = {}
    """D's own prefill is none, so it is due at once: it overtakes more than the whole prompt would."""
    for view in fleet.instances:
        # The whole queue: that of an instance whose engine computes in order of arrival.
        plain = warm_of(policy).choose(request, fleet._replace(instances=(view._replace(queue=()),))).scores[0]
        share = 0.0
        if fleet.costs is not None and policy.slowdown:
            share = policy.overtakes * overtaken_share(view.queue, fleet.costs.now_s)
        queues[view.instance] = plain.inputs["queue_s"] * (1 - share)
    firsts = [score.inputs["queue_s"] + score.inputs["own_s"] for score in warm.scores]
    first_s, others = firsts[place], [at for at, name in enumerate(names) if name not in fleet.specialists]
    if names[place] in fleet.specialists and others:
        first_s = firsts[min(others, key=lambda at: (scores[at], tie_break(fleet, at)))]
        late = {at for at in range(len(names)) if at not in others and firsts[at] > (1 + policy.max_own_loss) * first_s}
        place = min(set(range(len(names))) - late, key=lambda at: (scores[at], tie_break(fleet, at)))
    alone = names[place], None, dict[str, float](), scores[place]
    if not request.may_offload:
        return alone
    bound_s = (1 + policy.max_own_loss) * first_s
    receivers = [
        (
            queues[view.instance] + decode_of(policy, fleet, view) + evictions.get(view.instance, 0.0),
            tie_break(fleet, at),
            view,
        )
        for at, view in enumerate(fleet.instances)
        if may_receive(view) and view.instance not in fleet.specialists and roomy(view, request, request.max_tokens)
    ]
    found = []
    for at, prefill in enumerate(fleet.senders):
        if prefill.instance in names and prefill.instance not in fleet.specialists:
            continue
        if not roomy(prefill, request, 0):
            continue
        usable = [
            rank
            for rank in receivers
            if may_send(prefill, rank[2]) and (prefill.instance, rank[2].instance) not in fleet.broken_pairs
        ]
        if usable:
            eviction_s = evictions.get(min(usable)[2].instance, 0.0)
            terms = priced(policy, request, fleet, prefill, min(usable)[2], queues, eviction_s)
            slow = slowness_of(policy, fleet).get(names[place], 1.0)
            terms["saved_s"] = slow * policy.answer_s * (fleet.specialists.get(names[place], 1.0) - 1)
            terms["handed_off_s"] -= terms["saved_s"]
            if terms["first_s"] <= bound_s:
                found.append((terms["handed_off_s"], at, prefill.instance, min(usable)[2].instance, terms))
    if not found or min(found)[0] >= scores[place]:
        return alone
    score_s, _, prefill_on, decode_on, terms = min(found)
    return decode_on, prefill_on, terms, score_s


def warm_of(policy: Joint) -> Warm:
    """``warm`` with the same parameters."""
    return Warm(
        policy.others_weight,
        hold_s=policy.hold_s,
        learned=policy.learned,
        slowdown=policy.slowdown,
        overtakes=policy.overtakes,
        answer_s=policy.answer_s,
        learned_slowness=policy.learned_slowness,
    )


def slowness_of(policy: Joint, fleet: FleetSnapshot) -> Mapping[str, float]:
    used = policy.learned and policy.learned_slowness and fleet.costs is not None
    return fleet.costs.slowness if used and fleet.costs is not None else {}


def decode_of(policy: Joint, fleet: FleetSnapshot, view: InstanceView) -> float:
    """Price of decoding there: one more stream, and the answer itself where instances differ in speed."""
    slowness = slowness_of(policy, fleet)
    return policy.stream_s * view.requests + (slowness.get(view.instance, 1.0) * policy.answer_s if slowness else 0.0)


def evictions_of(policy: Joint, request: RequestView, fleet: FleetSnapshot) -> dict[str, float]:
    """Price of the contexts sent to each instance, if a specialist is among the candidates."""
    if not set(fleet.specialists) & {view.instance for view in fleet.instances}:
        return {}
    model = fleet.costs.prefill if fleet.costs is not None and policy.learned else Costs().prefill
    again_s = max(0.0, model.seconds(request.prompt_tokens, 0) - model.seconds(0, 0))
    return {
        view.instance: policy.eviction_weight
        * fleet.contexts.return_share
        * again_s
        * slowness_of(policy, fleet).get(view.instance, 1.0)
        * (fleet.contexts.tokens.get(view.instance, 0) + request.prompt_tokens)
        / view.kv_capacity_tokens
        for view in fleet.instances
        if view.kv_capacity_tokens
    }


def fee(policy: Joint, fleet: FleetSnapshot, score: CandidateScore) -> list[float]:
    return [policy.specialist_s] if score.instance in fleet.specialists else []


def roomy(view: InstanceView, request: RequestView, answer_tokens: int) -> bool:
    pool, taken = view.kv_capacity_tokens, view.kv_used_tokens + view.kv_promised_tokens + request.prompt_tokens
    return pool > 0 and taken <= 0.9 * pool and taken + answer_tokens <= pool


def priced(
    policy: Joint,
    request: RequestView,
    fleet: FleetSnapshot,
    prefill: InstanceView,
    decode: InstanceView,
    queues: dict[str, float],
    eviction_s: float,
) -> dict[str, float]:
    costs, pair = fleet.costs or Costs(), (prefill.instance, decode.instance)
    model = costs.prefill if policy.learned else Costs().prefill
    job = transfer_job(request, prefill, decode, fleet.offloads_in_flight, costs.bytes_per_token)
    # Warm's own queue of a candidate like P: the same formula for instances that only prefill.
    like_p = warm_of(policy).choose(request, fleet._replace(instances=(prefill,)))
    queue_s, prefill_s = (
        like_p.scores[0].inputs["queue_s"],
        slowness_of(policy, fleet).get(prefill.instance, 1.0)
        * model.seconds(request.prompt_tokens - prefill.cached_tokens, prefill.cached_tokens),
    )
    transfer_s = costs.transfer.predict(job, costs.now_s).seconds
    first_s = max(queue_s + prefill_s + transfer_s, queues[decode.instance])
    streams_s, decode_s = prefill.decode_streams * prefill_s, decode_of(policy, fleet, decode)
    risk_s, behind_s = costs.transfer.failure_rate(pair) * first_s, policy.queue_cost * queue_s
    return {
        "prefill_queue_s": queue_s,
        "prefill_s": prefill_s,
        "transfer_s": transfer_s,
        "decode_queue_s": queues[decode.instance],
        "first_s": first_s,
        "streams_s": streams_s,
        "behind_s": behind_s,
        "decode_s": decode_s,
        "eviction_s": eviction_s,
        "risk_s": risk_s,
        "handed_off_s": first_s + streams_s + behind_s + decode_s + eviction_s + risk_s,
    }


def test_joint_places_as_if_it_had_priced_every_placement() -> None:
    draw, handed_off, late, overtakes = random.Random(20), 0, 0, 0
    for _ in range(3_000):
        request, fleet = drawn(draw)
        policy = Joint(**draw.choice(PARAMS))
        decode_on, prefill_on, terms, score_s = exhaustive(policy, request, fleet)
        choice = policy.choose(request, fleet)
        plan, scores = choice.plan, {each.instance: each.score for each in choice.scores}
        assert plan is not None
        assert (choice.instance, plan.prefill_on, scores[choice.instance]) == (decode_on, prefill_on, score_s)
        assert (plan.reason is OffloadReason.CHOSEN) == (prefill_on is not None)
        assert terms.items() <= plan.inputs.items()
        assert min(each.score for each in choice.scores if not each.skipped) == score_s
        late += any(each.skipped for each in choice.scores)
        columns = FleetColumns.of(fleet.instances)
        assert columns.instance[policy.quick(request, fleet, columns).place] == decode_on
        handed_off += prefill_on is not None
        whole = policy.choose(request, fleet._replace(instances=tuple(v._replace(queue=()) for v in fleet.instances)))
        overtakes += scores != {each.instance: each.score for each in whole.scores}
    assert handed_off > 50
    assert overtakes > 50
    assert late > 50


def test_warm_prices_a_candidate_alone_as_among_all() -> None:
    draw = random.Random(21)
    for _ in range(1_000):
        request, fleet = drawn(draw)
        policies = (
            Warm(),
            Warm(others_weight=0.5, hold_s=3.0),
            Warm(learned=False, pool_share=0.2),
            Warm(slowdown=0.5, overtakes=1.0),
            Warm(slowdown=0.0),
        )
        policy = draw.choice(policies)
        columns = FleetColumns.of(fleet.instances)
        prices, choice = policy.prices(request, fleet, columns), policy.choose(request, fleet)
        assert [prices.of(place) for place in range(len(fleet.instances))] == [each.score for each in choice.scores]
        assert columns.instance[policy.quick(request, fleet, columns).place] == choice.instance
