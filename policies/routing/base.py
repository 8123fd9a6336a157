"""Shared by the routing policies: the interface, the tie-break rule and the overload rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from math import isnan
from typing import Any, ClassVar, NamedTuple, Protocol

from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import CandidateScore, Choice, InstanceView, Reason, RequestView


class RoutingPolicy(Protocol):
    """Chooses the decode instance. Implementations are frozen dataclasses: their fields are the policy's parameters.

    One with an attribute ``slowdown`` above 0 also orders the prefills that wait in an engine (docs/policies.md).
    """

    name: ClassVar[str]

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        """Choose an instance for one request; a pure function of its arguments. ``fleet.instances`` is never empty."""
        ...


class Pick(NamedTuple):
    """A choice without the candidates' scores."""

    place: int
    """Position in ``fleet.instances``."""
    reason: Reason
    skipped: Sequence[bool] | None = None
    """By candidate: a rule excludes it although its score may be lowest; None: no candidate is excluded."""


class ColumnPolicy:
    """A policy in two parts: the pick, which shadows take alone, and the inputs of the scores, for those who read them.

    Both work on columns, which all policies that decide on one snapshot share.
    """

    __slots__ = ()
    name: ClassVar[str]
    plans: ClassVar[bool] = False
    """A choice may have a plan of the prefill, which the pick has not: set it where ``choose`` makes one."""

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        """Score of every candidate, lower is better."""
        raise NotImplementedError

    def inputs(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Iterable[dict[str, float]]:
        """Inputs of every candidate's score."""
        raise NotImplementedError

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        """The choice, given the scores."""
        raise NotImplementedError

    def quick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Pick:
        """The same choice as that of ``choose``."""
        scores = self.scores(request, fleet, columns)
        picked = self.pick(request, fleet, columns, scores)
        refuse_nan(self.name, columns.instance[picked.place], scores[picked.place])
        return picked

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        """Choose an instance for one request, with all scores and their inputs."""
        columns = FleetColumns.of(fleet.instances)
        scores = self.scores(request, fleet, columns)
        picked = self.pick(request, fleet, columns, scores)
        return choice_of(columns, picked, scores, self.inputs(request, fleet, columns))


def choice_of(
    columns: FleetColumns, picked: Pick, scores: Sequence[float], inputs: Iterable[dict[str, float]]
) -> Choice:
    """The choice with all candidates' scores."""
    place, reason, skipped = picked
    new = tuple.__new__  # a third of the time of the class's own call
    excluded = repeat(False) if skipped is None else skipped
    rows = zip(columns.instance, scores, inputs, excluded, columns.cached_tokens, strict=False)  # `repeat` has no end
    return Choice(columns.instance[place], reason, tuple([new(CandidateScore, row) for row in rows]))


def least(fleet: FleetSnapshot, ranks: Sequence[Any], skipped: Sequence[bool] | None = None) -> int:
    """Position of the lowest rank that is not skipped; ties by ``tie_break``. Ranks are in fleet order."""
    if skipped is None:
        best = min(ranks)
        # Nearly always nobody is tied, and every policy asks: the rule is not even called.
        return ranks.index(best) if ranks.count(best) < 2 else least_of(fleet, ranks, range(len(ranks)))
    kept = [place for place, skips in enumerate(skipped) if not skips]
    return kept[least_of(fleet, [ranks[place] for place in kept], kept)]


def longest_cached(fleet: FleetSnapshot, columns: FleetColumns, then: Callable[[int], Any]) -> int:
    """Position of the longest cached prefix; of equals the lowest ``then`` of its position, then ``tie_break``."""
    cached = columns.cached_tokens
    most = max(cached)
    if cached.count(most) < 2:
        return cached.index(most)
    tied = [place for place, each in enumerate(cached) if each == most]
    return tied[least_of(fleet, [then(place) for place in tied], tied)]


def least_of(fleet: FleetSnapshot, ranks: Sequence[Any], places: Sequence[int]) -> int:
    """Index of the lowest rank among those of the candidates at ``places``; ties by ``tie_break``."""
    best = min(ranks)
    first = ranks.index(best)
    if ranks.count(best) < 2:  # skip the rule when there is no tie
        return first
    tied = [at for at, rank in enumerate(ranks) if rank == best]
    # One NaN in all places counts as equal to itself and is not: `refuse_nan` names it.
    return min(tied, key=lambda at: tie_break(fleet, places[at])) if tied else first


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


def _first_of_tied(fleet: FleetSnapshot, first: int, tied: list[int]) -> int:
    if len(tied) < 2:  # skip the rule when there is no tie
        return first
    return min(tied, key=lambda position: tie_break(fleet, position))


def is_overloaded(place: int, columns: FleetColumns, factor: float, floor_tokens: int) -> bool:
    """True if queued prefill on a candidate exceeds ``factor`` x the fleet's mean and also ``floor_tokens``.

    The floor keeps a nearly idle fleet from treating its only busy instance as overloaded.
    """
    pending = columns.pending_prefill_tokens
    return pending[place] > floor_tokens and pending[place] > factor * (sum(pending) / len(pending))


def refuse_nan(policy: str, instance: str, score: float) -> None:
    """Refuse a choice by a score that is NaN, which is neither below nor above another; raises ValueError."""
    if isnan(score):
        raise ValueError(f"policy {policy!r} chose {instance!r}, whose score is NaN")


def require(condition: bool, message: str) -> None:
    """Validate a policy parameter.

    Raises:
        ValueError: with ``message``, if ``condition`` is false.
    """
    if not condition:
        raise ValueError(message)
