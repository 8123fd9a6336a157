"""Shared by the routing policies: the interface, the tie-break rule and the overload rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, InstanceView, RequestView


class RoutingPolicy(Protocol):
    """Chooses the decode instance. Implementations are frozen dataclasses: their fields are the policy's parameters."""

    name: ClassVar[str]

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        """Choose an instance for one request; a pure function of its arguments. ``fleet.instances`` is never empty."""
        ...


def tie_break(fleet: FleetSnapshot, position: int) -> tuple[int, float, int]:
    """Sort key among candidates of equal score: requests in flight, recently assigned tokens, then a rotating turn.

    The turn advances with every decision, so that an idle fleet does not place everything on its first instance.
    """
    view = fleet.instances[position]
    return view.requests, view.recent_tokens, (position - fleet.sequence) % len(fleet.instances)


def lowest(fleet: FleetSnapshot, scores: Iterable[CandidateScore]) -> InstanceView:
    """Candidate with the lowest score that is not skipped; ties by ``tie_break``. Scores are in fleet order."""
    ranked = [(score.score, position) for position, score in enumerate(scores) if not score.skipped]
    best, first = min(ranked)
    return fleet.instances[_first_of_tied(fleet, first, [position for score, position in ranked if score == best])]


def preferred(fleet: FleetSnapshot, rank: Callable[[InstanceView], Any]) -> InstanceView:
    """Instance with the lowest ``rank``; ties by ``tie_break``."""
    ranks = [rank(view) for view in fleet.instances]
    first = min(range(len(ranks)), key=ranks.__getitem__)
    best = ranks[first]
    return fleet.instances[_first_of_tied(fleet, first, [place for place, each in enumerate(ranks) if each == best])]


def _first_of_tied(fleet: FleetSnapshot, first: int, tied: list[int]) -> int:
    if len(tied) < 2:  # skip the rule when there is no tie
        return first
    return min(tied, key=lambda position: tie_break(fleet, position))


def is_overloaded(view: InstanceView, fleet: FleetSnapshot, factor: float, floor_tokens: int) -> bool:
    """True if queued prefill on an instance exceeds ``factor`` x the fleet's mean and also ``floor_tokens``.

    The floor keeps a nearly idle fleet from treating its only busy instance as overloaded.
    """
    if view.pending_prefill_tokens <= floor_tokens:
        return False
    mean = sum(other.pending_prefill_tokens for other in fleet.instances) / len(fleet.instances)
    return view.pending_prefill_tokens > factor * mean


def require(condition: bool, message: str) -> None:
    """Validate a policy parameter.

    Raises:
        ValueError: with ``message``, if ``condition`` is false.
    """
    if not condition:
        raise ValueError(message)
