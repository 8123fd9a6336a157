"""``never``: every request runs co-located. The default planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.snapshot import FleetSnapshot
from policies.types import InstanceView, OffloadPlan, OffloadReason, RequestClass, RequestView


@dataclass(frozen=True, slots=True)
class Never:
    """No offloading. Complexity: O(1)."""

    name: ClassVar[str] = "never"

    def plan(
        self, request: RequestView, decode: InstanceView, request_class: RequestClass, fleet: FleetSnapshot
    ) -> OffloadPlan:
        return OffloadPlan(None, OffloadReason.PLANNER_NEVER)
