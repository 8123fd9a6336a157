"""Prefill and KV transfer times on this fleet: formulas with published constants, corrected by observations.

Both models are immutable; observing returns a new one. A decision therefore keeps the costs it was made with, and the
live proxy, an explanation and a simulation compute the same costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf
from typing import NamedTuple

from policies.costs.estimates import UNKNOWN, LearnedRatio, bucket_of, nearest_bucket
from policies.costs.short_step import UNKNOWN_STEP, ShortStep
from policies.costs.slowness import ALL_ALIKE, Slownesses
from policies.costs.transfer_constants import (
    KV_BYTES_PER_TOKEN,
    PUBLISHED,
    Regime,
    TransferConstants,
    TransferFormula,
)
from policies.types import InstanceView, Transport

Pair = tuple[str, str]
"""(P, D)"""


def pair_transport(prefill: InstanceView, decode: InstanceView) -> Transport:
    """Transport of KV between two instances: the one both are proven to have; NVLink within one host only.

    Everything else counts as TCP, the slowest; the actual speed is learned from the transfers themselves.
    """
    transport = decode.transport
    return transport if transport is not None and shares_transport(prefill, decode) else Transport.TCP


def shares_transport(prefill: InstanceView, decode: InstanceView) -> bool:
    """True if KV goes by the transport that both instances are proven to have."""
    transport = decode.transport
    if transport is None or prefill.transport is not transport:
        return False
    return transport is not Transport.NVLINK or prefill.host == decode.host


class TimeEstimate(NamedTuple):
    """A log-normal time in seconds: ``seconds * exp(sigma * z)`` is the estimate plus z standard deviations."""

    seconds: float
    sigma: float

    def upper(self, z: float) -> float:
        """Upper bound in seconds at ``z`` standard deviations (z = 1: exceeded one time in six)."""
        return self.seconds * exp(self.sigma * z)


class TransferJob(NamedTuple):
    """Inputs of one hand-off's transfer time: transport, bytes, decode streams, concurrent transfers."""

    pair: Pair
    transport: Transport
    size_bytes: float
    streams: int
    others: int


