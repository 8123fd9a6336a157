"""``decide``: the decision function shared by the live proxy, explanations, the simulator and the tests."""

from __future__ import annotations

from policies.classes import ClassThresholds
from policies.offload.base import ColumnPlanner, OffloadPlanner
from policies.routing.base import ColumnPolicy, RoutingPolicy, refuse_nan
from policies.routing.least_loaded import LeastLoaded
from policies.routing.warm import Warm
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import (
    CachePrediction,
    CandidateScore,
    Choice,
    Decision,
    InstanceView,
    NoCandidateError,
    OffloadPlan,
    OffloadReason,
    PolicyFailedError,
    PolicyFailure,
    PolicyPart,
    Reason,
    RequestClass,
    RequestView,
)


def decide(
    request: RequestView,
    fleet: FleetSnapshot,
    policy: RoutingPolicy,
    planner: OffloadPlanner,
    thresholds: ClassThresholds,
    *,
    guarded: bool = False,
    scored: bool = True,
) -> Decision:
    """Choose D, classify the request by its new tokens there, and choose a P if the policy or the planner offloads.

    Args:
        request: the request.
        fleet: snapshot of the candidates.
        policy: chooses D, and P if its choice has a plan.
        planner: chooses P, or none, where the choice has no plan.
        thresholds: limits of the request classes.
        guarded: if the policy fails (raises an error, or returns an invalid choice), decide by ``warm`` instead, or by
            ``least_loaded`` if that is the one that fails; if the planner fails, do not offload. The decision's
            ``failures`` name them. Without it, a failure is raised: a simulation must not hide it.
        scored: False: nobody reads the candidates' scores, so they are left out where the policy can choose without
            (`ColumnPolicy.quick`).

    Raises:
        NoCandidateError: the snapshot is empty, or the policy accepts none of the candidates.
        PolicyFailedError: not guarded, and the policy or the planner fails.
    """
    if not fleet.instances:
        raise NoCandidateError("no instance may take the request")
    try:
        choice, chosen, scores = _choose(request, fleet, policy, scored)
    except NoCandidateError:
        raise
    except Exception as error:
        failure = PolicyFailure.of(PolicyPart.POLICY, policy.name, error)
        if not guarded:
            raise PolicyFailedError(failure, request.request_id) from error
        if type(policy) is LeastLoaded:
            raise
        safe = LeastLoaded() if type(policy) is Warm else Warm()
        decision = decide(request, fleet, safe, planner, thresholds, guarded=True, scored=scored)
        return decision._replace(failures=(failure, *decision.failures))
    request_class = thresholds.classify(request.prompt_tokens - chosen.cached_tokens)
    prefill: InstanceView | None = None
    failures: tuple[PolicyFailure, ...] = ()
    planned = choice.plan is not None
    if not request.may_offload:
        plan = OffloadPlan(None, OffloadReason.REQUEST_SHAPE)
    elif choice.plan is not None:
        plan = choice.plan
        prefill = fleet.prefill_view(plan.prefill_on) if plan.prefill_on is not None else None
    else:
        try:
            plan, prefill = planned_by(request, chosen, request_class, fleet, planner)
        except Exception as error:
            failure = PolicyFailure.of(PolicyPart.PLANNER, planner.name, error)
            if not guarded:
                raise PolicyFailedError(failure, request.request_id) from error
            plan = OffloadPlan(None, OffloadReason.PLANNER_FAILED)
            failures = (failure,)
    # Positional: naming 14 fields takes longer than the guard.
    return Decision(
        request.request_id,
        chosen.instance,
        plan.prefill_on,
        request_class,
        Reason.ONLY_CANDIDATE if len(fleet.instances) == 1 else choice.reason,
        plan,
        scores,
        policy.name,
        request.prompt_tokens,
        chosen.cached_tokens,
        CachePrediction.of(chosen),
        CachePrediction.of(prefill) if prefill is not None else None,
        failures,
        planned,
    )


