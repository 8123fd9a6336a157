"""Planner interface, and the choice of P that planners share."""

from __future__ import annotations

from collections.abc import Set
from itertools import compress
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


def has_room(decode: InstanceView, request: RequestView) -> bool:
    """True if D's pool can hold the whole request besides used and promised tokens, or its size is unknown."""
    if not decode.kv_capacity_tokens:
        return True
    taken = decode.kv_used_tokens + decode.kv_promised_tokens
    return request.prompt_tokens + request.max_tokens <= decode.kv_capacity_tokens - taken


def best_prefill(request: RequestView, decode: InstanceView, fleet: FleetSnapshot) -> InstanceView | None:
    """P with the least ``pending_prefill + new tokens``; never D, and only sending roles and unbroken pairs."""
    views = fleet.prefill_instances or fleet.instances
    columns = FleetColumns.of(views)
    sends = senders(columns, decode, fleet.broken_pairs)
    if True not in sends:
        return None
    prompt = request.prompt_tokens
    works = [
        pending + prompt - cached
        for pending, cached in zip(columns.pending_prefill_tokens, columns.cached_tokens, strict=True)
    ]
    least = min(compress(works, sends))
    tied = [view for view, work, may in zip(views, works, sends, strict=True) if may and work == least]
    return min(tied, key=lambda view: (view.requests, view.recent_tokens, view.instance))


def senders(columns: FleetColumns, decode: InstanceView, broken_pairs: Set[tuple[str, str]]) -> list[bool]:
    """Which candidates may prefill for D: ``may_send``, over a pair whose breaker is closed."""
    target, connector, both, producer = decode.instance, decode.connector, Role.KV_BOTH, Role.KV_PRODUCER
    allowed = [
        (role is both or role is producer) and its is connector and name != target
        for role, its, name in zip(columns.role, columns.connector, columns.instance, strict=True)
    ]
    if broken_pairs:
        return [
            sends and (name, target) not in broken_pairs for sends, name in zip(allowed, columns.instance, strict=True)
        ]
    return allowed


def no_prefill_reason(decode: InstanceView, fleet: FleetSnapshot) -> OffloadReason:
    """Reason why no P can be chosen: all pairs' breakers are open, or there is no candidate."""
    sending = [view for view in fleet.prefill_instances or fleet.instances if may_send(view, decode)]
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
