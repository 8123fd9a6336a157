"""Round robin: instances in turn, regardless of cache and load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, Reason, RequestView


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Instance number ``sequence mod n``.

    A baseline without affinity: under even load the difference to another policy is the effect of its affinity.
    Complexity: O(n) for the score list.
    """

    name: ClassVar[str] = "round_robin"

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        n = len(fleet.instances)
        turn = fleet.sequence % n
        scores = tuple(
            CandidateScore(view.instance, float((position - turn) % n), {"position": float(position)})
            for position, view in enumerate(fleet.instances)
        )
        return Choice(fleet.instances[turn].instance, Reason.NEXT_IN_TURN, scores)