@dataclass(frozen=True, slots=True)
class TransferModel:
    """Time from sending the D leg to its first token, in seconds, per (P, D) pair.

    A pair's correction relaxes to that of its transport, and the transport's to the formula, by half every
    ``half_life_s`` seconds without observations. In a regime whose times vary (``REGIMES``) a pair has one more
    estimate, which relaxes to the pair's, with the published spread where that is wider. Memory: one estimate per pair
    that has handed over, and one per pair and regime. Complexity of ``predict``: O(1); of ``observe``: O(pairs), as the
    mappings are copied.
    """

    half_life_s: float = 120.0
    pair_weight: float = 0.25
    transport_weight: float = 0.1
    failure_weight: float = 0.1
    prior_failure_rate: float = 0.02
    _constants: TransferConstants = PUBLISHED
    _pairs: Mapping[Pair, LearnedRatio] = field(default_factory=dict)
    _transports: Mapping[Transport, LearnedRatio] = field(default_factory=dict)
    _regimes: Mapping[tuple[Pair, int], LearnedRatio] = field(default_factory=dict)
    _failure_rates: Mapping[Pair, float] = field(default_factory=dict)
    _least: LearnedRatio = UNKNOWN
    """At most the factor and the variance of any transfer: the least ever learned. Relaxed ones are in between."""

    def predict(self, job: TransferJob, now_s: float) -> TimeEstimate:
        """Estimated seconds of the D leg up to its first token."""
        estimate = self._estimate(job, now_s)
        return TimeEstimate(transfer_formula(job, self._constants) * exp(estimate.log_ratio), estimate.sigma)

    def least(
        self, size_bytes: float, others: int, transports: Iterable[Transport], z: float
    ) -> tuple[float, float, float]:
        """Lower bounds for a transfer beside ``others`` on any pair, by any of the transports.

        Seconds without streams, seconds that each stream adds, and the excess of the upper bound at ``z`` standard
        deviations, as a share of the time.
        """
        least, constants = self._least, self._constants
        alone_s = stream_s = inf
        for transport in transports:
            formula, moving_s = _unloaded(transport, size_bytes, constants)
            moving_s *= 1 + formula.crowd * others
            alone_s = min(alone_s, formula.setup_s + moving_s)
            stream_s = min(stream_s, formula.stream_setup_s + formula.slowdown * moving_s)
        factor = exp(least.log_ratio)
        return factor * alone_s, factor * stream_s, exp(least.sigma * z) - 1

    def curve(self, job: TransferJob, now_s: float, z: float) -> TransferCurve:
        """``predict`` for any number of streams, and its upper bound at ``z`` standard deviations."""
        return TransferCurve(job, self._estimate(job, now_s), z, self._constants)

    def observe(self, job: TransferJob, seconds: float, now_s: float) -> TransferModel:
        """Return the model after one successful transfer of ``seconds``."""
        expected_s = transfer_formula(job, self._constants)
        pair, transport = self._pair(job, now_s), self._transport(job.transport, now_s)
        regime = _regime(job.transport, job.size_bytes, self._constants)
        regimes = self._regimes
        pair = pair.learn(expected_s, seconds, now_s, self.pair_weight)
        transport = transport.learn(expected_s, seconds, now_s, self.transport_weight)
        ratios = [self._least, pair, transport]
        if regime:
            learned = self._estimate(job, now_s).learn(expected_s, seconds, now_s, self.pair_weight)
            regimes = {**regimes, (job.pair, regime): learned}
            ratios.append(learned)
        return replace(
            self,
            _pairs={**self._pairs, job.pair: pair},
            _transports={**self._transports, job.transport: transport},
            _regimes=regimes,
            _least=LearnedRatio(min(each.log_ratio for each in ratios), min(each.variance for each in ratios)),
        )

    def settled(self, pair: Pair, ok: bool) -> TransferModel:
        """Return the model with the failure rate updated by one attempted hand-off."""
        rate = self.failure_rate(pair)
        rate += self.failure_weight * ((0.0 if ok else 1.0) - rate)
        return replace(self, _failure_rates={**self._failure_rates, pair: rate})

    def without(self, instance: str) -> TransferModel:
        """The model without the learned values of one instance's pairs."""
        return replace(
            self,
            _pairs={pair: each for pair, each in self._pairs.items() if instance not in pair},
            _regimes={key: each for key, each in self._regimes.items() if instance not in key[0]},
            _failure_rates={pair: each for pair, each in self._failure_rates.items() if instance not in pair},
        )

    def failure_rate(self, pair: Pair) -> float:
        """Share of hand-offs over this pair that failed, 0..1, exponentially weighted."""
        return self._failure_rates.get(pair, self.prior_failure_rate)

    def observed(self, pair: Pair) -> bool:
        """True if a transfer of the pair was observed; else its times are those of its transport."""
        return pair in self._pairs

    def observations(self) -> dict[Pair, LearnedRatio]:
        """Learned correction per pair, for display."""
        return dict(self._pairs)

    def _transport(self, transport: Transport, now_s: float) -> LearnedRatio:
        return self._transports.get(transport, UNKNOWN).relaxed(UNKNOWN, now_s, self.half_life_s)

    def _pair(self, job: TransferJob, now_s: float) -> LearnedRatio:
        transport = self._transport(job.transport, now_s)
        return self._pairs.get(job.pair, UNKNOWN).relaxed(transport, now_s, self.half_life_s)

    def _estimate(self, job: TransferJob, now_s: float) -> LearnedRatio:
        pair, regime = self._pair(job, now_s), _regime(job.transport, job.size_bytes, self._constants)
        if not regime:
            return pair
        published = _between(self._constants.regimes[job.transport], regime, job.size_bytes)[1]
        unseen = pair._replace(variance=max(pair.variance, published**2), observations=0)
        return self._regimes.get((job.pair, regime), UNKNOWN).relaxed(unseen, now_s, self.half_life_s)


def transfer_formula(job: TransferJob, constants: TransferConstants = PUBLISHED) -> float:
    """Seconds from the constants alone."""
    formula, moving_s = _unloaded(job.transport, job.size_bytes, constants)
    return _loaded(formula, moving_s, job.streams, 1 + formula.crowd * job.others)


