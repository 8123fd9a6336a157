"""Warm, this project's policy: the instance with the lowest total cost in seconds over all requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from policies.costs.formulas import PrefillModel
from policies.costs.order import SLOWDOWN, due_s, overtaken_share
from policies.costs.slowness import ALL_ALIKE, Slownesses
from policies.pool import POOL_SHARE, all_tokens_over, tokens_over
from policies.routing.base import ColumnPolicy, Pick, least, refuse_nan, require, tie_break
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import CandidateScore, Choice, InstanceView, Reason, RequestView

Terms = tuple[float, float, float, float, float, float]
"""Queue, crowd, room, own, others and answer of one candidate, in seconds; their sum is its score."""


@dataclass(frozen=True, slots=True)
class Warm(ColumnPolicy):
    """``score = queue + crowd + room + own + others + answer``, all in seconds; lowest wins.

    With ``T(new, context)`` the learned time of a prefill (`policies.costs.formulas.PrefillModel`), ``r`` the requests
    in flight on the instance, and ``q`` of them still in prefill:

    - ``queue = (q - 1/2) x t``: the prefill queued there, ``t`` being ``T`` of a mean queued prefill less its fixed
      part (short prefills share a step). Where the engine orders prefills (`policies.costs.order`, by ``slowdown``),
      less ``overtakes`` times the share of those that this one overtakes: later ones may overtake this one too.
    - ``crowd = queue_crowd x r x queue``: extra weight of a queue on an instance with many requests.
    - ``room = hold_s x over / pool``: ``over`` is the number of tokens by which the prompts in flight and this one
      exceed ``pool_share`` of the KV pool (`policies.pool`). One pool's worth of tokens is freed in the time a request
      holds its KV, so this is the wait for blocks.
    - ``own = T(prompt - cached, cached)``: this prefill, attention over the cached prefix included.
    - ``others = others_weight x r x (own + alone) + hold_s x min(over, prompt) / pool x w``: the streams there stall
      while this prefill is computed, for ``alone = step_s`` longer if no prefill is queued whose steps it can share;
      and ``w`` requests wait for the room it takes: all ``r`` if no instance has room, since some request then always
      waits, else the ``q`` that wait now. Where an admission rule holds requests, also ``others_weight x (held x own +
      evicted)``: ``held`` requests per candidate wait for what candidates compute, and ``evicted`` is the time to
      compute contexts again that this prompt evicts, times the share of sessions that return.
    - ``answer``: nothing unless instances surely differ in speed (`policies.costs.slowness`). Then each has a slowness,
      which multiplies the times of prefills and steps there, and ``answer = answer_s x slowness``: an answer takes
      longer on a slow instance, too.

    Sessions stay because any other instance costs ``own + others`` for the whole history; a session moves only if that
    saves more. Nothing is pinned: a prefix counts by the time it saves. Ties go by ``tie_break``.

    Sources: pending + new as the measure is LPWL's (agentic-kvc reports), the quadratic load SMetric's (arXiv
    2607.08565), queue and batch as factors of each other LMetric's (arXiv 2603.15202); seconds throughout, the sum in
    place of the product, the shared steps and the room are ours; ``step_s`` is the difference between a step with a
    short prefill and one without, with about 20 streams (vLLM 0.20.2 on an H200: 48 ms and half a millisecond for each
    stream, against 9 to 22 ms: configs/hardware/h200.yaml). With ``learned_step`` the difference that this fleet's
    streams show replaces it where that is surely less than half of it (`policies.costs.short_step`). 0 for
    ``others_weight``, ``queue_crowd``, ``step_s`` and ``hold_s``, 1 for ``pool_share`` and false for ``learned``
    (published constants only) and ``learned_slowness`` disable one term each. ``answer_s``: to decode an answer that
    nothing stalls.
    Complexity: O(n).
    """

    others_weight: float = 1.0
    queue_crowd: float = 0.25
    step_s: float = 0.04
    hold_s: float = 30.0
    pool_share: float = POOL_SHARE
    learned: bool = True
    slowdown: float = SLOWDOWN
    overtakes: float = 0.5
    learned_step: bool = True
    answer_s: float = 3.0
    learned_slowness: bool = True
    name: ClassVar[str] = "warm"

    def __post_init__(self) -> None:
        require(self.others_weight >= 0, "warm: others_weight must not be negative")
        require(self.queue_crowd >= 0, "warm: queue_crowd must not be negative")
        require(self.step_s >= 0, "warm: step_s must not be negative")
        require(self.hold_s >= 0, "warm: hold_s must not be negative")
        require(0 < self.pool_share <= 1, "warm: pool_share must be above 0 and at most 1")
        require(self.slowdown >= 0, "warm: slowdown must not be negative")
        require(0 <= self.overtakes <= 1, "warm: overtakes must be within 0..1")
        require(self.answer_s >= 0, "warm: answer_s must not be negative")

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        return [total_s(terms) for terms in self._all_terms(request, fleet, columns)]

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        return Pick(least(fleet, scores), Reason.LOWEST_SCORE)

    def quick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Pick:
        """The same choice as that of ``choose``; only candidates that may be the cheapest are priced."""
        prices = self.prices(request, fleet, columns)
        place = prices.cheapest(prices.bounds())
        return Pick(place, Reason.LOWEST_SCORE)

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        # Not the base class's: score and inputs are the same terms, which are computed once.
        columns = FleetColumns.of(fleet.instances)
        scores = self._scored(columns, self._all_terms(request, fleet, columns), fleet)
        place = least(fleet, [score[1] for score in scores])
        return Choice(columns.instance[place], Reason.LOWEST_SCORE, tuple(scores))

    def prices(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Prices:
        """Scores of single candidates."""
        return Prices(self, request, fleet, columns)

    def waits_s(
        self, queue_s: float, view: InstanceView, own_s: float, fleet: FleetSnapshot, has_priority: bool
    ) -> float:
        """Seconds of a queue that a prefill of ``own_s`` seconds waits for where the engine orders them.

        Both as if all instances were equally fast: due times are made of that.

        Other replicas' prefills are part of the queue; they count as overtaken in the proportion of this one's.
        """
        costs = fleet.costs
        if not self.slowdown or costs is None:
            return queue_s
        due = due_s(costs.now_s, own_s, self.slowdown, has_priority)
        return queue_s * (1 - self.overtakes * overtaken_share(view.queue, due))

    def short_step_s(self, fleet: FleetSnapshot) -> float:
        """Seconds that a step with a short prefill takes longer: ``step_s`` or, if surely under half, what was learned.

        So where the constant fits roughly, what is learned from few answers changes no decision.
        """
        costs = fleet.costs
        if costs is None or not (self.learned and self.learned_step):
            return self.step_s
        return costs.short_step.instead_of(self.step_s)

    def slowness(self, fleet: FleetSnapshot) -> Slownesses:
        """Factor of the times of prefills on each instance; empty if all count as equal."""
        costs = fleet.costs
        return costs.slowness if costs is not None and self.learned and self.learned_slowness else ALL_ALIKE

    def _scored(self, columns: FleetColumns, terms: Sequence[Terms], fleet: FleetSnapshot) -> list[CandidateScore]:
        slowness, held, evicted_s = self.slowness(fleet), fleet.held, fleet.evicted_s
        new = tuple.__new__
        scores: list[CandidateScore] = [
            new(
                CandidateScore,
                (
                    instance,
                    queue_s + crowd_s + room_s + own_s + others_s + answer_s,
                    {
                        "queue_s": queue_s,
                        "crowd_s": crowd_s,
                        "room_s": room_s,
                        "own_s": own_s,
                        "others_s": others_s,
                        "cached_tokens": cached,
                    },
                    False,
                    None,
                ),
            )
            for instance, cached, (queue_s, crowd_s, room_s, own_s, others_s, answer_s) in zip(
                columns.instance, columns.cached_tokens, terms, strict=True
            )
        ]
        if slowness:
            for place, (score, each) in enumerate(zip(scores, terms, strict=True)):
                more = {"answer_s": each[-1], "slowness": slowness.get(score.instance, 1.0)}
                scores[place] = score._replace(inputs={**score.inputs, **more})
        if held or evicted_s:
            for place, score in enumerate(scores):
                more = {"held": held, "evicted_s": evicted_s.get(score.instance, 0.0)}
                scores[place] = score._replace(inputs={**score.inputs, **more})
        return scores

    def _overs(self, request: RequestView, columns: FleetColumns) -> list[float]:
        pools, used, promised = columns.kv_capacity_tokens, columns.kv_used_tokens, columns.kv_promised_tokens
        return all_tokens_over(pools, used, promised, request.prompt_tokens, self.pool_share)

    def _model(self, fleet: FleetSnapshot) -> PrefillModel:
        return fleet.costs.prefill if fleet.costs is not None and self.learned else PrefillModel()

    def _all_terms(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> list[Terms]:
        """Terms of every candidate. A loop with few calls: it runs for every request."""
        overs = self._overs(request, columns)
        nobody_has_room = min(overs) > 0
        model, prompt = self._model(fleet), request.prompt_tokens
        crowd, weight, step_s, hold_s = self.queue_crowd, self.others_weight, self.short_step_s(fleet), self.hold_s
        slowness, alone_s, answer_s = self.slowness(fleet), step_s, 0.0
        held, evicted_s = fleet.held, fleet.evicted_s
        owns: dict[int, float] = {}
        """By cached tokens, which are mostly equal across instances."""
        terms = []
        for view, cached, requests, prefilling, queued, pool, over in zip(
            fleet.instances,
            columns.cached_tokens,
            columns.requests,
            columns.prefilling,
            queues_s(columns, model),
            columns.kv_capacity_tokens,
            overs,
            strict=True,
        ):
            own_s = owns.get(cached)
            if own_s is None:
                own_s = owns[cached] = model.seconds(prompt - cached, cached)
            queue_s = self.waits_s(queued, view, own_s, fleet, request.has_priority) if view.queue else queued
            if slowness:
                slow = slowness.get(view[0], 1.0)
                own_s, queue_s, alone_s, answer_s = slow * own_s, slow * queue_s, slow * step_s, slow * self.answer_s
            others_s = weight * requests * (own_s if prefilling else own_s + alone_s)
            room_s = 0.0
            if over > 0:
                room_s = hold_s * over / pool
                others_s += hold_s * min(over, prompt) / pool * (requests if nobody_has_room else prefilling)
            if held or evicted_s:
                others_s += weight * (held * own_s + evicted_s.get(view[0], 0.0))
            terms.append((queue_s, crowd * requests * queue_s, room_s, own_s, others_s, answer_s))
        return terms


class Prices:
    """Scores of single candidates for one request: each has the value that it has among all."""

    __slots__ = (
        "_columns",
        "_fleet",
        "_has_priority",
        "_nobody_has_room",
        "_owns",
        "_policy",
        "_prompt",
        "_step_s",
        "model",
        "slowness",
    )

    def __init__(self, policy: Warm, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> None:
        self._policy = policy
        self._prompt = request.prompt_tokens
        self._has_priority = request.has_priority
        self._fleet = fleet
        self._columns = columns
        self.model = policy._model(fleet)
        self.slowness = policy.slowness(fleet)
        self._step_s = policy.short_step_s(fleet)
        self._owns: dict[int, float] = {}
        """Seconds of this prefill by the tokens cached there, which are mostly equal across instances."""
        self._nobody_has_room: bool | None = None

    def of(self, place: int) -> float:
        """Score of the candidate at a place, seconds."""
        return total_s(self.terms(place))

    def first_s(self, place: int) -> float:
        """Seconds to the first token at a place: its queue, and this prefill."""
        view = self._fleet.instances[place]
        return self.queue_s(view, self.alike_s(view)) + self.own_s(view)

    def queue_s(self, view: InstanceView, own_s: float) -> float:
        """Seconds that a prefill waits for others on an instance; ``own_s``: its own if all were equally fast."""
        queue_s = queued_s(view.pending_prefill_tokens, view.prefilling, self.model)
        if view.queue:
            queue_s = self._policy.waits_s(queue_s, view, own_s, self._fleet, self._has_priority)
        return self.slowness.get(view.instance, 1.0) * queue_s if self.slowness else queue_s

    def terms(self, place: int) -> Terms:
        """Queue, crowd, room, own, others and answer of the candidate at a place."""
        policy, view, prompt = self._policy, self._fleet.instances[place], self._prompt
        requests, prefilling, pool = view.requests, view.prefilling, view.kv_capacity_tokens
        own_s = self.own_s(view)
        queue_s = self.queue_s(view, self.alike_s(view))
        others_s = policy.others_weight * requests * (own_s if prefilling else own_s + self.step_s(view))
        over, room_s = tokens_over(view, prompt, policy.pool_share), 0.0
        if over > 0:
            room_s = policy.hold_s * over / pool
            waiting = requests if self._full() else prefilling
            others_s += policy.hold_s * min(over, prompt) / pool * waiting
        others_s += policy.others_weight * (self._fleet.held * own_s + self._fleet.evicted_s.get(view.instance, 0.0))
        return queue_s, policy.queue_crowd * requests * queue_s, room_s, own_s, others_s, self.answer_s(view.instance)

    def own_s(self, view: InstanceView) -> float:
        """Seconds of this prefill on an instance."""
        own_s = self.alike_s(view)
        return self.slowness.get(view.instance, 1.0) * own_s if self.slowness else own_s

    def alike_s(self, view: InstanceView) -> float:
        """Seconds of this prefill on an instance if all were equally fast."""
        return self._own_s(view.cached_tokens)

    def step_s(self, view: InstanceView) -> float:
        """Seconds that a step with a short prefill takes longer on an instance."""
        return self.slowness.get(view.instance, 1.0) * self._step_s if self.slowness else self._step_s

    def answer_s(self, instance: str) -> float:
        """Seconds of the answer on an instance; 0 if all count as equal."""
        return self.slowness.get(instance, 1.0) * self._policy.answer_s if self.slowness else 0.0

    def _own_s(self, cached: int) -> float:
        """Seconds of this prefill where so many of its tokens are cached and the slowness is 1."""
        own_s = self._owns.get(cached)
        if own_s is None:
            own_s = self._owns[cached] = self.model.seconds(self._prompt - cached, cached)
        return own_s

    def bounds(self) -> list[float]:
        """At most the score of every candidate: rounding is monotonic, and the terms left out are not negative."""
        columns, weight = self._columns, self._policy.others_weight
        owns = {cached: self._own_s(cached) for cached in set(columns.cached_tokens)}
        if self.slowness:
            return [
                (own_s := self.slowness.get(name, 1.0) * owns[cached]) + weight * requests * own_s + self.answer_s(name)
                for name, cached, requests in zip(
                    columns.instance, columns.cached_tokens, columns.requests, strict=True
                )
            ]
        return [
            (own_s := owns[cached]) + weight * requests * own_s
            for cached, requests in zip(columns.cached_tokens, columns.requests, strict=True)
        ]

    def cheapest(self, bounds: Sequence[float], more_s: Mapping[int, float] | None = None) -> int:
        """Place of the lowest score; ties by ``tie_break``. Prices those that may have it, by their ``bounds``.

        ``more_s``: seconds that the scores at some places are higher, and their bounds too.
        """
        first = bounds.index(min(bounds))
        least_s, best = self._with(first, more_s), [first]
        for place, bound_s in enumerate(bounds):
            if bound_s <= least_s and place != first:
                score_s = self._with(place, more_s)
                if score_s < least_s:
                    least_s, best = score_s, [place]
                elif score_s == least_s:
                    best.append(place)
        refuse_nan(self._policy.name, self._columns.instance[best[0]], least_s)
        return best[0] if len(best) == 1 else min(best, key=partial(tie_break, self._fleet))

    def _with(self, place: int, more_s: Mapping[int, float] | None) -> float:
        return self.of(place) + more_s[place] if more_s and place in more_s else self.of(place)

    def _full(self) -> bool:
        """True if no candidate has room."""
        if self._nobody_has_room is None:
            policy, columns = self._policy, self._columns
            pools, used, promised = columns.kv_capacity_tokens, columns.kv_used_tokens, columns.kv_promised_tokens
            overs = all_tokens_over(pools, used, promised, self._prompt, policy.pool_share)
            self._nobody_has_room = min(overs) > 0
        return self._nobody_has_room


def total_s(terms: Terms) -> float:
    """The score: added from left to right, since ``sum`` rounds otherwise from Python 3.12 on."""
    queue_s, crowd_s, room_s, own_s, others_s, answer_s = terms
    return queue_s + crowd_s + room_s + own_s + others_s + answer_s


def queued_s(pending_tokens: int, prefilling: int, model: PrefillModel) -> float:
    """Seconds to finish the queued prefills of one candidate, the first of them half done."""
    if not prefilling or not pending_tokens:
        return 0.0
    new = pending_tokens / prefilling
    linear, squared = model.s_per_token, model.s_per_token_squared
    return (prefilling - 0.5) * model.factor(new) * (linear * new + squared * new * (new / 2))


def queues_s(columns: FleetColumns, model: PrefillModel) -> list[float]:
    """``queued_s`` of every candidate, as if all were equally fast."""
    linear, squared = model.s_per_token, model.s_per_token_squared
    news = [
        pending / prefilling if prefilling else 0.0
        for pending, prefilling in zip(columns.pending_prefill_tokens, columns.prefilling, strict=True)
    ]
    return [
        (prefilling - 0.5) * learned * (linear * new + squared * new * (new / 2)) if new else 0.0
        for new, prefilling, learned in zip(news, columns.prefilling, model.factors(news), strict=True)
    ]
