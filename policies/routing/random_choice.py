"""Uniformly random placement, reproducible from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xxhash import xxh3_64_intdigest

from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, Reason, RequestView


@dataclass(frozen=True, slots=True)
class RandomChoice:
    """``hash(seed, sequence) mod n``: uniform, and the same for the same seed and decision number.

    Hashing the decision's number instead of using a generator keeps the policy a pure function. Complexity: O(n).
    """

    seed: int = 0
    name: ClassVar[str] = "random"

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        drawn = xxh3_64_intdigest(f"{self.seed}:{fleet.sequence}".encode()) % len(fleet.instances)
        scores = tuple(
            CandidateScore(view.instance, float(position != drawn), {"position": float(position)})
            for position, view in enumerate(fleet.instances)
        )
        return Choice(fleet.instances[drawn].instance, Reason.DRAWN, scores)
