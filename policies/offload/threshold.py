"""``threshold``: offload every HEAVY prefill, within the caps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.offload.base import ColumnPlanner, best_prefill, has_room, may_receive, no_prefill_reason
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import InstanceView, OffloadPlan, OffloadReason, RequestClass, RequestView


@dataclass(frozen=True, slots=True)
class Threshold(ColumnPlanner):
    """HEAVY goes to the P with the least ``pending_prefill + new``, if D has room and something to protect.

    Source: the elastic prototype of the agentic-kvc reports (threshold 20k new tokens, at most 4 at once). It lost to
    co-location, partly because it pushed KV to instances without room and offloaded when D had nothing to protect;
    both are refused here. ``min_decode_requests=0`` and ``check_room=False`` leave its own conditions, class and cap.
    Deviations then: its P was the next in turn that was not overloaded, and its HEAVY begins one token later
    (`policies.classes`). Defaults: ``max_in_flight`` 4; ``min_decode_requests`` 1 request in flight on D;
    ``check_room`` true. Complexity: O(n).
    """

    max_in_flight: int = 4
    min_decode_requests: int = 1
    check_room: bool = True
    """Refuse a D whose pool cannot hold the request beside what is used and promised."""
    name: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        if self.max_in_flight < 1 or self.min_decode_requests < 0:
            raise ValueError("threshold: max_in_flight must be at least 1 and min_decode_requests at least 0")

    def plan(
        self,
        request: RequestView,
        decode: InstanceView,
        request_class: RequestClass,
        fleet: FleetSnapshot,
        columns: FleetColumns | None = None,
    ) -> OffloadPlan:
        inputs = {
            "new_tokens": float(request.prompt_tokens - decode.cached_tokens),
            "decode_requests": float(decode.requests),
            "in_flight": float(fleet.offloads_in_flight),
        }
        refusal = self._refusal(request, decode, request_class, fleet)
        if refusal is not None:
            return OffloadPlan(None, refusal, inputs)
        prefill = best_prefill(request, decode, fleet, columns)
        if prefill is None:
            return OffloadPlan(None, no_prefill_reason(decode, fleet), inputs)
        return OffloadPlan(
            prefill.instance,
            OffloadReason.CHOSEN,
            inputs | {"prefill_pending_tokens": float(prefill.pending_prefill_tokens)},
        )

    def _refusal(
        self, request: RequestView, decode: InstanceView, request_class: RequestClass, fleet: FleetSnapshot
    ) -> OffloadReason | None:
        if request_class is not RequestClass.HEAVY:
            return OffloadReason.BELOW_THRESHOLD
        if not may_receive(decode):
            return OffloadReason.ROLE_FORBIDS
        if decode.requests < self.min_decode_requests:
            return OffloadReason.NOTHING_TO_PROTECT
        if fleet.offloads_in_flight >= self.max_in_flight:
            return OffloadReason.CAP_REACHED
        if self.check_room and not has_room(decode, request):
            return OffloadReason.NO_ROOM_ON_D
        return None
