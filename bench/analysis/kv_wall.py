"""KV capacity: requests that fit a pool, and the load at which static prefill/decode separation runs out of it.

Assumptions, simple on purpose:

- Pool = visible memory x utilisation - weights - overhead (activations, CUDA graphs, context), or a given size.
- Arrivals are Poisson at a given rate; prompts, outputs and new tokens are the trace's. Requests of one session do not
  share blocks while in flight.
- P instances: M/G/1 queues of prefills at the profile's times (Pollaczek-Khinchine for the mean wait).
- D instances: a request holds blocks for prompt and output from the pull (or from its arrival, if both legs are sent
  at once) until it is done. TPOT is the fixed point of Little's law with the profile's decode step: streams = rate x
  output x TPOT(streams). Requests in flight are then M/G/infinity and the KV they hold is compound Poisson, as if the
  pool were unlimited; KV beyond its size is work that waits for room.
- Co-located: every instance prefills and decodes; a request holds its blocks from the start of its prefill; decodes get
  tokens only in the share of time that is not prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.analysis.architecture import Architecture
from bench.analysis.output import AnalysisError
from bench.analysis.sheets import GpuSheet
from replayer.traces.ideal import cached_tokens, sticky
from replayer.traces.trace import Trace
from sim.fit import model_prefill
from sim.hardware import HardwareProfile

OVERFLOW_CHANCE = 0.01
"""A pool is too small when the requests in flight need more than its size for this share of the time."""
MAX_RATE_FACTOR = 1 << 12
_STEPS = 40
_GRID = 1 << 13


class Handoff(StrEnum):
    """Time at which a decode instance begins to hold a request's blocks."""

    PULL = "pull"
    """After the prefill: the P leg is awaited first."""
    ARRIVAL = "arrival"
    """At the request's arrival: both legs are sent at once and D waits with its blocks allocated."""


class SplitVerdict(StrEnum):
    """Verdict on a split: it keeps up, or the resource that fails first."""

    OK = "ok"
    PREFILL = "prefill too slow"
    DECODE = "decode too slow"
    KV = "KV full"


