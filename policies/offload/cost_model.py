"""Cost model: offload a prefill only if the expected saving exceeds the cost by a safety margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from policies.costs.book import KV_BYTES_PER_TOKEN
from policies.costs.formulas import Costs
from policies.costs.transfers import Transfers
from policies.offload.base import has_room, may_receive, no_prefill_reason, senders
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import InstanceView, OffloadPlan, OffloadReason, RequestClass, RequestView


class _Priced(NamedTuple):
    """One candidate P and the effect of prefilling there, in seconds."""

    view: InstanceView
    net_s: float
    """All of the following but ``doubt_s``."""
    own_s: float
    """The request's own time to first token: co-located minus offloaded."""
    streams_s: float
    """Stall of decoding streams: those spared on D minus those stalled on P."""
    others_s: float
    """Delay of queued requests by work that co-location would not have caused."""
    risk_s: float
    doubt_s: float
    """Margin by which the transfer may exceed its estimate."""
    prefill_s: float
    transfer_s: float


_Terms = tuple[float, float, float, float, float, float, float, float]
"""The fields of ``_Priced`` after its view."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Offload if it reduces the sum of all requests' waiting times, using the learned times of this fleet.

    With ``T(new, cached)`` the prefill time, ``X`` the transfer time of the blocks D lacks, ``Q`` the prefill queued on
    an instance, ``S`` the streams decoding there and ``k`` the ``stall_share``, sending the prefill to P gains

    - own: ``(Q_D + T_D) - max(Q_P + T_P + X, Q_D)``, the request's first token: prefill queued on D delays a pulled
      request too, because vLLM gives a step's whole token budget to the prefills it has begun;
    - streams: ``k * (S_D * T_D - S_P * T_P)``. Source: the accounting of the agentic-kvc reports, where the benefit
      of isolating one prefill is summed over all stalled streams, ``D * T_prefill * (1 - TPOT_idle / TPOT_during)``;
      P's own streams are counted by the same rule, which those reports do not do;
    - others: ``- w * max(0, T_P - T_D)``: a P that holds less of the prefix computes more, and ``w`` requests wait
      behind that, the mean number in prefill per instance;
    - risk: ``- failure_rate * (Q_P + T_P + X)``, the time lost by a fall-back.

    The request stays on D if the sum is not above ``min_gain`` of ``T_D`` (DOES_NOT_PAY), if it is not with ``X`` taken
    ``sigmas`` standard deviations above its estimate (UNSURE), or if the request itself would wait longer than
    co-located by more than ``max_own_loss`` of ``T_D``. Complexity: O(n).

    Defaults: ``max_in_flight`` 4; ``min_new_tokens`` 4096 on D, below which a prefill stalls other requests only
    briefly; ``stall_share`` 0.9 (one minus TPOT idle over during: 0.86 to 0.99 measured); ``min_gain`` 0.25; ``sigmas``
    1; ``max_own_loss`` 0.1; ``kv_bytes_per_token`` as the reports' model.
    """

    max_in_flight: int = 4
    min_new_tokens: int = 4096
    stall_share: float = 0.9
    min_gain: float = 0.25
    sigmas: float = 1.0
    max_own_loss: float = 0.1
    kv_bytes_per_token: float = KV_BYTES_PER_TOKEN
    name: ClassVar[str] = "cost_model"

    def __post_init__(self) -> None:
        if self.max_in_flight < 1 or self.min_new_tokens < 0:
            raise ValueError("cost_model: max_in_flight must be at least 1 and min_new_tokens at least 0")
        if not 0 <= self.stall_share <= 1:
            raise ValueError("cost_model: stall_share must be within 0..1")
        if min(self.min_gain, self.sigmas, self.max_own_loss) < 0 or self.kv_bytes_per_token <= 0:
            raise ValueError(
                "cost_model: min_gain, sigmas and max_own_loss must not be negative and kv_bytes_per_token positive"
            )

    def plan(
        self, request: RequestView, decode: InstanceView, request_class: RequestClass, fleet: FleetSnapshot
    ) -> OffloadPlan:
        new_tokens = request.prompt_tokens - decode.cached_tokens
        inputs = {"new_tokens": float(new_tokens), "decode_streams": float(decode.decode_streams)}
        if new_tokens < self.min_new_tokens:
            return OffloadPlan(None, OffloadReason.BELOW_THRESHOLD, inputs)
        if not may_receive(decode):
            return OffloadPlan(None, OffloadReason.ROLE_FORBIDS, inputs)
        if fleet.offloads_in_flight >= self.max_in_flight:
            return OffloadPlan(None, OffloadReason.CAP_REACHED, inputs)
        if not decode.kv_capacity_tokens or not has_room(decode, request):
            # A pool of unknown size may be too small; co-located always works.
            return OffloadPlan(None, OffloadReason.NO_ROOM_ON_D, inputs)
        views = fleet.prefill_instances or fleet.instances
        columns = FleetColumns.of(views)
        sends = senders(columns, decode, fleet.broken_pairs)
        usable = [
            place for place, (view, may) in enumerate(zip(views, sends, strict=True)) if may and has_room(view, request)
        ]
        if not usable:
            return OffloadPlan(None, no_prefill_reason(decode, fleet), inputs)
        pricing = _Pricing(request, decode, fleet, self.kv_bytes_per_token)
        alone, queue_s = pricing.alone, pricing.queue_s
        best: _Priced | None = None
        best_rank: tuple[bool, float] = (False, 0.0)
        for place, priced in zip(usable, self._prices(pricing, views, usable), strict=True):
            rank = (self._verdict(priced, alone.seconds) is OffloadReason.CHOSEN, priced[0] - priced[5])
            if best is not None and (rank < best_rank or (rank == best_rank and _goes_after(views[place], best.view))):
                continue
            best, best_rank = _Priced(views[place], *priced), rank
        assert best is not None
        inputs |= {
            "colocated_s": queue_s + alone.seconds,
            "prefill_s": best.prefill_s,
            "transfer_s": best.transfer_s,
            "own_gain_s": best.own_s,
            "streams_gain_s": best.streams_s,
            "others_cost_s": best.others_s,
            "risk_s": best.risk_s,
            "doubt_s": best.doubt_s,
        }
        verdict = self._verdict(best[1:], alone.seconds)
        return OffloadPlan(best.view.instance if verdict is OffloadReason.CHOSEN else None, verdict, inputs)

    def saving_s(
        self, request: RequestView, decode: InstanceView, prefill: InstanceView, fleet: FleetSnapshot
    ) -> float:
        """Seconds of all requests' waiting that prefilling on ``prefill`` is estimated to save; negative: it costs."""
        pricing = _Pricing(request, decode, fleet, self.kv_bytes_per_token)
        return self._prices(pricing, (prefill,), (0,))[0][0]

    def _verdict(self, priced: _Terms, alone_s: float) -> OffloadReason:
        net_s, own_s, least_s = priced[0], priced[1], self.min_gain * alone_s
        if net_s <= least_s or own_s < -self.max_own_loss * alone_s:
            return OffloadReason.DOES_NOT_PAY
        if net_s - priced[5] <= least_s:
            return OffloadReason.UNSURE
        return OffloadReason.CHOSEN

    def _prices(self, pricing: _Pricing, views: Sequence[InstanceView], places: Sequence[int]) -> list[_Terms]:
        """Prices of the candidates at these places of ``views``. A loop with few calls: it runs for each of them."""
        columns, stall, sigmas = FleetColumns.of(views), self.stall_share, self.sigmas
        model = pricing.costs.prefill
        queues_s = model.queues_s(columns.pending_prefill_tokens, columns.prefilling)
        alone_s, queue_s, waiting, prompt = (
            pricing.alone.seconds,
            pricing.queue_s,
            pricing.waiting,
            pricing.prompt_tokens,
        )
        spared_s, target, failure_rate = pricing.streams * alone_s, pricing.decode.instance, pricing.failure_rate
        prefills: dict[int, float] = {}
        """By the tokens cached on P."""
        terms = []
        for place in places:
            cached, streams = columns.cached_tokens[place], columns.requests[place] - columns.prefilling[place]
            there_s = prefills.get(cached)
            if there_s is None:
                there_s = prefills[cached] = model.seconds(prompt - cached, cached)
            pair = (columns.instance[place], target)
            transfer_s, upper_s = pricing.transfer(views[place], pair, streams, sigmas)
            # D gives every step's budget to the prefills it has, so a pulled request waits for those as well.
            offloaded_s = max(queues_s[place] + there_s + transfer_s, queue_s)
            own_s = queue_s + alone_s - offloaded_s
            streams_s = stall * (spared_s - streams * there_s)
            others_s = waiting * max(0.0, there_s - alone_s)
            risk_s = failure_rate(pair) * offloaded_s
            net_s = own_s + streams_s - others_s - risk_s
            terms.append((net_s, own_s, streams_s, others_s, risk_s, upper_s - transfer_s, there_s, transfer_s))
        return terms


