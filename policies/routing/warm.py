"""Warm, this project's policy: the instance with the lowest total cost in seconds over all requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.costs.formulas import PrefillModel
from policies.pool import POOL_SHARE, all_tokens_over
from policies.routing.base import ColumnPolicy, Pick, least, least_of, require
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import CandidateScore, Choice, Reason, RequestView


@dataclass(frozen=True, slots=True)
class Warm(ColumnPolicy):
    """``score = queue + crowd + room + own + others``, all in seconds; lowest wins.

    With ``T(new, context)`` the learned time of a prefill (`policies.costs.formulas.PrefillModel`), ``r`` the requests
    in flight on the instance, and ``q`` of them still in prefill:

    - ``queue = (q - 1/2) x t``: the prefill queued there, ``t`` being ``T`` of a mean queued prefill less its fixed
      part (short prefills share a step).
    - ``crowd = queue_crowd x r x queue``: extra weight of a queue on an instance with many requests.
    - ``room = hold_s x over / pool``: ``over`` is the number of tokens by which the prompts in flight and this one
      exceed ``pool_share`` of the KV pool (`policies.pool`). One pool's worth of tokens is freed in the time a request
      holds its KV, so this is the wait for blocks.
    - ``own = T(prompt - cached, cached)``: this prefill, attention over the cached prefix included.
    - ``others = others_weight x r x (own + alone) + hold_s x min(over, prompt) / pool x w``: the streams there stall
      while this prefill is computed, for ``alone = step_s`` longer if no prefill is queued whose steps it can share;
      and ``w`` requests wait for the room it takes: all ``r`` if no instance has room, since some request then always
      waits, else the ``q`` that wait now.

    Sessions stay because any other instance costs ``own + others`` for the whole history; a session moves only if that
    saves more. Nothing is pinned: a prefix counts by the time it saves. Ties go by ``tie_break``.

    Sources: pending + new as the measure is LPWL's (agentic-kvc reports), the quadratic load SMetric's (arXiv
    2607.08565), queue and batch as factors of each other LMetric's (arXiv 2603.15202); seconds throughout, the sum in
    place of the product, the shared steps and the room are ours; ``step_s`` is the difference between a step with a
    short prefill and one without, with about 20 streams (vLLM 0.20.2 on an H200: 48 ms and half a millisecond for each
    stream, against 9 to 22 ms: configs/hardware/h200.yaml). 0 for ``others_weight``, ``queue_crowd``, ``step_s`` and
    ``hold_s``, 1 for ``pool_share`` and false for ``learned`` (published constants only) disable one term each.
    Complexity: O(n).
    """

    others_weight: float = 1.0
    queue_crowd: float = 0.25
    step_s: float = 0.04
    hold_s: float = 30.0
    pool_share: float = POOL_SHARE
    learned: bool = True
    name: ClassVar[str] = "warm"

    def __post_init__(self) -> None:
        require(self.others_weight >= 0, "warm: others_weight must not be negative")
        require(self.queue_crowd >= 0, "warm: queue_crowd must not be negative")
        require(self.step_s >= 0, "warm: step_s must not be negative")
        require(self.hold_s >= 0, "warm: hold_s must not be negative")
        require(0 < self.pool_share <= 1, "warm: pool_share must be above 0 and at most 1")

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        overs = self._overs(request, columns)
        return _totals(self._terms(request, fleet, columns, overs, nobody_has_room=min(overs) > 0))

    def pick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, scores: Sequence[float]) -> Pick:
        return Pick(least(fleet, scores), Reason.LOWEST_SCORE)

    def quick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Pick:
        """The same choice as that of ``choose``; only candidates that may be the cheapest are priced."""
        model, prompt = self._model(fleet), request.prompt_tokens
        owns = {cached: model.seconds(prompt - cached, cached) for cached in set(columns.cached_tokens)}
        weight = self.others_weight
        # Each at most the score: rounding is monotonic, and the terms left out are not negative.
        bounds = [
            (own_s := owns[cached]) + weight * requests * own_s
            for cached, requests in zip(columns.cached_tokens, columns.requests, strict=True)
        ]
        cheapest = bounds.index(min(bounds))
        most_s = self.prices(request, fleet, columns, (cheapest,))[0]
        places = tuple([place for place, bound_s in enumerate(bounds) if bound_s <= most_s])
        if len(places) == 1:
            return Pick(cheapest, Reason.LOWEST_SCORE)
        scores = self.prices(request, fleet, columns, places)
        return Pick(places[least_of(fleet, scores, places)], Reason.LOWEST_SCORE)

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        # Not the base class's: score and inputs are the same terms, which are computed once.
        columns = FleetColumns.of(fleet.instances)
        overs = self._overs(request, columns)
        terms = self._terms(request, fleet, columns, overs, nobody_has_room=min(overs) > 0)
        scores, new = _totals(terms), tuple.__new__
        made = [
            new(
                CandidateScore,
                (
                    instance,
                    score,
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
            for instance, score, cached, (queue_s, crowd_s, room_s, own_s, others_s) in zip(
                columns.instance, scores, columns.cached_tokens, terms, strict=True
            )
        ]
        return Choice(columns.instance[least(fleet, scores)], Reason.LOWEST_SCORE, tuple(made))

    def prices(
        self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns, places: tuple[int, ...]
    ) -> Sequence[float]:
        """Scores of the candidates at these places only."""
        some = FleetColumns.of([fleet.instances[place] for place in places])
        overs = self._overs(request, some)
        nobody_has_room = min(overs) > 0 and min(self._overs(request, columns)) > 0
        return _totals(self._terms(request, fleet, some, overs, nobody_has_room=nobody_has_room))

    def _overs(self, request: RequestView, columns: FleetColumns) -> list[float]:
        pools, used, promised = columns.kv_capacity_tokens, columns.kv_used_tokens, columns.kv_promised_tokens
        return all_tokens_over(pools, used, promised, request.prompt_tokens, self.pool_share)

    def _model(self, fleet: FleetSnapshot) -> PrefillModel:
        return fleet.costs.prefill if fleet.costs is not None and self.learned else PrefillModel()

    def _terms(
        self,
        request: RequestView,
        fleet: FleetSnapshot,
        columns: FleetColumns,
        overs: Sequence[float],
        *,
        nobody_has_room: bool,
    ) -> list[tuple[float, float, float, float, float]]:
        """Queue, crowd, room, own and others of every candidate. A loop with few calls: it runs for every request."""
        model, prompt = self._model(fleet), request.prompt_tokens
        crowd, weight, step_s, hold_s = self.queue_crowd, self.others_weight, self.step_s, self.hold_s
        owns: dict[int, float] = {}
        """By cached tokens, which are mostly equal across instances."""
        terms = []
        for cached, requests, prefilling, queue_s, pool, over in zip(
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
            others_s = weight * requests * (own_s if prefilling else own_s + step_s)
            room_s = 0.0
            if over > 0:
                room_s = hold_s * over / pool
                others_s += hold_s * min(over, prompt) / pool * (requests if nobody_has_room else prefilling)
            terms.append((queue_s, crowd * requests * queue_s, room_s, own_s, others_s))
        return terms


def _totals(terms: Iterable[tuple[float, float, float, float, float]]) -> list[float]:
    return [queue_s + crowd_s + room_s + own_s + others_s for queue_s, crowd_s, room_s, own_s, others_s in terms]


def queues_s(columns: FleetColumns, model: PrefillModel) -> list[float]:
    """Seconds to finish the queued prefills of every candidate, the first of them half done."""
    linear, squared = model.s_per_token, model.s_per_token_squared
    news = [
        pending / prefilling if prefilling else 0.0
        for pending, prefilling in zip(columns.pending_prefill_tokens, columns.prefilling, strict=True)
    ]
    return [
        (prefilling - 0.5) * learned * (linear * new + squared * new * (new / 2)) if new else 0.0
        for new, prefilling, learned in zip(news, columns.prefilling, model.factors(news), strict=True)
    ]