def _unloaded(transport: Transport, size_bytes: float, constants: TransferConstants) -> tuple[TransferFormula, float]:
    """The formula, and the seconds that the bytes alone take."""
    formula, regime = constants.formulas[transport], _regime(transport, size_bytes, constants)
    if regime:
        return formula, _between(constants.regimes[transport], regime, size_bytes)[0]
    return formula, size_bytes / formula.bytes_per_s


def _loaded(formula: TransferFormula, moving_s: float, streams: int, crowding: float) -> float:
    moving_s *= (1 + formula.slowdown * streams) * crowding
    return formula.setup_s + formula.stream_setup_s * streams + moving_s


class TransferCurve:
    """Estimated time of one transfer by the streams on its busier side."""

    __slots__ = ("_crowding", "_factor", "_formula", "_moving_s", "_upper")

    def __init__(self, job: TransferJob, estimate: LearnedRatio, z: float, constants: TransferConstants) -> None:
        self._formula, self._moving_s = _unloaded(job.transport, job.size_bytes, constants)
        self._crowding = 1 + self._formula.crowd * job.others
        self._factor = exp(estimate.log_ratio)
        self._upper = exp(estimate.sigma * z)

    def at(self, streams: int) -> tuple[float, float]:
        """Seconds, and their upper bound at ``z`` standard deviations."""
        seconds = _loaded(self._formula, self._moving_s, streams, self._crowding) * self._factor
        return seconds, seconds * self._upper


def _regime(transport: Transport, size_bytes: float, constants: TransferConstants) -> int:
    """Number of the transfer's regime, from 1; 0 where time is linear in bytes."""
    regimes = constants.regimes.get(transport)
    if regimes is None:
        return 0
    for number, regime in enumerate(regimes):
        if size_bytes <= regime.size_bytes:
            return number
    return len(regimes) - 1


