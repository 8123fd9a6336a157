"""Joint, ``warm`` with elastic prefill: where a request decodes and where it is prefilled, decided together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from policies.routing.base import Pick, least, require
from policies.routing.hand_offs import PossibleHandOffs, PricedHandOff
from policies.routing.warm import Prices, Terms, Warm, total_s
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import CandidateScore, Choice, InstanceView, OffloadPlan, OffloadReason, Reason, RequestView

_BELOW = OffloadPlan(None, OffloadReason.BELOW_THRESHOLD)
_SHAPE = OffloadPlan(None, OffloadReason.REQUEST_SHAPE)


@dataclass(frozen=True, slots=True)
class Joint(Warm):
    """The cheapest of all placements, in seconds: on one instance as ``warm`` scores it, or prefilled elsewhere.

    A few instances are *prefill specialists*, whose number follows the share of long prefills
    (`policies.offload.specialists`); those that only prefill count as specialists too. They pay without hand-offs too,
    as few streams of others stall there.

    - On one instance: the score of ``warm``, and ``specialist_s`` more on a specialist, so that others decode. Then the
      others' pools hold more, so contexts are placed evenly: each score has ``eviction_weight x return_share x
      (T(prompt) - T(0)) x (contexts + prompt) / pool`` more: the time to compute the context again, times the share of
      contexts that are needed again and that of the pool that those of the last 15 minutes would fill with it
      (`policies.offload.recent_contexts`).
    - A request with ``heavy_tokens`` new ones on the best of these may be prefilled on a specialist P that can send KV,
      and decoded on the D with room and the lowest ``queue + stream_s x requests + eviction``: its first token comes
      after ``first = max(queue_P + T_P + X, queue_D)``: ``T_P`` the prefill on P, ``X`` the transfer of what D lacks.
      The score is ``first + streams_P x T_P + queue_cost x queue_P + stream_s x requests_D + eviction_D + failure_rate
      x first - saved``: the streams that decode on P stall, those on D do not, and a prompt behind others makes the
      next ones wait too, as there are few specialists. Where the best single instance is a specialist, ``saved =
      answer_s x u / (1 - u)``: for the share ``u`` of its time that long prefills take, the answer would stall there.
      A placement on a specialist, handed off or not, is refused if the request waits more than ``max_own_loss`` longer
      than on the best instance that is none, as a share of the time there.

    While there is no specialist it chooses what ``warm`` chooses. It plans for every request, so the offload planner is
    not asked. Source: the separation of long prefills from decoding is that of agentic-kvc's elastic arm; the moving
    number of specialists and the common score are ours.
    Parameters and defaults: those of ``warm``, and ``heavy_tokens`` 20,000; ``specialist_s`` 1; ``max_own_loss`` 1;
    ``stream_s`` 0.02, what one more stream costs the others on D; ``queue_cost`` 2; ``eviction_weight`` 1.
    Complexity: O(n + k) for k specialists, O(n log n) for a long prefill.
    """

    heavy_tokens: int = 20_000
    specialist_s: float = 1.0
    max_own_loss: float = 1.0
    stream_s: float = 0.02
    queue_cost: float = 2.0
    eviction_weight: float = 1.0
    name: ClassVar[str] = "joint"
    plans: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Warm.__post_init__(self)
        require(self.heavy_tokens > 0, "joint: heavy_tokens must be positive")
        require(self.specialist_s >= 0, "joint: specialist_s must not be negative")
        require(self.max_own_loss >= 0, "joint: max_own_loss must not be negative")
        require(self.stream_s >= 0, "joint: stream_s must not be negative")
        require(self.queue_cost >= 0, "joint: queue_cost must not be negative")
        require(self.eviction_weight >= 0, "joint: eviction_weight must not be negative")

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        return [score.score for score in self.choose(request, fleet).scores]

    def quick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Pick:
        """The same choice as that of ``choose``; only placements that may be the cheapest are priced."""
        prices = self.prices(request, fleet, columns)
        specialists = _places_of(fleet.specialists, columns)
        more_s = self._evictions_s(request, fleet, columns) if specialists else {}
        for place in specialists.values():
            more_s[place] = more_s.get(place, 0.0) + self.specialist_s
        bounds = [bound_s + more_s.get(place, 0.0) for place, bound_s in enumerate(prices.bounds())]
        place = prices.cheapest(bounds, more_s)
        alone = Pick(place, Reason.LOWEST_SCORE)
        if request.prompt_tokens - columns.cached_tokens[place] < self.heavy_tokens:
            return alone
        first_s = prices.first_s(place)
        if place in specialists.values() and len(specialists) < len(bounds):
            place, first_s = self._quick_in_time(prices, bounds, specialists.values(), place, more_s)
            alone = Pick(place, Reason.LOWEST_SCORE)
        if not request.may_offload:
            return alone
        score_s = prices.of(place) + more_s.get(place, 0.0)
        job = PossibleHandOffs(self, request, fleet, columns, specialists, prices, place, first_s, more_s)
        prefills = [view for view in job.prefills() if job.may_be_below(score_s, view)]
        if not prefills:
            return alone
        found = job.handed_off(prefills)
        if isinstance(found, OffloadReason) or found.score_s >= score_s:
            return alone
        return Pick(found.decode, Reason.LOWEST_SCORE)

    def _quick_in_time(
        self, prices: Prices, bounds: Sequence[float], places: Collection[int], place: int, more_s: Mapping[int, float]
    ) -> tuple[int, float]:
        """Place and wait elsewhere, as `_in_time` gives them, of a long prompt at the specialist ``place``."""
        others = [inf if at in places else bound_s for at, bound_s in enumerate(bounds)]
        at_home_s = prices.first_s(prices.cheapest(others, more_s))
        longest_s = (1 + self.max_own_loss) * at_home_s
        if prices.first_s(place) <= longest_s:
            return place, at_home_s
        for at in places:
            if prices.first_s(at) <= longest_s:
                others[at] = bounds[at]
        return prices.cheapest(others, more_s), at_home_s

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        columns = FleetColumns.of(fleet.instances)
        names, terms = columns.instance, self._all_terms(request, fleet, columns)
        scores = self._scored(columns, terms, fleet)
        specialists = _places_of(fleet.specialists, columns)
        more_s = self._evictions_s(request, fleet, columns) if specialists else {}
        for at, eviction_s in more_s.items():
            name, score_s, inputs, _, _ = scores[at]
            scores[at] = CandidateScore(name, score_s + eviction_s, {**inputs, "eviction_s": eviction_s})
        for at in specialists.values():
            name, score_s, inputs, _, _ = scores[at]
            # Eviction and fee are added first, as in ``quick``, for the same rounding.
            score_s = total_s(terms[at]) + (more_s.get(at, 0.0) + self.specialist_s)
            scores[at] = CandidateScore(name, score_s, {**inputs, "specialist_s": self.specialist_s})
        place = least(fleet, [score[1] for score in scores])
        new_tokens, first_s = request.prompt_tokens - columns.cached_tokens[place], _first_s(terms[place])
        heavy, plan = new_tokens >= self.heavy_tokens, _BELOW if request.may_offload else _SHAPE
        if heavy and place in specialists.values() and len(specialists) < len(names):
            place, first_s, late = self._in_time(fleet, scores, terms, specialists)
            scores = [score._replace(skipped=skips) for score, skips in zip(scores, late, strict=True)]
        if heavy and request.may_offload:
            alone_s = scores[place].score
            inputs = {"new_tokens": float(new_tokens), "colocated_s": alone_s, "colocated_first_s": first_s}
            plan, found = self._planned(request, fleet, columns, specialists, place, inputs, more_s)
            if found is not None:
                place, there = found.decode, scores[found.decode]
                inputs = {**there.inputs, "colocated_s": there.score, "handed_off_s": found.score_s}
                scores[place] = there._replace(score=found.score_s, inputs=inputs)
        return Choice(names[place], Reason.LOWEST_SCORE, tuple(scores), plan)

    def _evictions_s(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> dict[int, float]:
        """Seconds that the recent contexts add to each place whose pool is known."""
        (tokens, return_share), prompt = fleet.contexts, request.prompt_tokens
        model, slowness = self._model(fleet), self.slowness(fleet)
        weight = self.eviction_weight * return_share * max(0.0, model.seconds(prompt, 0) - model.seconds(0, 0))
        return {
            at: weight * slowness.get(name, 1.0) * (tokens.get(name, 0) + prompt) / pool
            for at, (name, pool) in enumerate(zip(columns.instance, columns.kv_capacity_tokens, strict=True))
            if pool
        }

    def _in_time(
        self,
        fleet: FleetSnapshot,
        scores: Sequence[CandidateScore],
        terms: Sequence[Terms],
        specialists: Mapping[str, int],
    ) -> tuple[int, float, list[bool]]:
        """The place of a long prompt less the specialists where it waits too long, the wait elsewhere, and those.

        A specialist has few streams to stall, so its score stays low however long prompts queue there.
        """
        ranks, places = [score[1] for score in scores], frozenset(specialists.values())
        at_home_s = _first_s(terms[least(fleet, ranks, [at in places for at in range(len(ranks))])])
        longest_s = (1 + self.max_own_loss) * at_home_s
        late = [at in places and _first_s(each) > longest_s for at, each in enumerate(terms)]
        return least(fleet, ranks, late), at_home_s, late

    def _planned(
        self,
        request: RequestView,
        fleet: FleetSnapshot,
        columns: FleetColumns,
        specialists: Mapping[str, int],
        alone: int,
        inputs: dict[str, float],
        evictions_s: Mapping[int, float],
    ) -> tuple[OffloadPlan, PricedHandOff | None]:
        """The plan, and the hand-off if it is chosen: if it costs less than ``colocated_s`` of the inputs."""
        prices = self.prices(request, fleet, columns)
        first_s = inputs["colocated_first_s"]
        job = PossibleHandOffs(self, request, fleet, columns, specialists, prices, alone, first_s, evictions_s)
        prefills = job.prefills()
        found = job.handed_off(prefills) if prefills else OffloadReason.NO_SPECIALIST
        if isinstance(found, OffloadReason):
            return OffloadPlan(None, found, inputs), None
        inputs |= found.inputs()
        if found.score_s >= inputs["colocated_s"]:
            return OffloadPlan(None, OffloadReason.DOES_NOT_PAY, inputs), None
        return OffloadPlan(found.prefill, OffloadReason.CHOSEN, inputs), found

    def has_room(self, view: InstanceView, prompt_tokens: int, answer_tokens: int = 0) -> bool:
        """True if the pool, of known size, has room for the prompt by the rule of ``warm``, and for an answer."""
        pool = view.kv_capacity_tokens
        taken = view.kv_used_tokens + view.kv_promised_tokens + prompt_tokens
        return pool > 0 and taken <= self.pool_share * pool and taken + answer_tokens <= pool


def _first_s(terms: Terms) -> float:
    """Seconds to the first token on one instance, by its queue and this prefill."""
    return terms[0] + terms[3]


def _places_of(names: Collection[str], columns: FleetColumns) -> dict[str, int]:
    """Places of the candidates of these names, by name, in the order of the fleet."""
    if not names:
        return {}
    wanted = frozenset(names)
    return {name: place for place, name in enumerate(columns.instance) if name in wanted}
