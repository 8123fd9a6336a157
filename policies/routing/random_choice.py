"""Uniformly random placement, reproducible from a seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from xxhash import xxh3_64_intdigest

from policies.routing.base import ColumnPolicy, Pick
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Reason, RequestView


@dataclass(frozen=True, slots=True)
class RandomChoice(ColumnPolicy):
    """``hash(seed, sequence) mod n``: uniform, and the same for the same seed and decision number.

    Hashing the decision's number instead of using a generator keeps the policy a pure function. Complexity: O(n).
    """

    seed: int = 0
    name: ClassVar[str] = "random"

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        drawn = self._drawn(fleet)
        return [float(place != drawn) for place in range(len(fleet.instances))]

    def inputs(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Iterable[dict[str, float]]:
        return [{"position": float(place)} for place in range(len(fleet.instances))]

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        return Pick(self._drawn(fleet), Reason.DRAWN)

    def quick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Pick:
        """The same choice as that of ``choose``."""
        return self.pick(request, fleet, columns, ())

    def _drawn(self, fleet: FleetSnapshot) -> int:
        return xxh3_64_intdigest(f"{self.seed}:{fleet.sequence}".encode()) % len(fleet.instances)
