"""The cost model: effect of each input, every refusal, and the bound on the request's own loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from policies.costs.book import transfer_job
from policies.costs.formulas import Costs, TransferModel, transfer_formula
from policies.costs.transfer_constants import KV_BYTES_PER_TOKEN
from policies.offload.cost_model import CostModel
from policies.snapshot import FleetSnapshot
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
from tests.policies.builders import ask, cases, fleet_of

REQUEST = ask(60_000, max_tokens=1_000)
D = InstanceView(
    "d",
    role=Role.KV_BOTH,
    requests=8,
    decoding_tokens=160_000,
    kv_capacity_tokens=738_432,
    host="h1",
    transport=Transport.NVLINK,
)
P = InstanceView("p", role=Role.KV_BOTH, kv_capacity_tokens=738_432, host="h1", transport=Transport.NVLINK)
PLANNER = CostModel(max_own_loss=0.5)


def plan(
    decode: InstanceView = D,
    *others: InstanceView,
    request: RequestView = REQUEST,
    planner: CostModel | None = None,
    **fields: Any,
) -> OffloadPlan:
    fleet = fleet_of(decode, *(others or (P,)), **fields)
    return (planner or PLANNER).plan(request, decode, RequestClass.HEAVY, fleet)


def net_s(answer: OffloadPlan) -> float:
    """The sum over all waiting times, from the plan's inputs."""
    inputs = answer.inputs
    return inputs["own_gain_s"] + inputs["streams_gain_s"] - inputs["others_cost_s"] - inputs["risk_s"]


def knowing(seconds: float, times: int = 60, failures: int = 0, now_s: float = 0.0) -> Costs:
    """Costs after transfers from P to D that took ``seconds`` each, and hand-offs that failed."""
    job = transfer_job(REQUEST, P, D, 0, KV_BYTES_PER_TOKEN)
    model = TransferModel()
    for _ in range(times):
        model = model.observe(job, seconds, 0.0)
    for _ in range(failures):
        model = model.settled(job.pair, ok=False)
    return Costs(transfer=model, now_s=now_s)


def test_a_long_prefill_leaves_a_busy_d_for_an_idle_p_over_nvlink() -> None:
    answer = plan()
    assert (answer.prefill_on, answer.reason) == ("p", OffloadReason.CHOSEN)
    inputs = answer.inputs
    alone_s = Costs().prefill.predict(60_000).seconds
    moved_s = transfer_formula(transfer_job(REQUEST, P, D, 0, KV_BYTES_PER_TOKEN))
    assert inputs["colocated_s"] == inputs["prefill_s"] == pytest.approx(alone_s)
    assert inputs["transfer_s"] == pytest.approx(moved_s)
    assert inputs["own_gain_s"] == pytest.approx(-moved_s)
    assert inputs["streams_gain_s"] == pytest.approx(0.9 * 8 * alone_s)
    assert inputs["others_cost_s"] == 0.0
    assert inputs["risk_s"] == pytest.approx(0.02 * (alone_s + moved_s))
    assert (inputs["new_tokens"], inputs["decode_streams"]) == (60_000.0, 8.0)


@pytest.mark.parametrize(
    ("reason", "answer"),
    [
        (OffloadReason.BELOW_THRESHOLD, plan(request=ask(4_095))),
        (OffloadReason.BELOW_THRESHOLD, plan(D._replace(cached_tokens=56_000))),
        (OffloadReason.ROLE_FORBIDS, plan(D._replace(role=Role.KV_PRODUCER))),
        (OffloadReason.ROLE_FORBIDS, plan(D._replace(role=Role.NONE))),
        (OffloadReason.CAP_REACHED, plan(offloads_in_flight=4)),
        (OffloadReason.NO_ROOM_ON_D, plan(D._replace(kv_used_tokens=677_433))),
        (OffloadReason.NO_ROOM_ON_D, plan(D._replace(kv_promised_tokens=677_433))),
        (OffloadReason.NO_ROOM_ON_D, plan(D._replace(kv_capacity_tokens=0))),
        (OffloadReason.NO_PREFILL_CANDIDATE, plan(D, P._replace(role=Role.KV_CONSUMER))),
        (OffloadReason.NO_PREFILL_CANDIDATE, plan(D, P._replace(connector=Connector.NIXL))),
        (OffloadReason.NO_PREFILL_CANDIDATE, plan(D, P._replace(kv_used_tokens=700_000))),
        (OffloadReason.NO_PREFILL_CANDIDATE, plan(D, D)),
        (OffloadReason.PAIR_BROKEN, plan(broken_pairs=frozenset({("p", "d")}))),
        (OffloadReason.DOES_NOT_PAY, plan(D._replace(requests=0))),
        (OffloadReason.DOES_NOT_PAY, plan(D._replace(prefilling=8))),
        (OffloadReason.DOES_NOT_PAY, plan(costs=knowing(30.0))),
        (OffloadReason.DOES_NOT_PAY, plan(planner=CostModel(max_own_loss=0.0))),
        (OffloadReason.UNSURE, plan(planner=replace(PLANNER, sigmas=6.0))),
        (OffloadReason.CHOSEN, plan(D._replace(kv_used_tokens=677_432))),
        (OffloadReason.CHOSEN, plan(D._replace(requests=1), offloads_in_flight=3)),
        (OffloadReason.CHOSEN, plan(D._replace(requests=1), request=ask(4_096), planner=replace(PLANNER, sigmas=0.0))),
        (OffloadReason.CHOSEN, plan(D._replace(role=Role.KV_CONSUMER), P._replace(role=Role.KV_PRODUCER))),
    ],
)
def test_every_reason_is_reached(reason: OffloadReason, answer: OffloadPlan) -> None:
    assert answer.reason is reason
    assert (answer.prefill_on is not None) == (reason is OffloadReason.CHOSEN)


