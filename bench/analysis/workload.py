"""Anatomy of a trace in one pass: lengths, classes, reuse, gaps, sessions, arrivals, KV bytes.

Requests are taken from an iterator, so a trace of millions need not be in memory. Memory grows by about 70 bytes
for each request, a few hundred for each session, and the block ids of the reuse figures, which are bounded: when more
than ``remember_blocks`` are known, up to half of them, the least recently used, are dropped, and count as new when they
return.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import msgspec
import numpy as np

from policies.classes import ClassThresholds
from replayer.traces.trace import TraceRequest

REMEMBER_BLOCKS = 8_000_000


class QuantitySpread(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity over requests or sessions."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class IdealClassShare(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one class, by new tokens on one unlimited cache."""

    name: str
    requests: int
    request_share: float
    new_token_share: float


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """Hits of one cache for all requests, without eviction. Shares of prompt tokens unless said otherwise."""

    cached_share: float
    """The APC."""
    intra_session_share_of_hits: float
    """Share of hits that the session's own earlier turns provide."""
    cross_session_share_of_hits: float
    cross_session_share_of_tokens: float
    forgotten_blocks: int
    """Ids dropped to stay within the bound; above 0, the shares may be too low."""


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """Requests over time."""

    duration_s: float
    mean_per_s: float
    bin_s: float
    per_s: list[float]
    """Rate in each bin."""
    peak_per_s: float
    dispersion: float
    """Variance over mean of the requests in a bin: 1 for a Poisson process, more for bursts."""


