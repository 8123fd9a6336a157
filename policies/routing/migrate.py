"""Migrate, ``warm`` with live sessions: the KV of a session whose home is overloaded is pulled by another instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple

from policies.costs.formulas import Costs
from policies.costs.transfers import Transfers
from policies.offload.base import may_receive, sends_to
from policies.pool import tokens_over
from policies.routing.base import Pick, longest_cached, require
from policies.routing.warm import Prices, Terms, Warm, queues_s
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import Choice, InstanceView, OffloadPlan, OffloadReason, Reason, RequestView

_ROUNDING = 1e-9
"""Share of a sum above the error of its rounding."""


class _Move(NamedTuple):
    """A migration and what it costs, in seconds."""

    target: str
    inputs: dict[str, float]
    moved_s: float


@dataclass(frozen=True, slots=True)
class Migrate(Warm):
    """As ``warm``, but a session whose home is overloaded decodes elsewhere, with its prefix pulled from its home.

    *Home* is the candidate that holds the longest prefix of the prompt, if that is ``min_cached_tokens`` and
    ``affinity_gate`` of the prompt; of equals the session's own. The *load* of an instance is
    ``queue + room + stream_s x requests`` in seconds, with queue and room as in ``warm``.

    - Trigger: the home's load is above ``overload_s`` and above ``overload_factor`` x the mean load of the others.
    - Targets: instances with a load of at most ``target_share`` x the home's, whose KV pool, of known size, has room.
      The distance between both thresholds is the hysteresis: a target is not overloaded by what it receives, and a
      session returns only when the loads have changed places.
    - At most ``max_in_flight`` hand-offs are in flight in the fleet, since transfers slow each other.
    - The hand-off: home computes the new tokens after its cached prefix (P), the target pulls the blocks it lacks and
      decodes (D). ``first = max(queue_home + T_home + X, queue_D)`` is the wait for the first token, as in ``joint``: a
      pull does not overtake the prefills queued at home. ``moved = first + crowd_home + room_home + r_home x T_home +
      (step_s + stream_s) x r_D + failure_rate x first`` with ``r`` the requests in flight; the lowest wins. A target
      that holds part of the prefix pulls less.
    - Price: it moves only if ``moved`` is ``min_gain_s`` less than ``stay``, the lowest score of ``warm`` (at home, or
      computed again elsewhere) and ``stream_s`` for each request there. With ``priced`` false it moves whenever there
      is a target.

    The reason of a migration is ``session_migrated``; its plan has the figures. Requests without an overloaded home are
    placed by ``warm``, and the offload planner is asked. Source: the policy "v3" of the agentic-kvc reports, which
    moved sessions away from busy hosts; its conditions are not published, these are ours. Parameters and defaults:
    those of ``warm``, and ``overload_factor`` 2; ``overload_s`` 1; ``target_share`` 0.5; ``affinity_gate`` 0.5;
    ``min_cached_tokens`` 8,192; ``max_in_flight`` 4; ``stream_s`` 0.3: a step of an H200 takes 0.5 ms longer for
    another stream and 12 ns for each token of its context, which with 50k tokens and 300 steps delays every other
    stream there by 0.3 s; ``min_gain_s`` 0.25; ``priced`` true. Complexity: O(n).
    """

    overload_factor: float = 2.0
    overload_s: float = 1.0
    target_share: float = 0.5
    affinity_gate: float = 0.5
    min_cached_tokens: int = 8_192
    max_in_flight: int = 4
    stream_s: float = 0.3
    min_gain_s: float = 0.25
    priced: bool = True
    name: ClassVar[str] = "migrate"
    plans: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Warm.__post_init__(self)
        require(self.overload_factor >= 1, "migrate: overload_factor must be at least 1")
        require(self.overload_s >= 0, "migrate: overload_s must not be negative")
        require(0 < self.target_share < 1, "migrate: target_share must be between 0 and 1")
        require(0 <= self.affinity_gate <= 1, "migrate: affinity_gate must be between 0 and 1")
        require(self.min_cached_tokens > 0, "migrate: min_cached_tokens must be positive")
        require(self.max_in_flight > 0, "migrate: max_in_flight must be positive")
        require(self.stream_s >= 0, "migrate: stream_s must not be negative")
        require(self.min_gain_s >= 0, "migrate: min_gain_s must not be negative")

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        return [score.score for score in self.choose(request, fleet).scores]

    def quick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Pick:
        """The same choice as that of ``choose``; only what may be an overloaded home, or its target, is priced."""
        prices = self.prices(request, fleet, columns)
        place = prices.cheapest(prices.bounds())
        home = self._home(request, fleet, columns) if request.may_offload else None
        if home is not None:
            terms = prices.terms(home)
            load_s = self._load(terms[0], terms[2], columns.requests[home])
            if self._may_be_overloaded(load_s, home, fleet, columns, prices):
                queues = self._queues(fleet, columns, prices)
                loads = self._loads(queues, self._rooms(request, columns), columns.requests)
                if self._is_overloaded(home, loads):
                    stay_s = prices.of(place) + self.stream_s * columns.requests[place]
                    found = self._cheapest(request, fleet, home, loads, queues, terms)
                    if isinstance(found, _Move) and self._pays(found, stay_s):
                        return Pick(columns.instance.index(found.target), Reason.SESSION_MIGRATED)
        return Pick(place, Reason.LOWEST_SCORE)

    def _queues(self, fleet: FleetSnapshot, columns: FleetColumns, prices: Prices) -> list[float]:
        """The term ``queue`` of every candidate."""
        return [
            prices.queue_s(view, prices.alike_s(view)) if view.queue or prices.slowness else full_s
            for view, full_s in zip(fleet.instances, queues_s(columns, prices.model), strict=True)
        ]

    def _may_be_overloaded(
        self, load_s: float, home: int, fleet: FleetSnapshot, columns: FleetColumns, prices: Prices
    ) -> bool:
        """False if a home of this load is not overloaded even if the others' loads are the least that they can be.

        Their queues are at least half of the time of the tokens alone, less what this request may overtake where
        engines order prefills, and nothing need lack room.
        """
        if load_s <= self.overload_s:
            return False
        ordered = self.slowdown > 0 and any(view.queue for view in fleet.instances)
        least = 0.5 * (1 - self.overtakes) if ordered else 0.5
        requests, pending, prefilling = columns.requests, columns.pending_prefill_tokens, columns.prefilling
        queued = sum([tokens for tokens, each in zip(pending, prefilling, strict=True) if each])
        others_s = self.stream_s * (sum(requests) - requests[home])
        least *= min([1.0, *prices.slowness.values()])
        others_s += least * prices.model.least_s_per_token * (queued - (pending[home] if prefilling[home] else 0))
        others_s -= _ROUNDING * (others_s + load_s)  # the sums of the exact loads have another order
        return load_s * (len(requests) - 1) > self.overload_factor * others_s

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        choice = Warm.choose(self, request, fleet)
        if not request.may_offload:
            return choice
        columns = FleetColumns.of(fleet.instances)
        home = self._home(request, fleet, columns)
        if home is None:
            return choice
        queues = [score.inputs["queue_s"] for score in choice.scores]
        loads = self._loads(queues, [score.inputs["room_s"] for score in choice.scores], columns.requests)
        if not self._is_overloaded(home, loads):
            return choice
        place = columns.instance.index(choice.instance)
        stay_s = choice.scores[place].score + self.stream_s * fleet.instances[place].requests
        inputs = {
            "home_load_s": loads[home],
            "cached_tokens": float(fleet.instances[home].cached_tokens),
            "stay_s": stay_s,
        }
        inputs_home = choice.scores[home].inputs
        terms = inputs_home["queue_s"], inputs_home["crowd_s"], inputs_home["room_s"], inputs_home["own_s"], 0.0, 0.0
        found = self._cheapest(request, fleet, home, loads, queues, terms)
        if isinstance(found, OffloadReason):
            return choice._replace(plan=OffloadPlan(None, found, inputs))
        inputs |= found.inputs
        if not self._pays(found, stay_s):
            return choice._replace(plan=OffloadPlan(None, OffloadReason.DOES_NOT_PAY, inputs))
        plan = OffloadPlan(fleet.instances[home].instance, OffloadReason.CHOSEN, inputs)
        return Choice(found.target, Reason.SESSION_MIGRATED, choice.scores, plan)

    def _pays(self, move: _Move, stay_s: float) -> bool:
        return not self.priced or move.moved_s + self.min_gain_s <= stay_s

    def _load(self, queue_s: float, room_s: float, requests: int) -> float:
        """Load of one candidate in seconds."""
        return queue_s + room_s + self.stream_s * requests

    def _loads(self, queues: Sequence[float], rooms: Sequence[float], requests: Sequence[int]) -> list[float]:
        """Load of every candidate."""
        stream_s = self.stream_s
        return [
            queue_s + room_s + stream_s * each for queue_s, room_s, each in zip(queues, rooms, requests, strict=True)
        ]

    def _rooms(self, request: RequestView, columns: FleetColumns) -> list[float]:
        """The term ``room`` of every candidate."""
        hold_s, pools = self.hold_s, columns.kv_capacity_tokens
        overs = self._overs(request, columns)
        return [hold_s * over / pool if over > 0 else 0.0 for over, pool in zip(overs, pools, strict=True)]

    def _home(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> int | None:
        """Position of the instance with the longest cached prefix, if it is long enough to be a home."""
        home = longest_cached(fleet, columns, lambda place: columns.instance[place] != fleet.pinned)
        least_tokens = max(self.min_cached_tokens, self.affinity_gate * request.prompt_tokens)
        return home if columns.cached_tokens[home] >= least_tokens else None

    def _is_overloaded(self, home: int, loads: Sequence[float]) -> bool:
        """True if the home's load is high by itself and against the others'."""
        load_s, others = loads[home], len(loads) - 1
        return load_s > self.overload_s and load_s * others > self.overload_factor * (sum(loads) - load_s)

    def _cheapest(
        self,
        request: RequestView,
        fleet: FleetSnapshot,
        home: int,
        loads: Sequence[float],
        queues: Sequence[float],
        terms: Terms,
    ) -> _Move | OffloadReason:
        """The cheapest migration from home, or the reason why there is none.

        Targets are priced in the order of what they cost without a transfer, until no other one can be cheaper.
        """
        views, costs = fleet.instances, fleet.costs or Costs()
        sender = views[home]
        queue_s, crowd_s, _, own_s, _, _ = terms
        room_s, step_s, slowness = self._room_s(request, sender), self.short_step_s(fleet), self.slowness(fleet)
        alone_s = own_s + step_s * slowness.get(sender.instance, 1.0)
        stalled_s = self.others_weight * sender.requests * (own_s if sender.prefilling else alone_s)
        if fleet.offloads_in_flight >= self.max_in_flight:
            return OffloadReason.CAP_REACHED
        light = [place for place, load in enumerate(loads) if load <= self.target_share * loads[home]]
        receivers = [place for place in light if may_receive(views[place])]
        if not receivers:
            return OffloadReason.ROLE_FORBIDS if light else OffloadReason.DOES_NOT_PAY
        roomy = [place for place in receivers if self._has_room(request, views[place])]
        if not roomy:
            return OffloadReason.NO_ROOM_ON_D
        bounds = []
        for place in roomy:
            slow = slowness.get(views[place].instance, 1.0)
            decode_s = (step_s * slow + self.stream_s) * views[place].requests
            if slowness:
                decode_s += self.answer_s * slow
            least_s = max(queue_s + own_s, queues[place]) + crowd_s + room_s + stalled_s + decode_s
            bounds.append((least_s, place, decode_s))
        best: _Move | None = None
        best_rank = (inf, 0)
        for bound_s, place, decode_s in sorted(bounds):
            if bound_s > best_rank[0]:
                break
            target = views[place]
            if not sends_to(sender, target, fleet):
                continue
            pair = (sender.instance, target.instance)
            streams = max(sender.decode_streams, target.decode_streams)
            transfers = Transfers(request, target, costs, fleet.offloads_in_flight)
            transfer_s, _ = transfers.times(sender, pair, streams, 0.0)
            first_s = max(queue_s + own_s + transfer_s, queues[place])
            risk_s = costs.transfer.failure_rate(pair) * first_s
            moved_s = first_s + crowd_s + room_s + stalled_s + decode_s + risk_s
            if (moved_s, place) < best_rank:
                figures = {
                    "target_load_s": loads[place],
                    "prefill_queue_s": queue_s,
                    "prefill_s": own_s,
                    "transfer_s": transfer_s,
                    "first_s": first_s,
                    "risk_s": risk_s,
                    "moved_s": moved_s,
                }
                best, best_rank = _Move(target.instance, figures, moved_s), (moved_s, place)
        return best or self._unsendable(sender, [views[place] for place in roomy], fleet)

    def _room_s(self, request: RequestView, view: InstanceView) -> float:
        """Wait for the blocks of the new tokens alone: those of the prefix are there."""
        over = tokens_over(view, request.prompt_tokens, self.pool_share)
        new_tokens = request.prompt_tokens - view.cached_tokens
        return self.hold_s * min(over, new_tokens) / view.kv_capacity_tokens if over > 0 else 0.0

    def _has_room(self, request: RequestView, view: InstanceView) -> bool:
        """True if the pool, of known size, has room for the prompt by the rule of ``warm``."""
        return view.kv_capacity_tokens > 0 and tokens_over(view, request.prompt_tokens, self.pool_share) <= 0

    def _unsendable(self, sender: InstanceView, targets: Sequence[InstanceView], fleet: FleetSnapshot) -> OffloadReason:
        """Reason why home can hand over to none of the targets."""
        if any((sender.instance, each.instance) in fleet.broken_pairs for each in targets):
            return OffloadReason.PAIR_BROKEN
        return OffloadReason.NO_PREFILL_CANDIDATE
