"""Joint, ``warm`` with elastic prefill: where a request decodes and where it is prefilled, decided together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from policies.costs.formulas import Costs
from policies.costs.transfers import Transfers
from policies.offload.base import may_receive, may_send
from policies.routing.base import Pick, least, require, tie_break
from policies.routing.warm import Warm, queues_s
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import CandidateScore, Choice, InstanceView, OffloadPlan, OffloadReason, Reason, RequestView

_BELOW = OffloadPlan(None, OffloadReason.BELOW_THRESHOLD)
_SHAPE = OffloadPlan(None, OffloadReason.REQUEST_SHAPE)


class _Placement(NamedTuple):
    """A hand-off and what it costs, in seconds."""

    decode: int
    """Position of D among the candidates."""
    prefill: str
    inputs: dict[str, float]
    score_s: float


@dataclass(frozen=True, slots=True)
class Joint(Warm):
    """The cheapest of all placements, in seconds: on one instance as ``warm`` scores it, or prefilled elsewhere.

    A few instances of a ``kv_both`` fleet are *prefill specialists*, whose number follows the share of long prefills
    (`policies.offload.specialists`); instances that only prefill count as specialists too.

    - On one instance: the score of ``warm``, and ``specialist_s`` more on a specialist, so that others decode.
    - A request with ``heavy_tokens`` new ones on the best of these may be prefilled on a specialist P, and decoded on
      the D that has room and the lowest ``queue + stream_s x requests``: its first token comes after
      ``first = max(queue_P + T_P + X, queue_D)``, with ``T_P`` the prefill on P and ``X`` the transfer of what D lacks.
      The score is ``first + streams_P x T_P + stream_s x requests_D + failure_rate x first``: the streams that decode
      on P stall, those on D do not. A placement on a specialist, handed off or not, is refused if the request waits
      more than ``max_own_loss`` longer than on the best instance that is none, as a share of the time there.

    Where no P exists, in fleets without KV roles and for requests that are not long it chooses what ``warm`` chooses.
    It plans for every request, so the offload planner is not asked. Source: the separation of long prefills from
    decoding is that of agentic-kvc's elastic arm; the moving number of specialists and the common score are ours.
    Parameters and defaults: those of ``warm``, and ``heavy_tokens`` 20,000; ``specialist_s`` 1; ``max_own_loss`` 1;
    ``stream_s`` 0.02, what one more stream costs the others on D. Complexity: O(n + k) for k specialists, and
    O(n log n) for a long prefill.
    """

    heavy_tokens: int = 20_000
    specialist_s: float = 1.0
    max_own_loss: float = 1.0
    stream_s: float = 0.02
    name: ClassVar[str] = "joint"

    def __post_init__(self) -> None:
        Warm.__post_init__(self)
        require(self.heavy_tokens > 0, "joint: heavy_tokens must be positive")
        require(self.specialist_s >= 0, "joint: specialist_s must not be negative")
        require(self.max_own_loss >= 0, "joint: max_own_loss must not be negative")
        require(self.stream_s >= 0, "joint: stream_s must not be negative")

    def scores(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Sequence[float]:
        return [score.score for score in self.choose(request, fleet).scores]

    def quick(self, request: RequestView, fleet: FleetSnapshot, columns: FleetColumns) -> Pick:
        """The same choice as that of ``choose``."""
        return Pick(columns.instance.index(self.choose(request, fleet).instance), Reason.LOWEST_SCORE)

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        choice = Warm.choose(self, request, fleet)
        if not request.may_offload:
            return choice._replace(plan=_SHAPE)
        names = [view[0] for view in fleet.instances]
        specialists = [name for name in fleet.specialists if name in names]
        scores, place = list(choice.scores), names.index(choice.instance)
        if specialists:
            for name in specialists:
                at = names.index(name)
                inputs = {**scores[at].inputs, "specialist_s": self.specialist_s}
                scores[at] = scores[at]._replace(score=scores[at].score + self.specialist_s, inputs=inputs)
            place = least(fleet, [score[1] for score in scores])
            choice = Choice(names[place], Reason.LOWEST_SCORE, tuple(scores))
        new_tokens = request.prompt_tokens - fleet.instances[place].cached_tokens
        if new_tokens < self.heavy_tokens:
            return choice._replace(plan=_BELOW)
        at_home_s = _first_s(scores[place])
        if names[place] in specialists and len(specialists) < len(names):
            place, at_home_s, late = self._in_time(fleet, scores, [name in specialists for name in names])
            scores = [score._replace(skipped=skips) for score, skips in zip(scores, late, strict=True)]
            choice = Choice(names[place], Reason.LOWEST_SCORE, tuple(scores))
        alone = scores[place]
        inputs = {"new_tokens": float(new_tokens), "colocated_s": alone.score, "colocated_first_s": at_home_s}
        queues = [score[2]["queue_s"] for score in scores]
        found = self._handed_off(request, fleet, specialists, queues, inputs["colocated_first_s"])
        if isinstance(found, OffloadReason):
            return choice._replace(plan=OffloadPlan(None, found, inputs))
        inputs |= found.inputs
        if found.score_s >= alone.score:
            return choice._replace(plan=OffloadPlan(None, OffloadReason.DOES_NOT_PAY, inputs))
        there = scores[found.decode]
        scores[found.decode] = there._replace(
            score=found.score_s, inputs={**there.inputs, "colocated_s": there.score, "handed_off_s": found.score_s}
        )
        plan = OffloadPlan(found.prefill, OffloadReason.CHOSEN, inputs)
        return Choice(names[found.decode], Reason.LOWEST_SCORE, tuple(scores), plan)

    def _in_time(
        self, fleet: FleetSnapshot, scores: Sequence[CandidateScore], special: Sequence[bool]
    ) -> tuple[int, float, list[bool]]:
        """The place of a long prompt less the specialists where it waits too long, the wait elsewhere, and those.

        A specialist has few streams to stall, so its score stays low however long prompts queue there.
        """
        ranks = [score[1] for score in scores]
        at_home_s = _first_s(scores[least(fleet, ranks, special)])
        longest_s = (1 + self.max_own_loss) * at_home_s
        late = [each and _first_s(score) > longest_s for each, score in zip(special, scores, strict=True)]
        return least(fleet, ranks, late), at_home_s, late

    def _handed_off(
        self,
        request: RequestView,
        fleet: FleetSnapshot,
        specialists: Sequence[str],
        queues: Sequence[float],
        colocated_first_s: float,
    ) -> _Placement | OffloadReason:
        """The cheapest hand-off, or the reason why there is none. ``queues``: seconds queued on each candidate."""
        own = {view[0] for view in fleet.instances}
        among = fleet.prefill_instances or fleet.instances
        prefills = [view for view in among if view[0] in specialists or view[0] not in own]
        if not prefills:
            return OffloadReason.NO_SPECIALIST
        receivers = self._receivers(request, fleet, specialists, queues)
        if isinstance(receivers, OffloadReason):
            return receivers
        prefills = [view for view in prefills if self._has_room(view, request.prompt_tokens)]
        reason = OffloadReason.NO_PREFILL_CANDIDATE
        if not prefills:
            return reason
        costs, model, prompt = fleet.costs or Costs(), self._model(fleet), request.prompt_tokens
        best: _Placement | None = None
        transfers: dict[int, Transfers] = {}
        for view, queue_s in zip(prefills, queues_s(FleetColumns.of(prefills), model), strict=True):
            place, refused = _receiver_of(view, receivers, fleet)
            if place is None:
                reason = refused if reason is OffloadReason.NO_PREFILL_CANDIDATE else reason
                continue
            decode = fleet.instances[place]
            pair, streams = (view.instance, decode.instance), view.decode_streams
            if place not in transfers:
                transfers[place] = Transfers(request, decode, costs, fleet.offloads_in_flight)
            transfer_s, _ = transfers[place].times(view, pair, max(streams, decode.decode_streams), 0.0)
            prefill_s = model.seconds(prompt - view.cached_tokens, view.cached_tokens)
            first_s = max(queue_s + prefill_s + transfer_s, queues[place])
            if first_s > (1 + self.max_own_loss) * colocated_first_s:
                reason = OffloadReason.DOES_NOT_PAY
                continue
            streams_s, decode_s = streams * prefill_s, self.stream_s * decode.requests
            risk_s = costs.transfer.failure_rate(pair) * first_s
            score_s = first_s + streams_s + decode_s + risk_s
            if best is None or score_s < best.score_s:
                inputs = {
                    "prefill_queue_s": queue_s,
                    "prefill_s": prefill_s,
                    "transfer_s": transfer_s,
                    "decode_queue_s": queues[place],
                    "first_s": first_s,
                    "streams_s": streams_s,
                    "decode_s": decode_s,
                    "risk_s": risk_s,
                    "handed_off_s": score_s,
                }
                best = _Placement(place, view.instance, inputs, score_s)
        return best or reason

    def _receivers(
        self, request: RequestView, fleet: FleetSnapshot, specialists: Sequence[str], queues: Sequence[float]
    ) -> list[int] | OffloadReason:
        """Positions of the candidates that may be D of a hand-off, best first, or the reason why there is none."""
        views = fleet.instances
        receiving = [
            place for place, view in enumerate(views) if may_receive(view) and view.instance not in specialists
        ]
        if not receiving:
            return OffloadReason.ROLE_FORBIDS
        roomy = [
            place for place in receiving if self._has_room(views[place], request.prompt_tokens, request.max_tokens)
        ]
        if not roomy:
            return OffloadReason.NO_ROOM_ON_D
        ranks = [
            (queues[place] + self.stream_s * views[place].requests, tie_break(fleet, place), place) for place in roomy
        ]
        return [place for _, _, place in sorted(ranks)]

    def _has_room(self, view: InstanceView, prompt_tokens: int, answer_tokens: int = 0) -> bool:
        """True if the pool, of known size, has room for the prompt by the rule of ``warm``, and for an answer."""
        pool = view.kv_capacity_tokens
        taken = view.kv_used_tokens + view.kv_promised_tokens + prompt_tokens
        return pool > 0 and taken <= self.pool_share * pool and taken + answer_tokens <= pool


def _first_s(score: CandidateScore) -> float:
    """Seconds to the first token on one instance, as ``warm`` prices them."""
    return score.inputs["queue_s"] + score.inputs["own_s"]


def _receiver_of(
    prefill: InstanceView, receivers: Sequence[int], fleet: FleetSnapshot
) -> tuple[int | None, OffloadReason]:
    """Position of the first D that a P may hand over to, or None and the reason."""
    reason = OffloadReason.NO_PREFILL_CANDIDATE
    for place in receivers:
        decode = fleet.instances[place]
        if may_send(prefill, decode):
            if (prefill.instance, decode.instance) not in fleet.broken_pairs:
                return place, OffloadReason.CHOSEN
            reason = OffloadReason.PAIR_BROKEN
    return None, reason