def _goes_after(view: InstanceView, best: InstanceView) -> bool:
    """True if of two equal candidates the second is taken: fewer requests, then the later name."""
    return (-view.requests, view.instance) < (-best.requests, best.instance)


class _Pricing:
    """Common part of all candidates' prices for one request, and estimates that several candidates share."""

    __slots__ = (
        "_transfers",
        "alone",
        "costs",
        "decode",
        "failure_rate",
        "prompt_tokens",
        "queue_s",
        "streams",
        "waiting",
    )

    def __init__(
        self, request: RequestView, decode: InstanceView, fleet: FleetSnapshot, bytes_per_token: float
    ) -> None:
        costs = self.costs = fleet.costs or Costs()
        self._transfers = Transfers(request, decode, costs, fleet.offloads_in_flight, bytes_per_token)
        self.decode = decode
        self.prompt_tokens = request.prompt_tokens
        self.streams = decode.decode_streams
        self.waiting = sum([view.prefilling for view in fleet.instances]) / len(fleet.instances)
        self.alone = costs.prefill.predict(request.prompt_tokens - decode.cached_tokens, decode.cached_tokens)
        self.queue_s = costs.prefill.queue_s(decode.pending_prefill_tokens, decode.prefilling)
        self.failure_rate = costs.transfer.failure_rate

    def transfer(
        self, prefill: InstanceView, pair: tuple[str, str], streams: int, sigmas: float
    ) -> tuple[float, float]:
        """Seconds of the transfer from a P with this many streams, and their upper bound."""
        return self._transfers.times(prefill, pair, max(streams, self.streams), sigmas)