def test_an_idle_fleet_gains_nothing_by_offloading() -> None:
    answer = plan(D._replace(requests=0, decoding_tokens=0))
    assert answer.reason is OffloadReason.DOES_NOT_PAY
    assert net_s(answer) < 0


def test_a_transfer_that_may_take_three_times_its_median_needs_more_to_pay_for_it() -> None:
    """131k tokens over RDMA for one stream: the median pays, the slowest of the published repeats does not."""
    over_rdma = (D._replace(requests=1, transport=Transport.RDMA), P._replace(transport=Transport.RDMA))
    request = ask(131_072, max_tokens=1_000)
    answer = plan(*over_rdma, request=request)
    assert answer.reason is OffloadReason.UNSURE
    assert answer.inputs["doubt_s"] > 2 * answer.inputs["transfer_s"]
    even = Costs(transfer=TransferModel())
    for _ in range(40):
        job = transfer_job(request, over_rdma[1], over_rdma[0], 0, KV_BYTES_PER_TOKEN)
        even = even._replace(transfer=even.transfer.observe(job, transfer_formula(job), 0.0))
    assert plan(*over_rdma, request=request, costs=even).reason is OffloadReason.CHOSEN


@given(
    on_d=st.integers(0, 30),
    on_p=st.integers(0, 30),
    pending=st.integers(0, 60_000),
    cached_on_p=st.integers(0, 59_000),
    transport=st.sampled_from(Transport),
)
def test_each_thing_pulls_the_sum_in_its_own_direction(
    on_d: int, on_p: int, pending: int, cached_on_p: int, transport: Transport
) -> None:
    decode = D._replace(requests=on_d, transport=transport)
    prefill = P._replace(
        requests=on_p + 1,
        prefilling=1,
        pending_prefill_tokens=pending,
        cached_tokens=cached_on_p,
        transport=transport,
    )
    before = net_s(plan(decode, prefill))
    busier_d = plan(decode._replace(requests=on_d + 1), prefill)
    assert busier_d.inputs["streams_gain_s"] > plan(decode, prefill).inputs["streams_gain_s"]
    assert net_s(plan(decode, prefill._replace(requests=on_p + 2))) < before
    assert net_s(plan(decode, prefill._replace(pending_prefill_tokens=pending + 20_000))) < before
    assert net_s(plan(decode, prefill._replace(cached_tokens=cached_on_p + 1_000))) > before
    queued_d = decode._replace(requests=on_d + 1, prefilling=1, pending_prefill_tokens=30_000)
    # A queue on D is avoided, but the mean queue that P's extra work would delay grows with it.
    assert plan(queued_d, prefill).inputs["own_gain_s"] > plan(decode, prefill).inputs["own_gain_s"]


def test_more_streams_on_d_turn_a_refusal_over_nvlink_into_an_offload() -> None:
    reasons = [plan(D._replace(requests=streams)).reason for streams in range(6)]
    assert reasons[0] is OffloadReason.DOES_NOT_PAY
    assert reasons[-1] is OffloadReason.CHOSEN
    assert reasons == sorted(reasons, key=lambda reason: reason is OffloadReason.CHOSEN)


def test_the_streams_of_p_count_as_those_of_d_do() -> None:
    assert plan(D, P._replace(requests=8)).reason is OffloadReason.DOES_NOT_PAY
    assert plan(D, P._replace(requests=8), P._replace(instance="q")).prefill_on == "q"