class TraceAnatomy(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ``analyse workload``."""

    trace: str
    requests: int
    sessions: int | None
    """None: the trace names none."""
    subagent_requests: int
    prompt_tokens: QuantitySpread
    output_tokens: QuantitySpread
    new_tokens: QuantitySpread
    prefill_share: float
    """Prompt tokens over prompt and output tokens."""
    computed_prefill_share: float
    """The same with new tokens only."""
    classes: list[IdealClassShare]
    reuse: Reuse
    turns: QuantitySpread | None
    gap_s: QuantitySpread | None
    """Seconds between the arrivals of a session's consecutive requests."""
    gap_requests: QuantitySpread | None
    """The same, counted in requests of the trace: 1 is the very next."""
    think_time_s: QuantitySpread | None
    arrivals: Arrivals
    model: str
    kv_bytes_per_token: float
    kv_bytes: QuantitySpread
    """KV bytes of a request's prompt and output."""
    notes: list[str]


class SeenBlocks:
    """Blocks seen so far, with the sessions that used them; bounded by dropping the older of two generations."""

    def __init__(self, remember: int) -> None:
        self._half = max(1, remember // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._young_pairs: set[tuple[int, int]] = set()
        self._old_pairs: set[tuple[int, int]] = set()
        self.forgotten = 0

    def use(self, ids: Sequence[int], full: int, session: int) -> tuple[int, int]:
        """Leading blocks known, and known from ``session`` itself; adds all of the request's blocks.

        ``ids`` are chained, so both are found by bisection.
        """
        known = self._prefix(ids, full, None)
        own = self._prefix(ids, known, session) if session >= 0 else 0
        if session >= 0:
            self._young_pairs.update((block, session) for block in ids[own:known])
        if self._old:
            # A block that is used again becomes young. Young blocks are closed under prefixes, so the others begin at
            # one depth.
            young = self._prefix(ids, known, None, self._young)
            self._young.update((block, self._old.get(block, session)) for block in ids[young:known])
            self._young_pairs.update(
                (block, session) for block in ids[young:known] if (block, session) in self._old_pairs
            )
        self._young.update(dict.fromkeys(ids[known:full], session))
        if len(self._young) + len(self._young_pairs) > self._half:
            self.forgotten += len(self._old.keys() - self._young.keys())
            self._old, self._young = self._young, {}
            self._old_pairs, self._young_pairs = self._young_pairs, set()
        return known, own

    def _prefix(self, ids: Sequence[int], full: int, session: int | None, young: dict[int, int] | None = None) -> int:
        """Leading ids that are known, to ``session`` if given; with ``young`` only those in it."""
        known, unknown = 0, full + 1
        while unknown - known > 1:
            middle = (known + unknown) // 2
            block = ids[middle - 1]
            if block in young if young is not None else self._knows(block, session):
                known = middle
            else:
                unknown = middle
        return known

    def _knows(self, block: int, session: int | None) -> bool:
        first = self._young.get(block)
        if first is None:
            first = self._old.get(block)
        if session is None or first is None or first == session:
            return first is not None
        return (block, session) in self._young_pairs or (block, session) in self._old_pairs


class RequestColumns:
    """Columns with a value per request, 8 bytes each."""

    def __init__(self) -> None:
        self.prompt_tokens = array("q")
        self.output_tokens = array("q")
        self.cached_tokens = array("q")
        self.own_tokens = array("q")
        self.arrival_s = array("d")
        self.gap_s = array("d")
        self.gap_requests = array("q")
        self.think_time_s = array("d")
        self.turns: array[int] = array("q")


def columns(
    requests: Iterable[TraceRequest], block_tokens: int, remember_blocks: int = REMEMBER_BLOCKS
) -> tuple[RequestColumns, int, int, SeenBlocks]:
    """One pass over a trace in time order.

    Returns:
        Figures by request; named sessions; requests of sub-agents; the blocks.

    Raises:
        ValueError: requests are not in time order.
    """
    found, blocks = RequestColumns(), SeenBlocks(remember_blocks)
    last: dict[str, tuple[int, float, int, int]] = {}
    """By session: its number, the time and index of its last request, its turns."""
    subagents = 0
    clock_s = -inf
    for index, request in enumerate(requests):
        if request.timestamp_s < clock_s:
            raise ValueError(
                f"request {index + 1} comes before the one above it; a trace must be in time order "
                "(without --stream it is sorted)"
            )
        clock_s = request.timestamp_s
        number = -1
        if request.session_id:
            before = last.get(request.session_id)
            number = len(last) if before is None else before[0]
            if before is not None:
                found.gap_s.append(request.timestamp_s - before[1])
                found.gap_requests.append(index - before[2])
            turns = 1 if before is None else before[3] + 1
            last[request.session_id] = (number, request.timestamp_s, index, turns)
        known, own = blocks.use(request.hash_ids, request.full_blocks(block_tokens), number)
        found.prompt_tokens.append(request.input_length)
        found.output_tokens.append(request.output_length)
        found.cached_tokens.append(known * block_tokens)
        found.own_tokens.append(own * block_tokens)
        found.arrival_s.append(request.timestamp_s)
        if request.think_time_s is not None:
            found.think_time_s.append(request.think_time_s)
        subagents += request.subagent
    found.turns.extend(turns for _, _, _, turns in last.values())
    return found, len(last), subagents, blocks


def anatomy(
    requests: Iterable[TraceRequest],
    block_tokens: int,
    *,
    name: str = "",
    model: str = "",
    kv_bytes_per_token: float,
    bin_s: float | None = None,
    thresholds: ClassThresholds | None = None,
    remember_blocks: int = REMEMBER_BLOCKS,
    notes: Sequence[str] = (),
) -> tuple[TraceAnatomy, RequestColumns]:
    """All figures of a trace, and the columns they are computed from.

    Args:
        requests: In time order, ids chained.
        block_tokens: Tokens of a block id.
        name: Of the trace.
        model: Model that ``kv_bytes_per_token`` belongs to.
        kv_bytes_per_token: Bytes of one token's KV cache.
        bin_s: Width of the bins of the arrival rate; by default a sixtieth of the trace, at least a second.
        thresholds: Bounds of the classes.
        remember_blocks: Most block ids kept.
        notes: Of the loader.

    Raises:
        ValueError: there are no requests, or they are not in time order.
    """
    found, sessions, subagents, blocks = columns(requests, block_tokens, remember_blocks)
    prompt = np.asarray(found.prompt_tokens, dtype=np.int64)
    if not prompt.size:
        raise ValueError("the trace has no requests")
    output = np.asarray(found.output_tokens, dtype=np.int64)
    cached = np.asarray(found.cached_tokens, dtype=np.int64)
    own = np.asarray(found.own_tokens, dtype=np.int64)
    new = prompt - cached
    hits = int(cached.sum())
    result = TraceAnatomy(
        trace=name,
        requests=int(prompt.size),
        sessions=sessions or None,
        subagent_requests=subagents,
        prompt_tokens=spread(prompt),
        output_tokens=spread(output),
        new_tokens=spread(new),
        prefill_share=_share(prompt.sum(), prompt.sum() + output.sum()),
        computed_prefill_share=_share(new.sum(), new.sum() + output.sum()),
        classes=_classes(new, thresholds or ClassThresholds()),
        reuse=Reuse(
            cached_share=_share(hits, prompt.sum()),
            intra_session_share_of_hits=_share(own.sum(), hits),
            cross_session_share_of_hits=_share(hits - own.sum(), hits),
            cross_session_share_of_tokens=_share(hits - own.sum(), prompt.sum()),
            forgotten_blocks=blocks.forgotten,
        ),
        turns=_spread_or_none(found.turns),
        gap_s=_spread_or_none(found.gap_s),
        gap_requests=_spread_or_none(found.gap_requests),
        think_time_s=_spread_or_none(found.think_time_s),
        arrivals=_arrivals(np.asarray(found.arrival_s), bin_s),
        model=model,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_bytes=spread((prompt + output) * kv_bytes_per_token),
        notes=list(notes),
    )
    return result, found


def spread(values: Any) -> QuantitySpread:
    """Mean and quantiles of at least one value; quantiles are linear between order statistics."""
    data = np.asarray(values, dtype=float)
    p50, p90, p99 = np.quantile(data, (0.5, 0.9, 0.99))
    return QuantitySpread(
        n=int(data.size), mean=float(data.mean()), p50=float(p50), p90=float(p90), p99=float(p99), max=float(data.max())
    )


def _spread_or_none(values: Sequence[float]) -> QuantitySpread | None:
    return spread(values) if len(values) else None


def _share(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else 0.0


def _classes(new: Any, thresholds: ClassThresholds) -> list[IdealClassShare]:
    bounds = (0, thresholds.medium_tokens, thresholds.heavy_tokens, int(new.max()) + thresholds.heavy_tokens + 1)
    rows = []
    for name, low, high in zip(("WARM", "MEDIUM", "HEAVY"), bounds, bounds[1:], strict=False):
        chosen = new[(new >= low) & (new < high)]
        rows.append(
            IdealClassShare(
                name=name,
                requests=int(chosen.size),
                request_share=chosen.size / new.size,
                new_token_share=_share(chosen.sum(), new.sum()),
            )
        )
    return rows


def _arrivals(times_s: Any, bin_s: float | None) -> Arrivals:
    start_s, duration_s = float(times_s.min()), float(times_s.max() - times_s.min())
    width_s = bin_s or max(1.0, duration_s / 60)
    bins = max(1, int(np.ceil(duration_s / width_s)))
    counts = np.bincount(np.minimum(((times_s - start_s) / width_s).astype(np.int64), bins - 1), minlength=bins)
    mean = float(counts.mean())
    return Arrivals(
        duration_s=duration_s,
        mean_per_s=float(times_s.size / duration_s) if duration_s else 0.0,
        bin_s=width_s,
        per_s=[float(each) / width_s for each in counts],
        peak_per_s=float(counts.max()) / width_s,
        dispersion=float(counts.var() / mean) if mean else 0.0,
    )
