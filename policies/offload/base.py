"""Planner interface, and the choice of P that planners share."""

from __future__ import annotations

from typing import ClassVar, Protocol

from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import InstanceView, OffloadPlan, OffloadReason, RequestClass, RequestView, Role


class OffloadPlanner(Protocol):
    """Decides if a request's prefill runs on another instance. Implementations are frozen dataclasses and pure."""

    name: ClassVar[str]

    def plan(
        self, request: RequestView, decode: InstanceView, request_class: RequestClass, fleet: FleetSnapshot
    ) -> OffloadPlan:
        """Plan for one request that will decode on ``decode``."""
        ...


class ColumnPlanner:
    """A planner whose ``plan`` also takes the columns of the candidates for P: those who have them hand them over."""

    __slots__ = ()

    def plan(
        self,
        request: RequestView,
        decode: InstanceView,
        request_class: RequestClass,
        fleet: FleetSnapshot,
        columns: FleetColumns | None = None,
    ) -> OffloadPlan:
        """Plan for one request. ``columns`` are those of ``fleet.senders``."""
        raise NotImplementedError

    def quick(
        self,
        request: RequestView,
        decode: InstanceView,
        request_class: RequestClass,
        fleet: FleetSnapshot,
        columns: FleetColumns,
    ) -> OffloadPlan:
        """The same P and reason as those of ``plan``, and its inputs where there is a P: all that shadows read."""
        return self.plan(request, decode, request_class, fleet, columns)


def has_room(decode: InstanceView, request: RequestView) -> bool:
    """True if D's pool can hold the whole request besides used and promised tokens, or its size is unknown."""
    if not decode.kv_capacity_tokens:
        return True
    taken = decode.kv_used_tokens + decode.kv_promised_tokens
    return request.prompt_tokens + request.max_tokens <= decode.kv_capacity_tokens - taken


def best_prefill(
    request: RequestView, decode: InstanceView, fleet: FleetSnapshot, columns: FleetColumns | None = None
) -> InstanceView | None:
    """P with the least ``pending_prefill + new tokens``; never D, and only sending roles and unbroken pairs."""
    views = fleet.senders
    if columns is None:
        columns = FleetColumns.of(views)
    prompt = request.prompt_tokens
    works = [
        pending + prompt - cached
        for pending, cached in zip(columns.pending_prefill_tokens, columns.cached_tokens, strict=True)
    ]
    # The least of all is nearly always a candidate, and alone: the others are not even asked whether they may send.
    first = works.index(min(works))
    if works.count(works[first]) == 1 and sends_to(views[first], decode, fleet):
        return views[first]
    usable = [(work, view) for work, view in zip(works, views, strict=True) if sends_to(view, decode, fleet)]
    if not usable:
        return None
    least = min([work for work, _ in usable])
    tied = [view for work, view in usable if work == least]
    return min(tied, key=lambda view: (view.requests, view.recent_tokens, view.instance))


def sends_to(view: InstanceView, decode: InstanceView, fleet: FleetSnapshot) -> bool:
    """True if the instance may prefill for D: ``may_send``, over a pair whose breaker is closed."""
    broken = fleet.broken_pairs
    return may_send(view, decode) and not (broken and (view.instance, decode.instance) in broken)


def no_prefill_reason(decode: InstanceView, fleet: FleetSnapshot) -> OffloadReason:
    """Reason why no P can be chosen: all pairs' breakers are open, or there is no candidate."""
    sending = [view for view in fleet.senders if may_send(view, decode)]
    if sending and all((view.instance, decode.instance) in fleet.broken_pairs for view in sending):
        return OffloadReason.PAIR_BROKEN
    return OffloadReason.NO_PREFILL_CANDIDATE


def may_receive(decode: InstanceView) -> bool:
    """True if D's role lets it pull KV."""
    return decode.role is Role.KV_BOTH or decode.role is Role.KV_CONSUMER


def may_send(view: InstanceView, decode: InstanceView) -> bool:
    """True if the instance can prefill for D: a different one, in a sending role, with the same connector."""
    return (
        view.instance != decode.instance
        and (view.role is Role.KV_BOTH or view.role is Role.KV_PRODUCER)
        and view.connector is decode.connector
    )