def test_tcp_under_load_refuses_what_nvlink_accepts() -> None:
    loaded = D._replace(requests=4)
    assert plan(loaded).reason is OffloadReason.CHOSEN
    for transport in (Transport.TCP, None):
        over = plan(loaded._replace(transport=transport), P._replace(transport=transport))
        assert over.reason is OffloadReason.DOES_NOT_PAY
        assert over.inputs["transfer_s"] > 10.0
    assert plan(loaded, P._replace(host="h2")).reason is OffloadReason.DOES_NOT_PAY
    rdma = plan(loaded._replace(transport=Transport.RDMA), P._replace(transport=Transport.RDMA, host="h2"))
    assert rdma.inputs["transfer_s"] < over.inputs["transfer_s"]


def test_transfers_in_progress_make_offloading_less_likely() -> None:
    transfers_s = [plan(offloads_in_flight=others).inputs["transfer_s"] for others in range(4)]
    assert transfers_s == sorted(transfers_s)
    assert transfers_s[0] < transfers_s[-1]


def test_what_d_has_queued_is_not_escaped_by_pulling() -> None:
    """A pulled request waits for D's prefills like any other: at most its own prefill is saved."""
    queued = D._replace(requests=3, prefilling=3, pending_prefill_tokens=300_000)
    answer = plan(queued, P)
    alone_s = answer.inputs["colocated_s"] - Costs().prefill.queue_s(300_000, 3)
    assert answer.inputs["colocated_s"] > 5 * alone_s
    assert answer.inputs["own_gain_s"] == pytest.approx(alone_s)


def test_a_long_queue_on_p_is_avoided_by_another_p_or_by_staying() -> None:
    queued = P._replace(requests=2, prefilling=2, pending_prefill_tokens=120_000)
    assert plan(D, queued).reason is OffloadReason.DOES_NOT_PAY
    assert plan(D, queued, P._replace(instance="q")).prefill_on == "q"


def test_the_p_that_holds_the_prefix_is_preferred_until_its_queue_outweighs_it() -> None:
    holder = P._replace(instance="holder", cached_tokens=40_000)
    assert plan(D, P, holder).prefill_on == "holder"
    assert plan(D, holder, P).prefill_on == "holder"
    buried = holder._replace(requests=3, prefilling=3, pending_prefill_tokens=150_000)
    assert plan(D, P, buried).prefill_on == "p"


def test_tokens_that_p_lacks_and_d_has_are_charged_to_waiting_requests() -> None:
    decode = D._replace(cached_tokens=30_000)
    nobody_waits = plan(decode, P)
    assert nobody_waits.inputs["others_cost_s"] == 0.0
    busy = P._replace(instance="busy", role=Role.NONE, requests=3, prefilling=3)
    waited_for = plan(decode, P, busy)
    extra_s = waited_for.inputs["prefill_s"] - Costs().prefill.predict(30_000, 30_000).seconds
    assert waited_for.inputs["others_cost_s"] == pytest.approx(3 / 3 * extra_s)
    assert net_s(waited_for) < net_s(nobody_waits)


def test_an_uncertain_transfer_is_unsure_and_a_known_one_of_the_same_time_is_chosen() -> None:
    decode, planner = D._replace(requests=1), replace(PLANNER, sigmas=3.0)
    transfer_s = 0.5
    wild, model = transfer_job(REQUEST, P, decode, 0, KV_BYTES_PER_TOKEN), TransferModel()
    for _ in range(40):
        model = model.observe(wild, transfer_s * 5, 0.0).observe(wild, transfer_s / 5, 0.0)
    unsure = plan(decode, planner=planner, costs=Costs(transfer=model))
    sure = plan(decode, planner=planner, costs=knowing(transfer_s))
    assert (unsure.reason, sure.reason) == (OffloadReason.UNSURE, OffloadReason.CHOSEN)
    assert unsure.inputs["doubt_s"] > 10 * sure.inputs["doubt_s"]
    assert (
        plan(decode, planner=replace(PLANNER, sigmas=0.0), costs=Costs(transfer=model)).reason is OffloadReason.CHOSEN
    )


def test_a_pair_learned_to_be_slow_is_left_and_tried_again_after_a_silence() -> None:
    decode = D._replace(requests=3)
    assert plan(decode, costs=knowing(30.0)).reason is OffloadReason.DOES_NOT_PAY
    p_is_slow = knowing(30.0)
    other = transfer_job(REQUEST, P._replace(instance="q"), decode, 0, KV_BYTES_PER_TOKEN)
    q_is_not = p_is_slow.transfer.observe(other, 0.1, 0.0)
    for _ in range(60):
        q_is_not = q_is_not.observe(other, 0.1, 0.0)
    assert plan(decode, P, P._replace(instance="q"), costs=Costs(transfer=q_is_not)).prefill_on == "q"
    assert plan(decode, costs=knowing(30.0, now_s=3_600.0)).reason is OffloadReason.CHOSEN


