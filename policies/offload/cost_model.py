"""Cost model: offload a prefill only if the expected saving exceeds the cost by a safety margin."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple

from policies.costs.formulas import Costs
from policies.costs.transfers import Transfers
from policies.offload.base import (
    ColumnPlanner,
    OffloadPlanner,
    has_room,
    may_receive,
    no_prefill_reason,
    sends_to,
)
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import InstanceView, OffloadPlan, OffloadReason, RequestClass, RequestView, Transport


class _Priced(NamedTuple):
    """Effect of prefilling on one candidate P, in seconds."""

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


_TCP = (Transport.TCP,)
_SLACK_S = 1e-6
"""Above the rounding of a bound, whose terms are summed in another order than a price's."""


@dataclass(frozen=True, slots=True)
class CostModel(ColumnPlanner):
    """Offload if it reduces the sum of all requests' waiting times, using the learned times of this fleet.

    With ``T(new, cached)`` the prefill time, times the slowness of the instance where those differ
    (`policies.costs.slowness`), ``X`` the transfer time of the blocks D lacks, ``Q`` the prefill queued on an instance,
    ``S`` the streams decoding there and ``k`` the ``stall_share``, sending the prefill to P gains

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
    1; ``max_own_loss`` 0.1; ``kv_bytes_per_token``
    that of the calibrated ``hardware``, else of the reports' model.
    """

    max_in_flight: int = 4
    min_new_tokens: int = 4096
    stall_share: float = 0.9
    min_gain: float = 0.25
    sigmas: float = 1.0
    max_own_loss: float = 0.1
    kv_bytes_per_token: float | None = None
    name: ClassVar[str] = "cost_model"

    def __post_init__(self) -> None:
        if self.max_in_flight < 1 or self.min_new_tokens < 0:
            raise ValueError("cost_model: max_in_flight must be at least 1 and min_new_tokens at least 0")
        if not 0 <= self.stall_share <= 1:
            raise ValueError("cost_model: stall_share must be within 0..1")
        size = self.kv_bytes_per_token
        if min(self.min_gain, self.sigmas, self.max_own_loss) < 0 or (size is not None and size <= 0):
            raise ValueError(
                "cost_model: min_gain, sigmas and max_own_loss must not be negative and kv_bytes_per_token positive"
            )

    def plan(
        self,
        request: RequestView,
        decode: InstanceView,
        request_class: RequestClass,
        fleet: FleetSnapshot,
        columns: FleetColumns | None = None,
    ) -> OffloadPlan:
        refusal = self._refusal(request, decode, fleet)
        if refusal is not None:
            return OffloadPlan(None, refusal, self._inputs(request, decode))
        columns = columns or FleetColumns.of(fleet.senders)
        return self._priced(_Pricing(self, request, decode, fleet, columns), request, decode, fleet, columns)

    def quick(
        self,
        request: RequestView,
        decode: InstanceView,
        request_class: RequestClass,
        fleet: FleetSnapshot,
        columns: FleetColumns,
    ) -> OffloadPlan:
        """As ``plan``; no candidate is priced where not even the best imaginable one would pay."""
        refusal = self._refusal(request, decode, fleet)
        if refusal is not None:
            return OffloadPlan(None, refusal)
        pricing = _Pricing(self, request, decode, fleet, columns)
        pays = pricing.may_pay(columns, self.min_gain * pricing.alone_s, -self.max_own_loss * pricing.alone_s)
        if pays or not any(sends_to(view, decode, fleet) and has_room(view, request) for view in fleet.senders):
            return self._priced(pricing, request, decode, fleet, columns)
        return OffloadPlan(None, OffloadReason.DOES_NOT_PAY)

    def _priced(
        self,
        pricing: _Pricing,
        request: RequestView,
        decode: InstanceView,
        fleet: FleetSnapshot,
        columns: FleetColumns,
    ) -> OffloadPlan:
        """The plan of a request that is refused for no other reason than its price."""
        inputs = self._inputs(request, decode)
        found = self._best(pricing, request, decode, fleet, columns)
        if found is None:
            return OffloadPlan(None, no_prefill_reason(decode, fleet), inputs)
        view, best = found
        inputs |= {
            "colocated_s": pricing.queue_s + pricing.alone_s,
            "prefill_s": best.prefill_s,
            "transfer_s": best.transfer_s,
            "own_gain_s": best.own_s,
            "streams_gain_s": best.streams_s,
            "others_cost_s": best.others_s,
            "risk_s": best.risk_s,
            "doubt_s": best.doubt_s,
        }
        verdict = self._verdict(best, pricing.alone_s)
        return OffloadPlan(view.instance if verdict is OffloadReason.CHOSEN else None, verdict, inputs)

    def _inputs(self, request: RequestView, decode: InstanceView) -> dict[str, float]:
        """Inputs of every plan."""
        return {
            "new_tokens": float(request.prompt_tokens - decode.cached_tokens),
            "decode_streams": float(decode.decode_streams),
        }

    def _refusal(self, request: RequestView, decode: InstanceView, fleet: FleetSnapshot) -> OffloadReason | None:
        """Reason why D's prefill is not sent anywhere, whatever it would save."""
        if request.prompt_tokens - decode.cached_tokens < self.min_new_tokens:
            return OffloadReason.BELOW_THRESHOLD
        if not may_receive(decode):
            return OffloadReason.ROLE_FORBIDS
        if fleet.offloads_in_flight >= self.max_in_flight:
            return OffloadReason.CAP_REACHED
        if not decode.kv_capacity_tokens or not has_room(decode, request):
            # A pool of unknown size may be too small; co-located always works.
            return OffloadReason.NO_ROOM_ON_D
        return None

    def _best(
        self,
        pricing: _Pricing,
        request: RequestView,
        decode: InstanceView,
        fleet: FleetSnapshot,
        columns: FleetColumns,
    ) -> tuple[InstanceView, _Priced] | None:
        """The candidate that is chosen, or comes nearest to it; None: nobody can.

        Candidates are priced by their bounds, highest first, until no other one can be better: a few of them.
        """
        bounds, views, alone_s = pricing.bounds(columns), fleet.senders, pricing.alone_s
        least_s, lost_s = self.min_gain * alone_s, -self.max_own_loss * alone_s
        best: tuple[InstanceView, _Priced] | None = None
        best_rank: tuple[bool, float, int, str] = (False, 0.0, 0, "")
        enough_s, bound_s = -inf, max(bounds)
        places = [bounds.index(bound_s)]
        for place in places:
            bound_s, view = bounds[place], views[place]
            if bound_s < enough_s:
                break
            # The first is priced anyway, unless it cannot send.
            if (
                (best is None or pricing.bound(view, bound_s) >= enough_s)
                and sends_to(view, decode, fleet)
                and has_room(view, request)
            ):
                priced = pricing.of(view)
                net_s, value_s = priced[0], priced[0] - priced[5]
                chosen = net_s > least_s and priced[1] >= lost_s and value_s > least_s
                rank = (chosen, value_s, -view.requests, view.instance)
                if best is None or rank > best_rank:
                    best, best_rank = (view, priced), rank
                    # One that is chosen goes before any that is not, and gains more than the least.
                    enough_s = value_s if chosen else min(value_s, least_s)
            if len(places) == 1:  # after the first, which leaves few others
                others = [each for each, bound_s in enumerate(bounds) if bound_s >= enough_s and each != place]
                places += sorted(others, key=bounds.__getitem__, reverse=True) if len(others) > 1 else others
        return best

    def saving_s(
        self, request: RequestView, decode: InstanceView, prefill: InstanceView, fleet: FleetSnapshot
    ) -> float:
        """Seconds of all requests' waiting that prefilling on ``prefill`` is estimated to save; negative: it costs."""
        return _Pricing(self, request, decode, fleet, None).of(prefill).net_s

    def saving_in(
        self,
        planner: OffloadPlanner,
        plan: OffloadPlan,
        request: RequestView,
        decode: InstanceView,
        prefill: InstanceView,
        fleet: FleetSnapshot,
    ) -> float:
        """``saving_s`` of a planner's plan, which has the same price if that planner is a cost model like this one."""
        if (
            isinstance(planner, CostModel)
            and planner.stall_share == self.stall_share
            and planner.kv_bytes_per_token == self.kv_bytes_per_token
        ):
            inputs = plan.inputs
            return inputs["own_gain_s"] + inputs["streams_gain_s"] - inputs["others_cost_s"] - inputs["risk_s"]
        return self.saving_s(request, decode, prefill, fleet)

    def _verdict(self, priced: _Priced, alone_s: float) -> OffloadReason:
        net_s, own_s, least_s = priced[0], priced[1], self.min_gain * alone_s
        if net_s <= least_s or own_s < -self.max_own_loss * alone_s:
            return OffloadReason.DOES_NOT_PAY
        if net_s - priced[5] <= least_s:
            return OffloadReason.UNSURE
        return OffloadReason.CHOSEN


