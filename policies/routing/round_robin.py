"""Round robin: instances in turn, regardless of cache and load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.routing.base import ColumnPolicy, Pick
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Reason, RequestView


@dataclass(frozen=True, slots=True)
class RoundRobin(ColumnPolicy):
    """Instance number ``sequence mod n``.

    A baseline without affinity: under even load the difference to another policy is the effect of its affinity.
    Complexity: O(n) for the score list.
    """

    name: ClassVar[str] = "round_robin"

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        n = len(fleet.instances)
        turn = fleet.sequence % n
        return [float((place - turn) % n) for place in range(n)]

    def inputs(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Iterable[dict[str, float]]:
        return [{"position": float(place)} for place in range(len(fleet.instances))]

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        return Pick(fleet.sequence % len(fleet.instances), Reason.NEXT_IN_TURN)

    def quick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Pick:
        """The same choice as that of ``choose``."""
        return self.pick(request, fleet, columns, ())