def test_a_pair_that_keeps_failing_costs_more_and_another_is_preferred() -> None:
    flaky = knowing(0.13, failures=5)
    assert plan(costs=flaky).inputs["risk_s"] > 5 * plan(costs=knowing(0.13)).inputs["risk_s"]
    assert plan(D, P, P._replace(instance="a"), costs=flaky).prefill_on == "a"


def test_another_p_is_taken_where_the_best_sum_would_cost_the_request_itself_too_much() -> None:
    """``late`` spares P's streams most but has a queue; ``prompt`` has streams of its own and no queue."""
    late = P._replace(instance="late", requests=1, prefilling=1, pending_prefill_tokens=60_000)
    prompt = P._replace(instance="prompt", requests=2)
    assert plan(D, late).reason is OffloadReason.DOES_NOT_PAY
    assert net_s(plan(D, late)) > net_s(plan(D, prompt))
    assert plan(D, late, prompt).prefill_on == "prompt"


def test_a_pool_of_unknown_size_on_p_is_no_obstacle_and_a_full_one_is() -> None:
    assert plan(D, P._replace(kv_capacity_tokens=0)).prefill_on == "p"
    assert plan(D, P._replace(kv_promised_tokens=700_000), P._replace(instance="q")).prefill_on == "q"


def test_instances_kept_for_prefill_are_the_candidates_where_there_are_any() -> None:
    spare = P._replace(instance="spare", role=Role.KV_PRODUCER)
    fleet = FleetSnapshot((D,), prefill_instances=(D, spare))
    assert PLANNER.plan(REQUEST, D, RequestClass.HEAVY, fleet).prefill_on == "spare"


@given(case=cases(), at=st.integers(0, 7), parameters=st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 3)))
def test_every_chosen_offload_pays_in_sum_and_costs_the_request_little(
    case: tuple[RequestView, FleetSnapshot], at: int, parameters: tuple[float, float, float]
) -> None:
    request, fleet = case
    decode = fleet.instances[at % len(fleet.instances)]._replace(role=Role.KV_BOTH, kv_capacity_tokens=10**6)
    fleet = fleet._replace(
        instances=tuple(decode if v.instance == decode.instance else v for v in fleet.instances),
        broken_pairs=frozenset(),
    )
    min_gain, max_own_loss, sigmas = parameters
    planner = CostModel(min_gain=min_gain, max_own_loss=max_own_loss, sigmas=sigmas, min_new_tokens=0)
    answer = planner.plan(request, decode, RequestClass.HEAVY, fleet)
    assume("own_gain_s" in answer.inputs)
    alone_s = Costs().prefill.predict(request.prompt_tokens - decode.cached_tokens, decode.cached_tokens).seconds
    if answer.prefill_on is None:
        assert answer.reason in {OffloadReason.DOES_NOT_PAY, OffloadReason.UNSURE}
        return
    assert answer.prefill_on != decode.instance
    assert net_s(answer) - answer.inputs["doubt_s"] > min_gain * alone_s
    assert answer.inputs["own_gain_s"] >= -max_own_loss * alone_s
    assert all(answer.inputs[name] >= 0 for name in ("others_cost_s", "risk_s", "doubt_s", "transfer_s", "prefill_s"))


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"max_in_flight": 0}, "max_in_flight must be at least 1"),
        ({"min_new_tokens": -1}, "min_new_tokens at least 0"),
        ({"stall_share": 1.1}, "stall_share must be within"),
        ({"stall_share": -0.1}, "stall_share must be within"),
        ({"min_gain": -0.1}, "must not be negative"),
        ({"sigmas": -1.0}, "must not be negative"),
        ({"max_own_loss": -0.1}, "must not be negative"),
        ({"kv_bytes_per_token": 0.0}, "kv_bytes_per_token positive"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CostModel(**params)


def test_kv_bytes_of_the_calibrated_hardware_unless_the_parameter_is_given() -> None:
    small = replace(PLANNER, kv_bytes_per_token=KV_BYTES_PER_TOKEN / 10)
    calibrated = Costs(bytes_per_token=KV_BYTES_PER_TOKEN / 10)
    moved = [
        plan(costs=Costs()).inputs["transfer_s"],
        plan(costs=calibrated).inputs["transfer_s"],
        plan(costs=Costs(), planner=small).inputs["transfer_s"],
    ]
    assert moved[0] > moved[1] == moved[2]
    assert plan(costs=calibrated, planner=replace(PLANNER, kv_bytes_per_token=KV_BYTES_PER_TOKEN)).inputs[
        "transfer_s"
    ] == pytest.approx(moved[0])
