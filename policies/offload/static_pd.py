"""Static prefill/decode disaggregation: every prefill above a minimum size goes to a P."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.offload.base import ColumnPlanner, best_prefill, has_room, may_receive, no_prefill_reason
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import InstanceView, OffloadPlan, OffloadReason, RequestClass, RequestView


@dataclass(frozen=True, slots=True)
class StaticPd(ColumnPlanner):
    """Every prompt with ``min_new_tokens`` or more to compute goes to the P with the least pending plus new tokens.

    New tokens on P are those missing from its prefix cache, so the turns of one session return to the P that computed
    the earlier turns. For fleets of ``kv_producer`` and ``kv_consumer`` instances (4P+4D, 6P+2D). D computes shorter
    prompts itself, and those it has no room to receive. Default: 256, below which a hand-off costs more than computing.
    Complexity: O(n).
    """

    min_new_tokens: int = 256
    max_in_flight: int = 256
    name: ClassVar[str] = "static_pd"

    def __post_init__(self) -> None:
        if self.max_in_flight < 1 or self.min_new_tokens < 0:
            raise ValueError("static_pd: max_in_flight must be at least 1 and min_new_tokens at least 0")

    def plan(
        self,
        request: RequestView,
        decode: InstanceView,
        request_class: RequestClass,
        fleet: FleetSnapshot,
        columns: FleetColumns | None = None,
    ) -> OffloadPlan:
        inputs = {"new_tokens": float(request.prompt_tokens - decode.cached_tokens)}
        if request.prompt_tokens - decode.cached_tokens < self.min_new_tokens:
            return OffloadPlan(None, OffloadReason.BELOW_THRESHOLD, inputs)
        if not may_receive(decode):
            return OffloadPlan(None, OffloadReason.ROLE_FORBIDS, inputs)
        if fleet.offloads_in_flight >= self.max_in_flight:
            return OffloadPlan(None, OffloadReason.CAP_REACHED, inputs)
        if not has_room(decode, request):
            return OffloadPlan(None, OffloadReason.NO_ROOM_ON_D, inputs)
        prefill = best_prefill(request, decode, fleet, columns)
        if prefill is None:
            return OffloadPlan(None, no_prefill_reason(decode, fleet), inputs)
        return OffloadPlan(prefill.instance, OffloadReason.CHOSEN, inputs)
