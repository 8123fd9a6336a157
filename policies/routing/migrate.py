"""Migrate, ``warm`` with live sessions: the KV of a session whose home is overloaded is pulled by another instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from policies.costs.formulas import Costs
from policies.costs.transfers import Transfers
from policies.offload.base import may_receive, sends_to
from policies.pool import tokens_over
from policies.routing.base import Pick, longest_cached, require
from policies.routing.warm import Warm
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import CandidateScore, Choice, InstanceView, OffloadPlan, OffloadReason, Reason, RequestView


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
        """The same choice as that of ``choose``; the loads of all are asked for only if the home has a high one."""
        if not request.may_offload or not self._is_loaded_home(request, fleet, columns):
            return Warm.quick(self, request, fleet, columns)
        choice = self.choose(request, fleet)
        return Pick(columns.instance.index(choice.instance), choice.reason)

    def _is_loaded_home(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> bool:
        """False if there is no home, or its own load is too low for it to be overloaded."""
        home = self._home(request, fleet, columns)
        if home is None:
            return False
        queue_s, _, room_s, _, _ = self.prices(request, fleet, columns).terms(home)
        return queue_s + room_s + self.stream_s * fleet.instances[home].requests > self.overload_s

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        choice = Warm.choose(self, request, fleet)
        if not request.may_offload:
            return choice
        loads = self._loads(fleet, choice.scores)
        home = self._overloaded_home(request, fleet, loads)
        if home is None:
            return choice
        place = [view.instance for view in fleet.instances].index(choice.instance)
        stay_s = choice.scores[place].score + self.stream_s * fleet.instances[place].requests
        inputs = {
            "home_load_s": loads[home],
            "cached_tokens": float(fleet.instances[home].cached_tokens),
            "stay_s": stay_s,
        }
        found = self._cheapest(request, fleet, home, loads, choice.scores)
        if isinstance(found, OffloadReason):
            return choice._replace(plan=OffloadPlan(None, found, inputs))
        inputs |= found.inputs
        if self.priced and found.moved_s + self.min_gain_s > stay_s:
            return choice._replace(plan=OffloadPlan(None, OffloadReason.DOES_NOT_PAY, inputs))
        plan = OffloadPlan(fleet.instances[home].instance, OffloadReason.CHOSEN, inputs)
        return Choice(found.target, Reason.SESSION_MIGRATED, choice.scores, plan)

    def _loads(self, fleet: FleetSnapshot, scores: Sequence[CandidateScore]) -> list[float]:
        """Load of every candidate in seconds."""
        return [
            score.inputs["queue_s"] + score.inputs["room_s"] + self.stream_s * view.requests
            for score, view in zip(scores, fleet.instances, strict=True)
        ]

    def _home(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> int | None:
        """Position of the instance with the longest cached prefix, if it is long enough to be a home."""
        home = longest_cached(fleet, columns, lambda place: columns.instance[place] != fleet.pinned)
        least_tokens = max(self.min_cached_tokens, self.affinity_gate * request.prompt_tokens)
        return home if columns.cached_tokens[home] >= least_tokens else None

    def _overloaded_home(self, request: RequestView, fleet: FleetSnapshot, loads: Sequence[float]) -> int | None:
        """Position of the home if it is overloaded."""
        home = self._home(request, fleet, FleetColumns.of(fleet.instances))
        if home is None or loads[home] <= self.overload_s:
            return None
        others = len(loads) - 1
        if not others or loads[home] * others <= self.overload_factor * (sum(loads) - loads[home]):
            return None
        return home

    def _cheapest(
        self,
        request: RequestView,
        fleet: FleetSnapshot,
        home: int,
        loads: Sequence[float],
        scores: Sequence[CandidateScore],
    ) -> _Move | OffloadReason:
        """The cheapest migration from home, or the reason why there is none."""
        views, costs = fleet.instances, fleet.costs or Costs()
        sender, terms = views[home], scores[home].inputs
        own_s, queue_s, room_s = terms["own_s"], terms["queue_s"], self._room_s(request, sender)
        stalled_s = self.others_weight * sender.requests * (own_s if sender.prefilling else own_s + self.step_s)
        if fleet.offloads_in_flight >= self.max_in_flight:
            return OffloadReason.CAP_REACHED
        light = [place for place, load in enumerate(loads) if load <= self.target_share * loads[home]]
        receivers = [place for place in light if may_receive(views[place])]
        if not receivers:
            return OffloadReason.ROLE_FORBIDS if light else OffloadReason.DOES_NOT_PAY
        roomy = [place for place in receivers if self._has_room(request, views[place])]
        if not roomy:
            return OffloadReason.NO_ROOM_ON_D
        best: _Move | None = None
        for place in roomy:
            target = views[place]
            if not sends_to(sender, target, fleet):
                continue
            pair = (sender.instance, target.instance)
            streams = max(sender.decode_streams, target.decode_streams)
            transfers = Transfers(request, target, costs, fleet.offloads_in_flight)
            transfer_s, _ = transfers.times(sender, pair, streams, 0.0)
            first_s = max(queue_s + own_s + transfer_s, scores[place].inputs["queue_s"])
            decode_s = (self.step_s + self.stream_s) * target.requests
            risk_s = costs.transfer.failure_rate(pair) * first_s
            moved_s = first_s + terms["crowd_s"] + room_s + stalled_s + decode_s + risk_s
            if best is None or moved_s < best.moved_s:
                figures = {
                    "target_load_s": loads[place],
                    "prefill_queue_s": queue_s,
                    "prefill_s": own_s,
                    "transfer_s": transfer_s,
                    "first_s": first_s,
                    "risk_s": risk_s,
                    "moved_s": moved_s,
                }
                best = _Move(target.instance, figures, moved_s)
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
