"""Output of an offline run: the replayer's records, and rows in the format of the proxy's /breakdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from policies.registry import parameters
from policies.row import RequestOutcome, Row
from replayer.records.idle import IdleCosts
from replayer.records.runs import RequestRecord, RunHeader, latencies
from replayer.records.version import installed_version
from replayer.replay.plan import Plan, offered_dict
from sim.hardware import HardwareProfile
from sim.offline.exchange import SimulatedExchange, leg_priority
from sim.offline.options import SimOptions
from sim.offline.router import OfflineRouter

ENDPOINT = "sim:offline"
"""Endpoint in the header of a simulated run, in place of a URL."""


class TraceSource(NamedTuple):
    """The trace as the header names it."""

    name: str
    sha256: str
    block_tokens: int
    notes: list[str]
    cut_session: str | None = None
    """Session of which only the first turns fit the request limit."""
    read_with: Mapping[str, Any] = {}
    """Options of the loader that are not its defaults."""


def header_of(
    options: SimOptions,
    router: OfflineRouter,
    source: TraceSource,
    plan: Plan | None,
    kv_capacity_tokens: int,
    costs: IdleCosts,
) -> RunHeader:
    """The run's first line. It holds no wall-clock time: equal simulations give equal bytes.

    ``kv_capacity_tokens`` is the KV pool of one instance (the smallest, where roles differ); ``plan`` is None for a
    stream.
    """
    scales = options.plan
    if plan is not None:
        offered = offered_dict(plan.offered)
    else:
        offered = {} if scales.request_limit is None else {"cut_sessions": int(source.cut_session is not None)}
    return RunHeader(
        label=options.label,
        trace=source.name,
        trace_sha256=source.sha256,
        endpoint=ENDPOINT,
        model=options.profile,
        time_scale=scales.time_scale,
        think_scale=scales.time_scale if scales.think_scale is None else scales.think_scale,
        max_inflight_sessions=options.max_inflight_sessions,
        request_limit=scales.request_limit,
        seed=options.seed,
        warmroute_version=installed_version(),
        offered=offered,
        cut_session=source.cut_session,
        idle_costs=costs,
        options={
            "idle_gap_cap_s": scales.idle_gap_cap_s,
            "block_tokens": source.block_tokens,
            "trace_notes": source.notes,
            **({"trace_options": dict(source.read_with)} if source.read_with else {}),
            "policy": router.routing.policy.name,
            "policy_params": parameters(router.routing.policy),
            "planner": router.routing.planner.name,
            "planner_params": parameters(router.routing.planner),
            "admission": router.routing.gate.rule.name,
            "admission_params": parameters(router.routing.gate.rule),
            **_classes(router),
            "max_hold_s": options.max_hold_s,
            "instances": options.instances,
            "prefill_instances": options.prefill_instances,
            "role": options.role.value,
            "profile": options.profile,
            "pool_tokens": options.pool_tokens,
            "kv_capacity_tokens": kv_capacity_tokens,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "max_num_seqs": options.max_num_seqs,
            "scheduling_policy": options.scheduling_policy,
            "long_prefill_token_threshold": options.long_prefill_token_threshold,
            "max_model_len": options.max_model_len,
            "transport": options.transport,
            "arrival_jitter_s": options.noise.arrival_jitter_s,
            "speed_sigma": options.noise.speed_sigma,
            "slowdown": options.slowdown,
            "speeds": list(options.speeds) or None,
        },
    )


def _classes(router: OfflineRouter) -> dict[str, str]:
    """``MODULE:Class`` of policy, planner and rule that are not of this project: any may have the name of another."""
    routing = router.routing
    parts = {"policy": routing.policy, "planner": routing.planner, "admission": routing.gate.rule}
    classes = {f"{kind}_class": type(part) for kind, part in parts.items()}
    return {
        kind: f"{found.__module__}:{found.__qualname__}"
        for kind, found in classes.items()
        if not found.__module__.startswith("policies.")
    }


def idle_costs(profile: HardwareProfile, step_tokens: int) -> IdleCosts:
    """A profile's costs of one request alone; ``step_tokens`` is the token budget of a step."""
    step = profile.step
    return IdleCosts(
        source=f"hardware profile {profile.name}",
        request_s=step.frontend_s,
        prompt_token_s=step.frontend_token_s,
        prefill_step_s=step.prefill_s,
        prefill_floor_s=step.prefill_floor_s,
        new_token_s=step.prefill_token_s,
        attention_s=step.prefill_context_s,
        step_tokens=step_tokens,
        decode_s=profile.timing.decode(1, 0),
        decode_context_s=step.decode_context_s,
    )


