"""Cost model: offload a prefill only if the expected saving exceeds the cost by a safety margin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from policies.costs.book import KV_BYTES_PER_TOKEN, transfer_job
from policies.costs.formulas import Costs, TimeEstimate
from policies.offload.base import has_room, may_receive, may_send, no_prefill_reason
from policies.snapshot import FleetSnapshot
from policies.types import InstanceView, OffloadPlan, OffloadReason, RequestClass, RequestView


class _Priced(NamedTuple):
    """One candidate P and the effect of prefilling there, in seconds."""

    view: InstanceView
    own_s: float
    """The request's own time to first token: co-located minus offloaded."""
    streams_s: float
    """Stall of decoding streams: those spared on D minus those stalled on P."""
    others_s: float
    """Delay of queued requests by work that co-location would not have caused."""
    risk_s: float
    doubt_s: float
    """Margin by which the transfer may exceed its estimate."""
    prefill: TimeEstimate
    transfer: TimeEstimate

    @property
    def net_s(self) -> float:
        return self.own_s + self.streams_s - self.others_s - self.risk_s


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
        senders = [view for view in fleet.prefill_instances or fleet.instances if may_send(view, decode)]
        usable = [view for view in senders if (view.instance, decode.instance) not in fleet.broken_pairs]
        usable = [view for view in usable if has_room(view, request)]
        if not usable:
            return OffloadPlan(None, no_prefill_reason(decode, fleet), inputs)
        costs = fleet.costs or Costs()
        waiting = sum(view.prefilling for view in fleet.instances) / len(fleet.instances)
        alone = costs.prefill.predict(new_tokens, decode.cached_tokens)
        queue_s = costs.prefill.queue_s(decode.pending_prefill_tokens, decode.prefilling)
        prefills: dict[int, TimeEstimate] = {}
        priced = [
            self._price(request, decode, view, fleet, costs, alone, queue_s, waiting, prefills) for view in usable
        ]
        best = max(
            priced,
            key=lambda each: (
                self._verdict(each, alone.seconds)[0] is not None,
                each.net_s - each.doubt_s,
                -each.view.requests,
                each.view.instance,
            ),
        )
        inputs |= {
            "colocated_s": queue_s + alone.seconds,
            "prefill_s": best.prefill.seconds,
            "transfer_s": best.transfer.seconds,
            "own_gain_s": best.own_s,
            "streams_gain_s": best.streams_s,
            "others_cost_s": best.others_s,
            "risk_s": best.risk_s,
            "doubt_s": best.doubt_s,
        }
        return OffloadPlan(*self._verdict(best, alone.seconds), inputs)

    def saving_s(
        self, request: RequestView, decode: InstanceView, prefill: InstanceView, fleet: FleetSnapshot
    ) -> float:
        """Seconds of all requests' waiting that prefilling on ``prefill`` is estimated to save; negative: it costs."""
        costs = fleet.costs or Costs()
        waiting = sum(view.prefilling for view in fleet.instances) / len(fleet.instances)
        alone = costs.prefill.predict(request.prompt_tokens - decode.cached_tokens, decode.cached_tokens)
        queue_s = costs.prefill.queue_s(decode.pending_prefill_tokens, decode.prefilling)
        return self._price(request, decode, prefill, fleet, costs, alone, queue_s, waiting, {}).net_s

    def _verdict(self, best: _Priced, alone_s: float) -> tuple[str | None, OffloadReason]:
        least_s = self.min_gain * alone_s
        if best.net_s <= least_s or best.own_s < -self.max_own_loss * alone_s:
            return None, OffloadReason.DOES_NOT_PAY
        if best.net_s - best.doubt_s <= least_s:
            return None, OffloadReason.UNSURE
        return best.view.instance, OffloadReason.CHOSEN

    def _price(
        self,
        request: RequestView,
        decode: InstanceView,
        prefill: InstanceView,
        fleet: FleetSnapshot,
        costs: Costs,
        alone: TimeEstimate,
        queue_s: float,
        waiting: float,
        prefills: dict[int, TimeEstimate],
    ) -> _Priced:
        """``prefills``: estimates made so far by cached tokens, which are mostly equal across instances."""
        job = transfer_job(request, prefill, decode, fleet.offloads_in_flight, self.kv_bytes_per_token)
        transfer = costs.transfer.predict(job, costs.now_s)
        cached = prefill.cached_tokens
        there = prefills.get(cached)
        if there is None:
            there = prefills[cached] = costs.prefill.predict(request.prompt_tokens - cached, cached)
        queue_there_s = costs.prefill.queue_s(prefill.pending_prefill_tokens, prefill.prefilling)
        # D gives every step's budget to the prefills it has, so a pulled request waits for those as well.
        offloaded_s = max(queue_there_s + there.seconds + transfer.seconds, queue_s)
        stalled_s = decode.decode_streams * alone.seconds - prefill.decode_streams * there.seconds
        return _Priced(
            prefill,
            queue_s + alone.seconds - offloaded_s,
            self.stall_share * stalled_s,
            waiting * max(0.0, there.seconds - alone.seconds),
            costs.transfer.failure_rate(job.pair) * offloaded_s,
            transfer.upper(self.sigmas) - transfer.seconds,
            there,
            transfer,
        )
