"""``decide``: the decision function shared by the live proxy, explanations, the simulator and the tests."""

from __future__ import annotations

from policies.classes import ClassThresholds
from policies.offload.base import OffloadPlanner
from policies.routing.base import RoutingPolicy
from policies.snapshot import FleetSnapshot
from policies.types import (
    CachePrediction,
    CandidateScore,
    Decision,
    NoCandidateError,
    OffloadPlan,
    OffloadReason,
    Reason,
    RequestView,
)


def decide(
    request: RequestView,
    fleet: FleetSnapshot,
    policy: RoutingPolicy,
    planner: OffloadPlanner,
    thresholds: ClassThresholds,
) -> Decision:
    """Choose D, classify the request by its new tokens there, and choose a P if the planner offloads."""
    if not fleet.instances:
        raise NoCandidateError("no instance may take the request")
    choice = policy.choose(request, fleet)
    chosen = fleet.view(choice.instance)
    if chosen is None:
        raise ValueError(f"policy {policy.name!r} chose {choice.instance!r}, which is not a candidate")
    request_class = thresholds.classify(request.prompt_tokens - chosen.cached_tokens)
    if request.may_offload:
        plan = planner.plan(request, chosen, request_class, fleet)
    else:
        plan = OffloadPlan(None, OffloadReason.REQUEST_SHAPE)
    prefill = fleet.prefill_view(plan.prefill_on) if plan.prefill_on is not None else None
    return Decision(
        request_id=request.request_id,
        decode_on=chosen.instance,
        prefill_on=plan.prefill_on,
        request_class=request_class,
        reason=Reason.ONLY_CANDIDATE if len(fleet.instances) == 1 else choice.reason,
        offload=plan,
        scores=_with_cached_tokens(choice.scores, fleet),
        policy=policy.name,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=chosen.cached_tokens,
        decode_prediction=CachePrediction.of(chosen),
        prefill_prediction=CachePrediction.of(prefill) if prefill is not None else None,
    )


def _with_cached_tokens(scores: tuple[CandidateScore, ...], fleet: FleetSnapshot) -> tuple[CandidateScore, ...]:
    """The scores with every candidate's predicted hit. Runs for every request: one lookup per candidate."""
    cached, new = {view[0]: view[1] for view in fleet.instances}.get, tuple.__new__
    return tuple(
        [
            new(CandidateScore, (instance, score, inputs, skipped, cached(instance)))
            for instance, score, inputs, skipped, _ in scores
        ]
    )
