"""Planner interface, and the choice of P that planners share."""

from __future__ import annotations

from typing import ClassVar, Protocol

from policies.snapshot import FleetSnapshot
from policies.types import InstanceView, OffloadPlan, OffloadReason, RequestClass, RequestView, Role


class OffloadPlanner(Protocol):
    """Decides if a request's prefill runs on another instance. Implementations are frozen dataclasses and pure."""

    name: ClassVar[str]

    def plan(
        self, request: RequestView, decode: InstanceView, request_class: RequestClass, fleet: FleetSnapshot
    ) -> OffloadPlan:
        """Plan for one request that will decode on ``decode``."""
        ...


def has_room(decode: InstanceView, request: RequestView) -> bool:
    """True if D's pool can hold the whole request besides used and promised tokens, or its size is unknown."""
    if not decode.kv_capacity_tokens:
        return True
    taken = decode.kv_used_tokens + decode.kv_promised_tokens
    return request.prompt_tokens + request.max_tokens <= decode.kv_capacity_tokens - taken


def best_prefill(request: RequestView, decode: InstanceView, fleet: FleetSnapshot) -> InstanceView | None:
    """P with the least ``pending_prefill + new tokens``; never D, and only sending roles and unbroken pairs."""
    candidates = [
        view
        for view in fleet.prefill_instances or fleet.instances
        if may_send(view, decode) and (view.instance, decode.instance) not in fleet.broken_pairs
    ]
    return min(
        candidates,
        key=lambda view: (
            view.pending_prefill_tokens + request.prompt_tokens - view.cached_tokens,
            view.requests,
            view.recent_tokens,
            view.instance,
        ),
        default=None,
    )


def no_prefill_reason(decode: InstanceView, fleet: FleetSnapshot) -> OffloadReason:
    """Reason why no P can be chosen: all pairs' breakers are open, or there is no candidate."""
    senders = [view for view in fleet.prefill_instances or fleet.instances if may_send(view, decode)]
    if senders and all((view.instance, decode.instance) in fleet.broken_pairs for view in senders):
        return OffloadReason.PAIR_BROKEN
    return OffloadReason.NO_PREFILL_CANDIDATE


def may_receive(decode: InstanceView) -> bool:
    """True if D's role lets it pull KV."""
    return decode.role in {Role.KV_BOTH, Role.KV_CONSUMER}


def may_send(view: InstanceView, decode: InstanceView) -> bool:
    """True if the instance can prefill for D: a different one, in a sending role, with the same connector."""
    return (
        view.instance != decode.instance
        and view.role in {Role.KV_BOTH, Role.KV_PRODUCER}
        and view.connector is decode.connector
    )