class _Pricing:
    """Prices of candidates for one request, from what they share."""

    __slots__ = (
        "_by_cached",
        "_bytes_per_token",
        "_costs",
        "_decode",
        "_doubt_s",
        "_failure_rate",
        "_least_slow",
        "_others",
        "_prefills",
        "_request",
        "_sigmas",
        "_stall",
        "_stream_s",
        "_streams",
        "_transfers",
        "_waiting",
        "alone_s",
        "queue_s",
    )

    def __init__(
        self,
        planner: CostModel,
        request: RequestView,
        decode: InstanceView,
        fleet: FleetSnapshot,
        columns: FleetColumns | None,
    ) -> None:
        """``columns``: those of ``fleet.senders``, if they are needed for anything else."""
        costs = self._costs = fleet.costs or Costs()
        bytes_per_token = planner.kv_bytes_per_token
        self._request = request
        self._others = fleet.offloads_in_flight
        self._bytes_per_token = costs.bytes_per_token if bytes_per_token is None else bytes_per_token
        self._stall = planner.stall_share
        self._sigmas = planner.sigmas
        self._transfers = Transfers(request, decode, costs, self._others, self._bytes_per_token)
        self._decode = decode
        self._streams = decode.requests - decode.prefilling
        instances, prefilling = fleet.instances, columns.prefilling if columns is not None else ()
        if fleet.prefill_instances or not prefilling:
            prefilling = tuple([view.prefilling for view in instances])
        self._waiting = sum(prefilling) / len(instances)
        cached = decode.cached_tokens
        alone_s = costs.prefill.seconds(request.prompt_tokens - cached, cached)
        self._prefills = {cached: alone_s}
        """Seconds of this prefill by the tokens cached there, which are mostly equal across instances."""
        slow = costs.slowness.get(decode.instance, 1.0)
        self._least_slow = min([1.0, *costs.slowness.values()])
        self.alone_s = slow * alone_s
        self.queue_s = slow * costs.prefill.queue_s(decode.pending_prefill_tokens, decode.prefilling)
        self._failure_rate = costs.transfer.failure_rate
        self._by_cached: dict[int, tuple[float, float, float, float]] = {}
        """Parts of the bounds that are equal for equal cached tokens."""
        self._stream_s = self._doubt_s = 0.0

    def may_pay(self, columns: FleetColumns, least_s: float, lost_s: float) -> bool:
        """False if no candidate can save more than ``least_s``, or each that can costs the request itself too much.

        Both are bounded by a candidate without streams; ``lost_s``: the least that the request itself must save.
        """
        self._share(columns)
        own_s = self.queue_s + self.alone_s + _SLACK_S
        return any(
            saved_s + self._doubt_s > least_s and own_s - offloaded_s >= lost_s
            for saved_s, _, _, offloaded_s in self._by_cached.values()
        )

    def bounds(self, columns: FleetColumns) -> list[float]:
        """The most that each candidate can save less its doubt, from lower bounds of queue, transfer and doubt."""
        self._share(columns)
        by_cached = self._by_cached
        return [
            (shared := by_cached[cached])[0] - shared[1] * (requests - prefilling)
            for cached, requests, prefilling in zip(
                columns.cached_tokens, columns.requests, columns.prefilling, strict=True
            )
        ]

    def _share(self, columns: FleetColumns) -> None:
        """Compute the parts of the bounds that are equal for equal cached tokens, once."""
        if self._by_cached:
            return
        alone_s, queue_s, stall, waiting = self.alone_s, self.queue_s, self._stall, self._waiting
        decoding = self._streams
        decode = self._decode
        size_bytes = (self._request.prompt_tokens - decode.cached_tokens) * self._bytes_per_token
        transports = _TCP if decode.transport is None else (decode.transport, Transport.TCP)
        transfer_s, stream_s, spread = self._costs.transfer.least(size_bytes, self._others, transports, self._sigmas)
        self._stream_s = stream_s
        transfer_s += stream_s * decoding
        self._doubt_s = doubt_s = spread * transfer_s
        by_cached = self._by_cached
        for cached in set(columns.cached_tokens):
            there_s = self._least_slow * self._there_s(cached)
            saved_s = queue_s + alone_s + stall * decoding * alone_s
            if there_s > alone_s:
                saved_s -= waiting * (there_s - alone_s)
            offloaded_s = there_s + transfer_s if there_s + transfer_s > queue_s else queue_s
            saved_s += _SLACK_S - doubt_s - offloaded_s
            by_cached[cached] = saved_s, stall * there_s, there_s + transfer_s, offloaded_s

    def bound(self, view: InstanceView, bound_s: float) -> float:
        """The bound of one candidate with what is queued there and with the streams that slow its transfer down."""
        prefilling, more_streams = view.prefilling, view.requests - view.prefilling - self._streams
        if not prefilling and more_streams <= 0:
            return bound_s
        _, _, idle_s, least_s = self._by_cached[view.cached_tokens]
        if prefilling:
            token_s = self._least_slow * self._costs.prefill.least_s_per_token
            idle_s += token_s * view.pending_prefill_tokens * (1 - 0.5 / prefilling)
        if more_streams > 0:
            idle_s += self._stream_s * more_streams
        return bound_s - max(0.0, idle_s - least_s)

    def of(self, view: InstanceView) -> _Priced:
        """Price of one candidate."""
        alone_s, queue_s, prefilling, decoding = self.alone_s, self.queue_s, view.prefilling, self._streams
        slow = self._costs.slowness.get(view.instance, 1.0)
        streams, there_s = view.requests - prefilling, slow * self._there_s(view.cached_tokens)
        pair = view.instance, self._decode.instance
        busier = streams if streams > decoding else decoding
        transfer_s, upper_s = self._transfers.times(view, pair, busier, self._sigmas)
        queue_there_s = 0.0
        if prefilling:
            queue_there_s = slow * self._costs.prefill.queue_s(view.pending_prefill_tokens, prefilling)
        # D gives every step's budget to the prefills it has, so a pulled request waits for those as well.
        offloaded_s = queue_there_s + there_s + transfer_s
        offloaded_s = offloaded_s if offloaded_s > queue_s else queue_s
        own_s = queue_s + alone_s - offloaded_s
        streams_s = self._stall * (decoding * alone_s - streams * there_s)
        others_s = self._waiting * (there_s - alone_s) if there_s > alone_s else 0.0
        risk_s = self._failure_rate(pair) * offloaded_s
        net_s = own_s + streams_s - others_s - risk_s
        # The class's own call takes three times as long.
        return tuple.__new__(
            _Priced, (net_s, own_s, streams_s, others_s, risk_s, upper_s - transfer_s, there_s, transfer_s)
        )

    def _there_s(self, cached: int) -> float:
        """Seconds of this prefill with so many tokens cached, where the slowness is 1."""
        seconds = self._prefills.get(cached)
        if seconds is None:
            seconds = self._costs.prefill.seconds(self._request.prompt_tokens - cached, cached)
            self._prefills[cached] = seconds
        return seconds
