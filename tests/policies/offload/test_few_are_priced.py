"""Planners that look at a few candidates choose what they would choose after looking at all."""

from __future__ import annotations

import random
from dataclasses import replace

from policies.costs.book import transfer_job
from policies.costs.formulas import Costs, PrefillModel, TransferJob, TransferModel
from policies.offload.base import best_prefill, has_room, may_send
from policies.offload.cost_model import CostModel
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import (
    Connector,
    InstanceView,
    OffloadPlan,
    OffloadReason,
    RequestClass,
    RequestView,
    Role,
    Transport,
)
from tests.policies.builders import ask

PRICED = frozenset({OffloadReason.CHOSEN, OffloadReason.UNSURE, OffloadReason.DOES_NOT_PAY})
PLANNERS = (
    CostModel(),
    CostModel(min_gain=0.0, max_own_loss=5.0),
    CostModel(max_own_loss=0.5, sigmas=0.0),
    CostModel(stall_share=0.0, sigmas=3.0),
    CostModel(min_gain=2.0),
)


def drawn(draw: random.Random) -> tuple[RequestView, FleetSnapshot, InstanceView]:
    """A request, a fleet of 1 to 64, half of the time full of ties, and the D that was chosen."""
    prompt, size, ties = draw.choice((6_000, 20_000, 60_000, 150_000)), draw.choice((1, 2, 3, 8, 8, 64)), draw.random()
    names = [f"inst-{number}" for number in range(size)]
    draw.shuffle(names)
    views = tuple(drawn_view(draw, name, prompt, ties=ties < 0.5) for name in names)
    return (
        ask(prompt, max_tokens=draw.randint(1, 8_000)),
        FleetSnapshot(
            views,
            offloads_in_flight=draw.randint(0, 3),
            costs=draw.choice((None, drawn_costs(draw, names))),
            broken_pairs=frozenset((draw.choice(names), draw.choice(names)) for _ in range(draw.choice((0, 0, 4)))),
            prefill_instances=draw.choice(((), (), tuple(draw.sample(views, max(1, size // 2))))),
        ),
        _decoding(draw, draw.choice(views)),
    )


def _decoding(draw: random.Random, view: InstanceView) -> InstanceView:
    """D as a planner that prices finds it: it may receive, and has room."""
    streams = draw.choice((0, 3, 30))
    return view._replace(
        role=Role.KV_BOTH,
        cached_tokens=0,
        kv_capacity_tokens=738_432,
        kv_used_tokens=0,
        requests=view.prefilling + streams,
    )


def drawn_view(draw: random.Random, name: str, prompt: int, *, ties: bool) -> InstanceView:
    requests = draw.choice((0, 1, 8)) if ties else draw.randint(0, 40)
    return InstanceView(
        name,
        cached_tokens=draw.choice((0, 0, prompt // 2, prompt - 1, 64 if ties else draw.randint(0, prompt - 1))),
        requests=requests,
        prefilling=min(requests, draw.choice((0, 1, 5))),
        pending_prefill_tokens=draw.choice((0, 8_000)) if ties else draw.randint(0, 200_000),
        recent_tokens=0.0 if ties else draw.random() * 1_000,
        kv_capacity_tokens=draw.choice((0, 100_000, 738_432, 738_432, 738_432)),
        kv_used_tokens=draw.choice((0, 300_000, 700_000)),
        role=draw.choice((*[Role.KV_BOTH] * 5, *Role)),
        host=draw.choice(("h1", "h2")),
        transport=draw.choice((None, *Transport)),
        connector=draw.choice((*[Connector.MOONCAKE] * 5, Connector.NIXL)),
    )


def drawn_costs(draw: random.Random, names: list[str]) -> Costs:
    prefill, transfer = PrefillModel(), TransferModel()
    for _ in range(draw.randint(0, 4)):
        prefill = prefill.observe(draw.randint(1_024, 150_000), draw.choice((0, 1_000)), 0.0, draw.uniform(0.01, 20))
    for _ in range(draw.randint(0, 8)):
        pair = draw.choice(names), draw.choice(names)
        job = TransferJob(pair, draw.choice(list(Transport)), draw.uniform(1e6, 2e10), draw.randint(0, 9), 1)
        transfer = transfer.observe(job, draw.uniform(0.01, 5.0), draw.uniform(0, 100)).settled(
            pair, draw.random() < 0.7
        )
    slowness = {}
    if draw.random() < 0.3:
        slowness = {name: draw.choice((0.3, 1.0, 1.0, 2.5)) for name in names if draw.random() < 0.8}
    return Costs(prefill, transfer, 120.0, slowness=slowness)


def exhaustive(
    planner: CostModel, request: RequestView, decode: InstanceView, fleet: FleetSnapshot
) -> tuple[str | None, OffloadReason, dict[str, float]] | None:
    """P, reason and prices after every candidate was priced by the formulas of the docstring; None: no candidate."""
    costs = fleet.costs or Costs()
    slow = costs.slowness.get(decode.instance, 1.0)
    alone_s = slow * costs.prefill.predict(request.prompt_tokens - decode.cached_tokens, decode.cached_tokens).seconds
    queue_s = slow * costs.prefill.queue_s(decode.pending_prefill_tokens, decode.prefilling)
    waiting = sum(view.prefilling for view in fleet.instances) / len(fleet.instances)
    found = []
    for view in fleet.senders:
        pair = view.instance, decode.instance
        if not may_send(view, decode) or pair in fleet.broken_pairs or not has_room(view, request):
            continue
        job = transfer_job(request, view, decode, fleet.offloads_in_flight, costs.bytes_per_token)
        estimate = costs.transfer.predict(job, costs.now_s)
        slow = costs.slowness.get(view.instance, 1.0)
        there_s = slow * costs.prefill.predict(request.prompt_tokens - view.cached_tokens, view.cached_tokens).seconds
        queued_s = slow * costs.prefill.queues_s([view.pending_prefill_tokens], [view.prefilling])[0]
        offloaded_s = max(queued_s + there_s + estimate.seconds, queue_s)
        own_s = queue_s + alone_s - offloaded_s
        streams_s = planner.stall_share * (decode.decode_streams * alone_s - view.decode_streams * there_s)
        others_s = waiting * max(0.0, there_s - alone_s)
        risk_s = costs.transfer.failure_rate(pair) * offloaded_s
        net_s = own_s + streams_s - others_s - risk_s
        doubt_s = estimate.upper(planner.sigmas) - estimate.seconds
        least_s = planner.min_gain * alone_s
        reason = OffloadReason.CHOSEN
        if net_s <= least_s or own_s < -planner.max_own_loss * alone_s:
            reason = OffloadReason.DOES_NOT_PAY
        elif net_s - doubt_s <= least_s:
            reason = OffloadReason.UNSURE
        prices = {
            "colocated_s": queue_s + alone_s,
            "prefill_s": there_s,
            "transfer_s": estimate.seconds,
            "own_gain_s": own_s,
            "streams_gain_s": streams_s,
            "others_cost_s": others_s,
            "risk_s": risk_s,
            "doubt_s": doubt_s,
        }
        rank = reason is OffloadReason.CHOSEN, net_s - doubt_s, -view.requests, view.instance
        found.append((rank, reason, prices))
    if not found:
        return None
    rank, reason, prices = max(found, key=lambda each: each[0])
    return rank[-1] if rank[0] else None, reason, prices


def test_the_cost_model_plans_as_if_it_had_priced_every_candidate() -> None:
    draw, reasons = random.Random(18), dict.fromkeys(OffloadReason, 0)
    for _ in range(4_000):
        request, fleet, decode = drawn(draw)
        planner, columns = draw.choice(PLANNERS), draw.choice((None, FleetColumns.of(fleet.senders)))
        plan = planner.plan(request, decode, RequestClass.HEAVY, fleet, columns)
        reasons[plan.reason] += 1
        expected = exhaustive(planner, request, decode, fleet)
        if expected is None:
            assert plan.reason in {OffloadReason.NO_PREFILL_CANDIDATE, OffloadReason.PAIR_BROKEN}
            continue
        prefill_on, reason, prices = expected
        inputs = {
            "new_tokens": float(request.prompt_tokens - decode.cached_tokens),
            "decode_streams": float(decode.decode_streams),
        }
        assert plan == OffloadPlan(prefill_on, reason, inputs | prices)
    assert min(reasons[reason] for reason in PRICED) > 50


def test_the_quick_form_of_the_cost_model_has_the_same_p_and_reason() -> None:
    draw, reasons, unpriced = random.Random(19), dict.fromkeys(OffloadReason, 0), 0
    for _ in range(4_000):
        request, fleet, decode = drawn(draw)
        if draw.random() < 0.1:
            decode = decode._replace(role=draw.choice(list(Role)), cached_tokens=request.prompt_tokens - 100)
        planner, columns = draw.choice(PLANNERS), FleetColumns.of(fleet.senders)
        plan = planner.plan(request, decode, RequestClass.HEAVY, fleet, columns)
        quick = planner.quick(request, decode, RequestClass.HEAVY, fleet, columns)
        assert (quick.prefill_on, quick.reason) == (plan.prefill_on, plan.reason)
        if plan.prefill_on is not None:
            assert quick.inputs == plan.inputs
        reasons[plan.reason] += 1
        unpriced += plan.reason is OffloadReason.DOES_NOT_PAY and not quick.inputs
    assert min(reasons[reason] for reason in (*PRICED, OffloadReason.NO_PREFILL_CANDIDATE)) > 50
    assert unpriced > 500


def test_the_price_of_a_plan_is_the_saving_of_its_pair() -> None:
    draw, compared = random.Random(7), 0
    while compared < 100:
        request, fleet, decode = drawn(draw)
        planner = replace(PLANNERS[1], sigmas=draw.choice((0.0, 1.0)))
        plan = planner.plan(request, decode, RequestClass.HEAVY, fleet)
        prefill = fleet.prefill_view(plan.prefill_on) if plan.prefill_on is not None else None
        if prefill is not None:
            compared += 1
            saving_s = CostModel().saving_s(request, decode, prefill, fleet)
            assert CostModel().saving_in(planner, plan, request, decode, prefill, fleet) == saving_s


def test_the_least_time_of_a_transfer_is_below_every_estimate() -> None:
    draw = random.Random(3)
    for _ in range(1_000):
        names = [f"inst-{number}" for number in range(4)]
        costs, z = drawn_costs(draw, names), draw.choice((0.0, 1.0, 2.0))
        streams, transport = draw.randint(0, 30), draw.choice(list(Transport))
        pair = draw.choice(names), draw.choice(names)
        job = TransferJob(pair, transport, draw.uniform(1e5, 3e10), streams, draw.randint(0, 4))
        alone_s, stream_s, spread = costs.transfer.least(job.size_bytes, job.others, {transport, Transport.TCP}, z)
        estimate = costs.transfer.predict(job, costs.now_s)
        assert alone_s + stream_s * streams <= estimate.seconds * (1 + 1e-9)
        doubt_s = estimate.upper(z) - estimate.seconds
        assert spread * (alone_s + stream_s * streams) <= doubt_s * (1 + 1e-9)


def test_the_best_prefill_is_that_of_a_search_over_all() -> None:
    draw = random.Random(11)
    for _ in range(1_500):
        request, fleet, decode = drawn(draw)
        usable = [
            view
            for view in fleet.senders
            if may_send(view, decode) and (view.instance, decode.instance) not in fleet.broken_pairs
        ]
        expected = min(
            usable,
            key=lambda view: (
                view.pending_prefill_tokens + request.prompt_tokens - view.cached_tokens,
                view.requests,
                view.recent_tokens,
                view.instance,
            ),
            default=None,
        )
        assert best_prefill(request, decode, fleet) == expected