class InstancePool(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's KV pool and the terms it is computed from, in bytes."""

    given: bool
    visible_bytes: float
    utilisation: float
    weight_bytes: float
    overhead_bytes: float
    pool_bytes: float
    pool_tokens: int


class PoolFit(msgspec.Struct, frozen=True, kw_only=True):
    """Number of requests of one size that fit a pool."""

    size: str
    tokens: float
    kv_bytes: float
    requests: float


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """One way to use the fleet at the given load. Co-located: ``prefill`` is 0."""

    prefill: int
    decode: int
    prefill_busy: float
    """Share of time the prefilling instances compute prefills; from 1 on their queue grows without bound."""
    prefill_wait_s: float | None
    """Mean time in the queue in seconds; None: unbounded."""
    streams: float | None
    """Mean requests decoding on one decode instance; None: they cannot keep up."""
    tpot_s: float | None
    hold_s: float | None
    """Mean seconds for which a request holds blocks on its decode instance; None: unbounded."""
    kv_mean_bytes: float | None
    """Mean KV held on one decode instance."""
    kv_p99_bytes: float | None
    overflow: float
    """Share of time in which the requests in flight need more than the pool."""
    verdict: SplitVerdict
    breaks_at: float | None
    """Rate, in multiples of the given one, at which this split first fails; None: beyond 4096."""
    breaks_by: SplitVerdict
    """The resource that fails at that rate."""


class KvWall(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ``analyse kv-wall``."""

    trace: str
    model: str
    gpu: str
    profile: str
    transport: str
    handoff: Handoff
    rate_per_s: float
    prefill_hits: bool
    kv_bytes_per_token: float
    pool: InstancePool
    profile_pool_bytes: float
    """The pool according to the hardware profile."""
    fits: list[PoolFit]
    splits: list[Split]


class TraceLoad(NamedTuple):
    """The trace's requests as arrays, one value for each."""

    prompt: Any
    output: Any
    new: Any
    """Tokens to prefill."""


def kv_pool(
    model: Architecture,
    gpu: GpuSheet,
    *,
    weight_bytes: float,
    kv_bytes_per_token: float,
    gpus: int,
    utilisation: float,
    overhead_bytes: float,
    given_bytes: float | None,
) -> InstancePool:
    """The pool of one instance.

    Raises:
        AnalysisError: nothing is left after weights and overhead.
    """
    visible = gpus * gpu.visible_bytes
    left = visible * utilisation - weight_bytes - gpus * overhead_bytes
    pool = left if given_bytes is None else given_bytes
    if pool < kv_bytes_per_token:
        raise AnalysisError(
            f"{model.name} leaves no room for KV on {gpus} x {gpu.name}: {visible * utilisation / 2**30:,.1f} GiB may "
            f"be used, weights take {weight_bytes / 2**30:,.1f}; give more --gpus or --weight-bits 8"
        )
    return InstancePool(
        given=given_bytes is not None,
        visible_bytes=visible,
        utilisation=utilisation,
        weight_bytes=weight_bytes,
        overhead_bytes=gpus * overhead_bytes,
        pool_bytes=pool,
        pool_tokens=int(pool / kv_bytes_per_token),
    )


def fits(trace: Trace, pool: InstancePool, kv_bytes_per_token: float, extra: Sequence[int] = ()) -> list[PoolFit]:
    """Mean, p50, p90, p99 and longest request of a trace, and requests of ``extra`` tokens, against the pool."""
    tokens = np.array([request.input_length + request.output_length for request in trace.requests], dtype=float)
    sizes = {"mean": tokens.mean()} | {f"p{q}": np.quantile(tokens, q / 100) for q in (50, 90, 99)}
    return [
        PoolFit(
            size=name,
            tokens=float(size),
            kv_bytes=float(size * kv_bytes_per_token),
            requests=float(pool.pool_bytes / (size * kv_bytes_per_token)) if size else 0.0,
        )
        for name, size in [*sizes.items(), ("longest", tokens.max()), *(("asked for", size) for size in extra)]
    ]


def load_of(trace: Trace, instances: int, hits: bool) -> TraceLoad:
    """Requests with the tokens left to compute on ``instances`` caches without limit, sessions sticking to one.

    With ``hits`` False every prompt is computed in full.
    """
    prompt = np.array([request.input_length for request in trace.requests], dtype=float)
    output = np.array([max(1, request.output_length) for request in trace.requests], dtype=float)
    cached = cached_tokens(trace.requests, trace.block_tokens, sticky(instances)) if hits else [0] * len(prompt)
    return TraceLoad(prompt, output, prompt - np.array(cached, dtype=float))


class SplitFleet(NamedTuple):
    """Timing and pool of one instance, shared by all splits of a fleet."""

    profile: HardwareProfile
    pool: InstancePool
    kv_bytes_per_token: float
    transport: str
    handoff: Handoff


def assess(
    trace: Trace, fleet: SplitFleet, splits: Sequence[tuple[int, int]], rate_per_s: float, hits: bool
) -> list[Split]:
    """Every split of the fleet at the given rate, and the rate at which each fails.

    Args:
        trace: Lengths and reuse.
        fleet: Timing and pool of one instance.
        splits: (P, D) pairs; P = 0 is co-located on D instances.
        rate_per_s: Requests per second for the whole fleet.
        hits: True if prefixes are reused where the prefill runs.
    """
    found = []
    for prefill, decode in splits:
        load = load_of(trace, prefill or decode, hits)
        prefill_s = _prefill_seconds(fleet.profile, load)
        at = _state(fleet, load, prefill_s, prefill, decode, rate_per_s)
        low, high = (0.0, 1.0) if at.verdict is not SplitVerdict.OK else (1.0, 2.0)
        failing = at
        while high < MAX_RATE_FACTOR and failing.verdict is SplitVerdict.OK:
            failing = _state(fleet, load, prefill_s, prefill, decode, rate_per_s * high)
            low, high = (high, high * 2) if failing.verdict is SplitVerdict.OK else (low, high)
        for _ in range(_STEPS if failing.verdict is not SplitVerdict.OK else 0):
            middle = (low + high) / 2
            state = _state(fleet, load, prefill_s, prefill, decode, rate_per_s * middle)
            if state.verdict is SplitVerdict.OK:
                low = middle
            else:
                high, failing = middle, state
        breaks = failing.verdict is not SplitVerdict.OK
        found.append(msgspec.structs.replace(at, breaks_at=high if breaks else None, breaks_by=failing.verdict))
    return found


def over_rates(
    trace: Trace, fleet: SplitFleet, split: tuple[int, int], rates_per_s: Sequence[float], hits: bool
) -> list[Split]:
    """One split at several rates (``breaks_at`` is not computed)."""
    prefill, decode = split
    load = load_of(trace, prefill or decode, hits)
    seconds = _prefill_seconds(fleet.profile, load)
    return [_state(fleet, load, seconds, prefill, decode, rate) for rate in rates_per_s]


def _prefill_seconds(profile: HardwareProfile, load: TraceLoad) -> Any:
    """Prefill seconds of every request on an idle instance."""
    budget = profile.max_num_batched_tokens
    return np.array(
        [
            model_prefill(profile.timing, max(1, int(new)), int(prompt - max(1, new)), 0, 0, budget).ttft_s
            for prompt, new in zip(load.prompt, load.new, strict=True)
        ]
    )


def _state(fleet: SplitFleet, load: TraceLoad, prefill_s: Any, prefill: int, decode: int, rate_per_s: float) -> Split:
    """Queues and KV at one rate."""
    each_p = rate_per_s / (prefill or decode)
    busy = float(each_p * prefill_s.mean())
    wait_s = each_p * float((prefill_s**2).mean()) / (2 * (1 - busy)) if busy < 1 else None
    each_d = rate_per_s / decode
    free = 1.0 if prefill else max(0.0, 1.0 - busy)
    streams, tpot_s = _decoding(fleet.profile, load, each_d, free)
    hold_s = kv_mean = kv_p99 = None
    overflow = 1.0
    if tpot_s is not None and (wait_s is not None or (prefill and fleet.handoff is Handoff.PULL)):
        held_s = load.output * tpot_s
        if not prefill:
            held_s = held_s + prefill_s
        else:
            size = load.prompt * fleet.kv_bytes_per_token
            held_s = held_s + _transfers(fleet, size, streams or 0.0)
            if fleet.handoff is Handoff.ARRIVAL:
                held_s = held_s + prefill_s + wait_s
        kv = (load.prompt + load.output) * fleet.kv_bytes_per_token
        hold_s = float(held_s.mean())
        kv_mean = each_d * float((kv * held_s).mean())
        kv_p99, overflow = held_kv(kv, held_s, each_d, fleet.pool.pool_bytes)
    return Split(
        prefill=prefill,
        decode=decode,
        prefill_busy=busy,
        prefill_wait_s=wait_s,
        streams=streams,
        tpot_s=tpot_s,
        hold_s=hold_s,
        kv_mean_bytes=kv_mean,
        kv_p99_bytes=kv_p99,
        overflow=overflow,
        verdict=_verdict(busy, tpot_s, overflow),
        breaks_at=None,
        breaks_by=SplitVerdict.OK,
    )


def held_kv(kv_bytes: Any, held_s: Any, rate_per_s: float, pool_bytes: float) -> tuple[float, float]:
    """99th percentile of the KV that requests in flight hold (bytes), and the chance that it exceeds the pool.

    Compound Poisson: at any time ``rate x mean(held)`` requests on average, each drawn with a weight equal to its
    holding time. The distribution is computed on a grid by the Fourier transform, ``exp(n (F - 1))``.
    """
    requests = rate_per_s * float(held_s.mean())
    weights = held_s / held_s.sum()
    mean = requests * float((kv_bytes * weights).sum())
    deviation = float(np.sqrt(requests * (kv_bytes**2 * weights).sum()))
    width = max(2 * pool_bytes, 2 * (mean + 8 * deviation), 2 * float(kv_bytes.max())) / _GRID
    # Each size is shared between the two grid points around it, so that the mean is kept.
    place = kv_bytes / width
    below = np.floor(place).astype(np.int64)
    sizes = np.bincount(below, weights * (below + 1 - place), _GRID)
    sizes += np.bincount(below + 1, weights * (place - below), _GRID)[:_GRID]
    chances = np.fft.irfft(np.exp(requests * (np.fft.rfft(sizes) - 1.0)), _GRID).clip(0.0)
    reached = np.cumsum(chances)
    p99 = width * int(np.searchsorted(reached, 0.99 * reached[-1]))
    within = reached[min(_GRID - 1, int(pool_bytes / width))] / reached[-1]
    return p99, float(max(0.0, 1.0 - within))


def _verdict(busy: float, tpot_s: float | None, overflow: float) -> SplitVerdict:
    if busy >= 1:
        return SplitVerdict.PREFILL
    if tpot_s is None:
        return SplitVerdict.DECODE
    return SplitVerdict.KV if overflow >= OVERFLOW_CHANCE else SplitVerdict.OK


def _decoding(
    profile: HardwareProfile, load: TraceLoad, rate_per_s: float, free: float
) -> tuple[float | None, float | None]:
    """Streams and TPOT of one decode instance, by bisection for Little's law; (None, None): it cannot keep up."""
    output = float(load.output.mean())
    # A stream's context is weighted by its decode time.
    context = float(((load.prompt + load.output / 2) * load.output).sum() / load.output.sum())
    timing = profile.timing

    def tpot_s(streams: float) -> float:
        experts = timing.decode_experts_s * (1.0 - timing.expert_miss**streams)
        step_s: float = timing.decode_s + experts + timing.decode_context_s * streams * context
        return step_s / free

    def excess(streams: float) -> float:
        return rate_per_s * output * tpot_s(streams) - streams

    low, high = 0.0, float(profile.max_num_seqs)
    if free <= 0 or excess(high) > 0:
        return None, None
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high, tpot_s(high)


def _transfers(fleet: SplitFleet, size_bytes: Any, streams: float) -> Any:
    """Seconds to move each request's KV with ``streams`` decoding on either side."""
    table = fleet.profile.transport(fleet.transport)
    top = float(size_bytes.max())
    grid = np.linspace(0.0, top, 257)[1:] if top else np.array([1.0])
    seconds = [table.seconds(int(size), streams, 1) for size in grid]
    return np.interp(size_bytes, np.concatenate(([0.0], grid)), [0.0, *seconds])
