"""Transfer times from several candidates for P to one D, for one request."""

from __future__ import annotations

from policies.costs.book import transfer_job
from policies.costs.formulas import Costs, Pair, TransferCurve, shares_transport
from policies.types import InstanceView, RequestView


class Transfers:
    """Times of the transfers that end on ``decode``.

    All pairs without observations that share a transport, or share none, have one curve, which is made once.
    """

    __slots__ = ("_bytes_per_token", "_costs", "_curves", "_decode", "_others", "_request")

    def __init__(
        self,
        request: RequestView,
        decode: InstanceView,
        costs: Costs,
        others: int,
        bytes_per_token: float | None = None,
    ) -> None:
        """``others``: transfers in flight in the fleet. ``bytes_per_token``: of KV; None: that of ``costs``."""
        self._request = request
        self._decode = decode
        self._costs = costs
        self._others = others
        self._bytes_per_token = costs.bytes_per_token if bytes_per_token is None else bytes_per_token
        self._curves: list[TransferCurve | None] = [None, None]
        """Of pairs without observations, by the sharing of a transport."""

    def times(self, prefill: InstanceView, pair: Pair, streams: int, sigmas: float) -> tuple[float, float]:
        """Seconds of the transfer from a P, with ``streams`` on the busier side; their bound at ``sigmas``."""
        model, decode = self._costs.transfer, self._decode
        learned, shares = model.observed(pair), decode.transport is not None and shares_transport(prefill, decode)
        curve = None if learned else self._curves[shares]
        if curve is None:
            job = transfer_job(self._request, prefill, decode, self._others, self._bytes_per_token)
            curve = model.curve(job, self._costs.now_s, sigmas)
            if not learned:
                self._curves[shares] = curve
        return curve.at(streams)