def _between(regimes: tuple[Regime, ...], number: int, size_bytes: float) -> tuple[float, float]:
    """Seconds and sigma of a transfer in the regime of that number."""
    low, high = regimes[number - 1], regimes[number]
    if size_bytes >= high.size_bytes:
        return high.seconds * size_bytes / high.size_bytes, high.sigma
    share = (size_bytes - low.size_bytes) / (high.size_bytes - low.size_bytes)
    return low.seconds + share * (high.seconds - low.seconds), low.sigma + share * (high.sigma - low.sigma)


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Time to compute ``new`` tokens after ``cached`` ones: ``fixed + a * new + b * new * (cached + new / 2)`` seconds.

    The quadratic term is attention. The constants fit vLLM 0.20.2 with Qwen3-Coder-30B-A3B on an H200 (8k tokens
    0.18 s, 32k 1.24 s, 131k 13.2 s). The correction is learned per power of two of the tokens computed, because
    hardware differs more in one term than in the other; a size without observations uses the nearest one's.
    """

    fixed_s: float = 0.02
    s_per_token: float = 1.68e-5
    s_per_token_squared: float = 1.275e-9
    weight: float = 0.1
    smallest_tokens: int = 1024
    """Shorter prefills are not learned from: scheduling time dominates."""
    _buckets: Mapping[int, LearnedRatio] = field(default_factory=dict)

    def predict(self, new_tokens: float, cached_tokens: float = 0.0) -> TimeEstimate:
        """Estimated seconds of one prefill on an otherwise idle instance."""
        if new_tokens <= 0:
            return TimeEstimate(self.fixed_s, 0.0)
        estimate = nearest_bucket(self._buckets, bucket_of(new_tokens))
        return TimeEstimate(self.formula_s(new_tokens, cached_tokens) * exp(estimate.log_ratio), estimate.sigma)

    def seconds(self, new_tokens: float, cached_tokens: float) -> float:
        """``predict(...).seconds`` without the spread, at half of its cost."""
        if new_tokens <= 0:
            return self.fixed_s
        attended = new_tokens * (cached_tokens + new_tokens / 2)
        formula_s = self.fixed_s + self.s_per_token * new_tokens + self.s_per_token_squared * attended
        return formula_s * self.factor(new_tokens) if self._buckets else formula_s

    def factor(self, new_tokens: float) -> float:
        """Learned factor of the formula for a prefill of this size, as in ``seconds``."""
        return exp(nearest_bucket(self._buckets, bucket_of(new_tokens)).log_ratio) if self._buckets else 1.0

    def factors(self, new_tokens: Iterable[float]) -> list[float]:
        """``factor`` of several sizes."""
        by_bucket: dict[int, float] = {}
        factors = []
        for each in new_tokens:
            bits = int(each).bit_length()
            factor = by_bucket.get(bits)
            if factor is None:
                factor = by_bucket[bits] = self.factor(each)
            factors.append(factor)
        return factors

    @property
    def buckets(self) -> Mapping[int, LearnedRatio]:
        """Learned corrections by the power of two of the tokens."""
        return self._buckets

    def scaled(self, log_ratio: float) -> PrefillModel:
        """The same model with every learned correction larger by this logarithm."""
        if not log_ratio:
            return self
        changed = {at: each._replace(log_ratio=each.log_ratio + log_ratio) for at, each in self._buckets.items()}
        return self.with_buckets(changed)

    def with_buckets(self, buckets: Mapping[int, LearnedRatio]) -> PrefillModel:
        """The same model with other learned corrections."""
        return replace(self, _buckets=dict(buckets))

    def queue_s(self, pending_tokens: float, requests: int) -> float:
        """Seconds to finish the pending tokens: ``requests`` prefills of equal length, the first of them half done."""
        if pending_tokens <= 0 or requests <= 0:
            return 0.0
        return self.seconds(pending_tokens / requests, 0.0) * (requests - 0.5)

    def queues_s(self, pending_tokens: Sequence[int], requests: Sequence[int]) -> list[float]:
        """``queue_s`` of several instances."""
        fixed_s, linear, squared = self.fixed_s, self.s_per_token, self.s_per_token_squared
        news = [pending / each if each > 0 else 0.0 for pending, each in zip(pending_tokens, requests, strict=True)]
        return [
            (fixed_s + linear * new + squared * (new * (0.0 + new / 2))) * factor * (each - 0.5) if new > 0 else 0.0
            for new, each, factor in zip(news, requests, self.factors(news), strict=True)
        ]

    @property
    def least_s_per_token(self) -> float:
        """Lower bound of the seconds of a prefill per new token, whatever its size."""
        learned = self._buckets
        if not learned:
            return self.s_per_token
        return self.s_per_token * exp(min([each.log_ratio for each in learned.values()]))

    def observe(self, new_tokens: float, cached_tokens: float, queue_s: float, seconds: float) -> PrefillModel:
        """Return the model after a first token that took ``seconds``, with ``queue_s`` of them expected as queueing."""
        if new_tokens < self.smallest_tokens:
            return self
        bucket = bucket_of(new_tokens)
        before = nearest_bucket(self._buckets, bucket)
        expected_s = self.formula_s(new_tokens, cached_tokens)
        # The expected queueing time is subtracted, but the rest is at least a tenth of the formula.
        computing_s = max(seconds - queue_s, 0.1 * min(expected_s, seconds))
        learned = before.learn(expected_s, computing_s, 0.0, self.weight)
        # Not `replace`, which visits every field: this runs for every first token.
        return PrefillModel(
            self.fixed_s,
            self.s_per_token,
            self.s_per_token_squared,
            self.weight,
            self.smallest_tokens,
            {**self._buckets, bucket: learned},
        )

    def formula_s(self, new_tokens: float, cached_tokens: float) -> float:
        """Seconds of one prefill by the constants alone, without what was learned."""
        attended = new_tokens * (cached_tokens + new_tokens / 2)
        return self.fixed_s + self.s_per_token * new_tokens + self.s_per_token_squared * attended


class Costs(NamedTuple):
    """All models at one moment."""

    prefill: PrefillModel = PrefillModel()
    transfer: TransferModel = TransferModel()
    now_s: float = 0.0
    bytes_per_token: float = KV_BYTES_PER_TOKEN
    short_step: ShortStep = UNKNOWN_STEP
    slowness: Slownesses = ALL_ALIKE
    """Factor of the times of prefills on each instance; empty while all count as equal."""