def chosen_by(request: RequestView, fleet: FleetSnapshot, policy: RoutingPolicy) -> tuple[Choice, InstanceView]:
    """The policy's choice and D; raises ValueError for an answer that no request can follow."""
    choice: object = policy.choose(request, fleet)  # a class of one's own may answer anything
    if not isinstance(choice, Choice):
        raise ValueError(f"policy {policy.name!r} answered {choice!r:.100}, which is not a Choice")
    chosen = fleet.view(choice.instance)
    if chosen is None:
        raise ValueError(f"policy {policy.name!r} chose {choice.instance!r}, which is not a candidate")
    if type(choice.reason) is not Reason:  # it becomes a metric's label
        raise ValueError(f"policy {policy.name!r} gave the reason {choice.reason!r}, which is not a Reason")
    for score in choice.scores:
        if score[0] == choice.instance:
            refuse_nan(policy.name, choice.instance, score[1])
            break
    if choice.plan is not None:
        _prefill_of(choice.plan, chosen, fleet, f"policy {policy.name!r}")
    return choice, chosen


def _choose(
    request: RequestView, fleet: FleetSnapshot, policy: RoutingPolicy, scored: bool
) -> tuple[Choice, InstanceView, tuple[CandidateScore, ...]]:
    if not scored and isinstance(policy, ColumnPolicy) and not policy.plans:
        columns = FleetColumns.of(fleet.instances)
        place, reason, _ = policy.quick(request, fleet, columns)
        return Choice(columns.instance[place], reason, ()), fleet.instances[place], ()
    choice, chosen = chosen_by(request, fleet, policy)
    chooses: object = type(policy).choose
    if chooses is ColumnPolicy.choose:
        return choice, chosen, choice.scores  # they have the candidates' hits from the columns
    return choice, chosen, _with_cached_tokens(choice.scores, fleet)


def planned_by(
    request: RequestView,
    chosen: InstanceView,
    request_class: RequestClass,
    fleet: FleetSnapshot,
    planner: OffloadPlanner,
    columns: FleetColumns | None = None,
) -> tuple[OffloadPlan, InstanceView | None]:
    """The planner's plan and P; raises ValueError for a plan that cannot be carried out.

    ``columns``: those of ``fleet.senders``, for the quick form of a planner that has one (`ColumnPlanner.quick`).
    """
    if columns is not None and isinstance(planner, ColumnPlanner):
        plan = planner.quick(request, chosen, request_class, fleet, columns)
    else:
        plan = planner.plan(request, chosen, request_class, fleet)
    return plan, _prefill_of(plan, chosen, fleet, f"planner {planner.name!r}")


def _prefill_of(plan: OffloadPlan, chosen: InstanceView, fleet: FleetSnapshot, author: str) -> InstanceView | None:
    """P of a plan; raises ValueError for a plan that cannot be carried out."""
    if type(plan.reason) is not OffloadReason:
        raise ValueError(f"{author} gave the reason {plan.reason!r}, which is not an OffloadReason")
    if plan.prefill_on is None:
        return None
    prefill = fleet.prefill_view(plan.prefill_on)
    if prefill is None or prefill.instance == chosen.instance:
        raise ValueError(f"{author} chose {plan.prefill_on!r}, which cannot prefill for another")
    return prefill


def _with_cached_tokens(scores: tuple[CandidateScore, ...], fleet: FleetSnapshot) -> tuple[CandidateScore, ...]:
    """The scores with every candidate's predicted hit. Runs for every request: one lookup per candidate."""
    if scores == ():  # None is a policy's failure
        return ()
    cached, new = {view[0]: view[1] for view in fleet.instances}.get, tuple.__new__
    return tuple(
        [
            new(CandidateScore, (instance, score, inputs, skipped, cached(instance)))
            for instance, score, inputs, skipped, _ in scores
        ]
    )
