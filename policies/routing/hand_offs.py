"""The hand-offs of one request under ``joint``: prefilled on a specialist, decoded elsewhere; priced one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import inf
from typing import NamedTuple, Protocol

from policies.costs.formulas import Costs
from policies.costs.transfers import Transfers
from policies.offload.base import may_receive, may_send
from policies.routing.base import tie_break
from policies.routing.warm import Prices
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import InstanceView, OffloadReason, RequestView


class HandOffPrices(Protocol):
    """Parameters of ``joint`` that price a hand-off, and its rule of room."""

    @property
    def max_own_loss(self) -> float: ...

    @property
    def stream_s(self) -> float: ...

    @property
    def queue_cost(self) -> float: ...

    @property
    def answer_s(self) -> float: ...

    def has_room(self, view: InstanceView, prompt_tokens: int, answer_tokens: int = 0) -> bool:
        """True if the instance's pool has room for the prompt and the answer."""
        ...


class PricedHandOff(NamedTuple):
    """A hand-off and its price, in seconds."""

    decode: int
    """Position of D among the candidates."""
    prefill: str
    terms: tuple[float, ...]
    """In the order of ``_TERMS``."""
    score_s: float

    def inputs(self) -> dict[str, float]:
        """The terms by name."""
        return dict(zip(_TERMS, self.terms, strict=True))


_TERMS = (
    "prefill_queue_s",
    "prefill_s",
    "transfer_s",
    "decode_queue_s",
    "first_s",
    "streams_s",
    "behind_s",
    "decode_s",
    "eviction_s",
    "risk_s",
    "saved_s",
    "handed_off_s",
)