def record_of(exchange: SimulatedExchange, ended_s: float) -> RequestRecord:
    """One request's record, as a replay would have written it."""
    step, decision = exchange.step, exchange.decision
    request = step.request
    sent_s, due_s, first_s = exchange.sent_s, exchange.due_s, exchange.first_token_s
    ok = exchange.error is None
    tokens = exchange.completion_tokens
    times = latencies(
        scheduled_s=due_s,
        sent_s=sent_s,
        first_token_s=first_s,
        last_token_s=ended_s,
        finished_s=ended_s,
        completion_tokens=tokens,
    )
    return RequestRecord(
        request_id=step.request_id,
        session_id=request.session_id,
        turn=request.turn,
        chat_id=request.chat_id,
        trace_timestamp_s=request.timestamp_s,
        scheduled_s=due_s,
        sent_s=sent_s,
        first_token_s=first_s,
        finished_s=ended_s,
        **times._asdict(),
        input_length=request.input_length,
        output_length=max(request.output_length, 1),
        wait_s=step.wait_s,
        wait_after_end=step.after_end,
        own_prefix_tokens=step.own_prefix_tokens(int(exchange.request.block_tokens)),
        prompt_tokens=request.input_length if ok else None,
        completion_tokens=tokens if ok else None,
        cached_tokens=exchange.actual_cached_tokens if ok else None,
        ok=ok,
        error=exchange.error,
        http_status=_status(exchange.error),
        instance=decision.decode_on,
        prefill_instance=exchange.prefill_instance,
        request_class=decision.request_class.value,
        reason=decision.reason.value,
        predicted_cached_tokens=exchange.predicted_cached_tokens,
    )


def _status(error: str | None) -> int | None:
    if error is None:
        return 200
    return 400 if error.startswith("HTTP 400") else None


def _priority(exchange: SimulatedExchange) -> int | None:
    """``priority`` of its first leg that has one, as the engine got it."""
    leases = (exchange.commitment.prefill, exchange.commitment.decode)
    return next((leg_priority(lease) for lease in leases if lease is not None and lease.due_s is not None), None)


def breakdown_row(exchange: SimulatedExchange, planner: str, ended_s: float) -> dict[str, Any]:
    """The request as the proxy's /breakdown would show it, JSON-ready. Times are engine seconds from the start."""
    request, ok, status = exchange.request, exchange.error is None, _status(exchange.error)
    row = Row(
        request.request_id,
        "/v1/completions",
        exchange.sent_s,
        session_id=request.session_id,
        stream=True,
        status=status or 0,
        planner=exchange.decision.policy if exchange.decision.planned else planner,
        decision=exchange.decision,
        offload_reason=exchange.offload_reason,
        prefill_instance=exchange.prefill_instance,
        prompt_tokens=request.prompt_tokens,
        predicted_cached_tokens=exchange.predicted_cached_tokens,
        actual_cached_tokens=exchange.actual_cached_tokens if ok else None,
        completion_tokens=exchange.completion_tokens if ok else None,
        events=exchange.completion_tokens,
        attempts=list(exchange.attempts or ()),
        stages_ms={name: value * 1e3 for name, value in exchange.stages_s.items()},
        error=exchange.error,
        admission=exchange.admission,
        held_s=exchange.held_s,
        priority=_priority(exchange),
    )
    if ok:
        row.outcome = RequestOutcome.OK
    else:
        row.outcome = RequestOutcome.ENGINE_REFUSED if status == 400 else RequestOutcome.UPSTREAM_TIMEOUT
    if exchange.held_s:
        row.stages_ms["held"] = exchange.held_s * 1e3
    if exchange.first_token_s is not None:
        row.stages_ms["first_byte"] = (exchange.first_token_s - exchange.sent_s) * 1e3
    row.stages_ms["total"] = (ended_s - exchange.sent_s) * 1e3
    for leg, (predicted_s, actual_s) in exchange.legs.items():
        row.note_leg(leg, predicted_s, actual_s)
    return row.as_dict()
