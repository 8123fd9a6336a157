"""Never offload: every request runs co-located. The default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.snapshot import FleetSnapshot
from policies.types import InstanceView, OffloadPlan, OffloadReason, RequestClass, RequestView


@dataclass(frozen=True, slots=True)
class Never:
    """Complexity: O(1)."""

    name: ClassVar[str] = "never"

    def plan(
        self, request: RequestView, decode: InstanceView, request_class: RequestClass, fleet: FleetSnapshot
    ) -> OffloadPlan:
        """See the class."""
        return OffloadPlan(None, OffloadReason.PLANNER_NEVER)