class PossibleHandOffs:
    """Hand-offs that one request may take, and the cheapest of them."""

    __slots__ = (
        "_bound_s",
        "_columns",
        "_costs",
        "_evictions_s",
        "_fleet",
        "_policy",
        "_prices",
        "_ranked",
        "_request",
        "_saved_s",
        "_specialists",
        "_transfers",
    )

    def __init__(
        self,
        policy: HandOffPrices,
        request: RequestView,
        fleet: FleetSnapshot,
        columns: FleetColumns,
        specialists: Mapping[str, int],
        prices: Prices,
        alone: int,
        colocated_first_s: float,
        evictions_s: Mapping[int, float],
    ) -> None:
        """Inputs of their prices.

        Args:
            policy: parameters.
            request: the request.
            fleet: the fleet as the decision sees it.
            columns: its candidates.
            specialists: places of those among the candidates, by name.
            prices: scores of single candidates.
            alone: place of the best single instance.
            colocated_first_s: to a first token there, or on the best that is no specialist.
            evictions_s: price of the context, by place.
        """
        self._policy = policy
        self._request = request
        self._fleet = fleet
        self._columns = columns
        self._specialists = specialists
        self._evictions_s = evictions_s
        self._prices = prices
        self._bound_s = (1 + policy.max_own_loss) * colocated_first_s
        name = columns.instance[alone]
        answer_s = prices.answer_s(name) if prices.slowness else policy.answer_s
        self._saved_s = answer_s * (fleet.specialists.get(name, 1.0) - 1)
        self._costs = fleet.costs or Costs()
        self._transfers: dict[int, Transfers] = {}
        """By the place of D."""
        self._ranked: list[int] | None = None

    def prefills(self) -> list[InstanceView]:
        """Instances that may prefill: specialists, and those that only prefill."""
        fleet, specialists = self._fleet, self._specialists
        if not fleet.prefill_instances:
            return [fleet.instances[place] for place in specialists.values()]
        own = set(self._columns.instance)
        return [view for view in fleet.prefill_instances if view[0] in specialists or view[0] not in own]

    def may_be_below(self, score_s: float, view: InstanceView) -> bool:
        """False if a hand-off by this P costs as much by the prefill, the streams it stalls and what is queued."""
        prefill_s, saved_s = self._prices.own_s(view), self._saved_s
        streams_s = (view.requests - view.prefilling) * prefill_s
        if prefill_s + streams_s - saved_s >= score_s:
            return False
        queue_s = self._queue_s(view, self._prices.alike_s(view))
        return queue_s + prefill_s + streams_s + self._policy.queue_cost * queue_s - saved_s < score_s

    def handed_off(self, prefills: Sequence[InstanceView]) -> PricedHandOff | OffloadReason:
        """The cheapest hand-off, or the reason why there is none."""
        policy, fleet, costs, prompt = self._policy, self._fleet, self._costs, self._request.prompt_tokens
        first = self._first_receiver()
        if isinstance(first, OffloadReason):
            return first
        reason = OffloadReason.NO_PREFILL_CANDIDATE
        best: PricedHandOff | None = None
        for view in prefills:
            if not policy.has_room(view, prompt):
                continue
            if best is not None and not self.may_be_below(best.score_s, view):
                continue
            place, refused = self._receiver_of(view, first)
            if place is None:
                reason = refused if reason is OffloadReason.NO_PREFILL_CANDIDATE else reason
                continue
            decode = fleet.instances[place]
            pair, streams = (view.instance, decode.instance), view.decode_streams
            transfers = self._transfers.get(place)
            if transfers is None:
                transfers = Transfers(self._request, decode, costs, fleet.offloads_in_flight)
                self._transfers[place] = transfers
            transfer_s, _ = transfers.times(view, pair, max(streams, decode.decode_streams), 0.0)
            prefill_s = self._prices.own_s(view)
            queue_s = self._queue_s(view, self._prices.alike_s(view))
            decode_queue_s = self._queue_s(decode)
            first_s = max(queue_s + prefill_s + transfer_s, decode_queue_s)
            if first_s > self._bound_s:
                reason = OffloadReason.DOES_NOT_PAY
                continue
            streams_s, decode_s = streams * prefill_s, self._decode_s(decode)
            behind_s, risk_s = policy.queue_cost * queue_s, costs.transfer.failure_rate(pair) * first_s
            eviction_s = self._evictions_s.get(place, 0.0)
            score_s = first_s + streams_s + behind_s + decode_s + eviction_s + risk_s - self._saved_s
            if best is None or score_s < best.score_s:
                waits = (queue_s, prefill_s, transfer_s, decode_queue_s, first_s)
                terms = (*waits, streams_s, behind_s, decode_s, eviction_s, risk_s, self._saved_s, score_s)
                best = PricedHandOff(place, view.instance, terms, score_s)
        return best or reason

    def _receiver_of(self, prefill: InstanceView, first: int) -> tuple[int | None, OffloadReason]:
        """Place of the best D that a P may hand over to, or None and the reason."""
        fleet, reason = self._fleet, OffloadReason.NO_PREFILL_CANDIDATE
        # Nearly always it is the best D of all; only then it is not, all are ranked.
        for place in chain((first,), self._others()):
            decode = fleet.instances[place]
            if may_send(prefill, decode):
                if (prefill.instance, decode.instance) not in fleet.broken_pairs:
                    return place, OffloadReason.CHOSEN
                reason = OffloadReason.PAIR_BROKEN
        return None, reason

    def _first_receiver(self) -> int | OffloadReason:
        """Place of the candidate that is the best D of a hand-off, or the reason why there is none."""
        views, stream_s = self._fleet.instances, self._policy.stream_s
        receiving, best, least_s = False, list[int](), inf
        # Fewest requests first: what is queued is looked up until they alone rank behind the best.
        requests = self._columns.requests
        for place in sorted(range(len(views)), key=requests.__getitem__):
            if stream_s * requests[place] > least_s:
                break
            view = views[place]
            if not may_receive(view) or view.instance in self._specialists:
                continue
            receiving = True
            if not self._receives(view):
                continue
            rank_s = self._rank_s(place, view)
            if rank_s < least_s:
                best, least_s = [place], rank_s
            elif rank_s == least_s:
                best.append(place)
        if not best:
            return OffloadReason.NO_ROOM_ON_D if receiving else OffloadReason.ROLE_FORBIDS
        return best[0] if len(best) == 1 else min(best, key=partial(tie_break, self._fleet))

    def _others(self) -> Iterator[int]:
        """Places of all that may be D of a hand-off, best first."""
        if self._ranked is None:
            ranks = [
                (self._rank_s(place, view), tie_break(self._fleet, place), place)
                for place, view in enumerate(self._fleet.instances)
                if may_receive(view) and view.instance not in self._specialists and self._receives(view)
            ]
            self._ranked = [place for _, _, place in sorted(ranks)]
        yield from self._ranked

    def _rank_s(self, place: int, view: InstanceView) -> float:
        return self._queue_s(view) + self._decode_s(view) + self._evictions_s.get(place, 0.0)

    def _decode_s(self, view: InstanceView) -> float:
        """Seconds that one more stream costs the others on D and, where instances differ in speed, its answer there."""
        return self._policy.stream_s * view.requests + self._prices.answer_s(view.instance)

    def _receives(self, view: InstanceView) -> bool:
        return self._policy.has_room(view, self._request.prompt_tokens, self._request.max_tokens)

    def _queue_s(self, view: InstanceView, own_s: float = 0.0) -> float:
        """Seconds of the queue before P's prefill, or before D's next token after the transfer (none of its own)."""
        return self._prices.queue_s(view, own_s)
