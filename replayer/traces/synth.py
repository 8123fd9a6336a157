"""Synthetic agentic traces: seeded, with the lengths, sharing and spacing of `replayer.traces.synth_targets`.

Four steps:
1. Prompt lengths: one draw from each of N equal slices of the target distribution, so its quantiles hold exactly.
2. Sessions: lengths are assigned in ascending order, each starting a session or continuing an open one, so prompts of
   a session only grow and each contains the one before. How far back the continued session lies (its ``reach``) decides
   how many tokens are new per turn; it is solved for the target share of intra-session hits.
3. System prompts: sessions of one family begin alike; the common length is solved for the target APC.
4. Order and time: each next turn is due a log-normal number of requests later (p50 2, p90 12, solved against what
   queueing adds); free places start sessions. Arrivals are a Poisson process of the given rate.

Only uniform doubles of PCG64 are used, with this module's inverse transforms: a seed gives the same bytes everywhere.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Iterator
from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt

from replayer.traces import synth_targets as targets
from replayer.traces.numbers import is_positive
from replayer.traces.trace import Trace, TraceError, TraceRequest

_KNOTS = ((0.0, 600), (0.23, 5_000), (0.495, 20_000), (0.9, 88_000), (0.99, 125_000), (1.0, 165_000))
"""(share of requests, prompt tokens): published quantiles, and the class mix read as lengths."""
_START_SHARE = ((5_000, 0.85), (20_000, 0.5), (math.inf, 0.12))
"""Share of prompts up to a length that begin a session: short ones are single calls, long ones grew."""
_SINGLE_CALL_TOKENS = 5_000
_SINGLE_CALL_SHARE = 0.9
_FAMILIES = ((1.0, 0.42), (0.7, 0.22), (1.3, 0.14), (0.9, 0.10), (0.5, 0.07), (1.6, 0.05))
"""(relative length of the system prompt, share of sessions) of each family."""
_MAX_OUTPUT_TOKENS = 32_000
_Floats = npt.NDArray[np.float64]


class SynthOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a synthetic trace."""

    requests: int = 1000
    seed: int = 0
    rate_per_s: float = 1.0
    """Mean arrivals per second."""
    block_tokens: int = 64
    gap_scale: float = 1.0
    """Factor on the requests between a session's turns; 10 keeps ten times as many sessions open."""
    length_scale: float = 1.0
    """Factor on all lengths, prompts and outputs; sharing stays the same."""

    def check(self) -> None:
        """Check that the settings can be met; raises TraceError."""
        if self.requests < 1 or self.block_tokens < 1:
            raise TraceError("--requests and --block-tokens must be at least 1")
        if not is_positive(self.rate_per_s, self.length_scale, self.gap_scale):
            raise TraceError("--rate-per-s, --duration-s, --gap-scale and --length-scale must be finite and above 0")


class _Session(msgspec.Struct):
    lengths: list[int]
    family: int = 0
    shared_tokens: int = 0


def _solve(function: Callable[[float], float], low: float, high: float, target: float) -> float:
    """Argument at which a monotone function reaches the target, by bisection; else the nearer end."""
    rising = function(high) > function(low)
    for _ in range(40):
        middle = (low + high) / 2
        if (function(middle) < target) == rising:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _stratified(rng: np.random.Generator, count: int) -> _Floats:
    """One uniform draw from each of ``count`` equal slices of (0, 1), ascending."""
    return (np.arange(count) + rng.random(count)) / count


def prompt_lengths(places: _Floats) -> _Floats:
    """Prompt lengths at ascending places of the distribution, before scaling.

    Between two knots the quantile function is a blend of straight and exponential, the same everywhere, so that the
    mean is as published.
    """
    shares = [share for share, _ in _KNOTS]
    tokens = np.array([length for _, length in _KNOTS], dtype=float)
    grid = (np.arange(20_000) + 0.5) / 20_000

    def blended(at: _Floats, straight: float) -> _Floats:
        exponential = np.exp(np.interp(at, shares, np.log(tokens)))
        mixed: _Floats = straight * np.interp(at, shares, tokens) + (1 - straight) * exponential
        return mixed

    straight = _solve(lambda share: float(blended(grid, share).mean()), 0.0, 1.0, targets.INPUT_MEAN_TOKENS)
    return blended(places, straight)


def output_lengths(places: _Floats) -> _Floats:
    """Log-normal output lengths (cut at 32k) with the published median and mean, before scaling."""
    normal = NormalDist()
    grid = np.array([normal.inv_cdf(float(p)) for p in (np.arange(5_000) + 0.5) / 5_000])

    def at(scores: _Floats, sigma: float) -> _Floats:
        cut: _Floats = np.minimum(targets.OUTPUT_P50_TOKENS * np.exp(sigma * scores), _MAX_OUTPUT_TOKENS)
        return cut

    sigma = _solve(lambda s: float(at(grid, s).mean()), 0.1, 4.0, targets.OUTPUT_MEAN_TOKENS)
    return at(np.array([normal.inv_cdf(min(max(float(p), 1e-9), 1 - 1e-9)) for p in places]), sigma)


def _group(lengths: list[int], draws: _Floats, reach: float, scale: float) -> list[_Session]:
    """Assign ascending lengths to sessions; ``draws`` has shape (3, N)."""
    sessions: list[_Session] = []
    growing: list[_Session] = []
    for length, start, place, single in zip(lengths, *draws.tolist(), strict=True):
        share = next(share for bound, share in _START_SHARE if length < bound * scale)
        if not growing or start < share:
            session = _Session([length])
            sessions.append(session)
            if length >= _SINGLE_CALL_TOKENS * scale or single >= _SINGLE_CALL_SHARE:
                growing.append(session)
            continue
        back = int(-math.log1p(-place) * reach * len(growing)) % len(growing)
        session = growing.pop(len(growing) - 1 - back)
        session.lengths.append(length)
        growing.append(session)
    return sessions


def _intra_tokens(sessions: list[_Session], block: int) -> int:
    return sum(length // block * block for session in sessions for length in session.lengths[:-1])


def _share_system_prompts(sessions: list[_Session], draws: _Floats, size: float, block: int) -> int:
    """Give every session a family and a shared beginning; returns the hits of first turns in this order."""
    bounds = np.cumsum([share for _, share in _FAMILIES])
    families = np.minimum(np.searchsorted(bounds, draws), len(_FAMILIES) - 1).tolist()
    longest = [0] * len(_FAMILIES)
    hits = 0
    for session, family in zip(sessions, families, strict=True):
        wanted = min(_FAMILIES[family][0] * size, 0.9 * session.lengths[0])
        session.family = family
        session.shared_tokens = int(wanted) // block * block
        hits += min(session.shared_tokens, longest[family])
        longest[family] = max(longest[family], session.shared_tokens)
    return hits


def _order(sessions: list[_Session], scores: list[float], median: float, sigma: float) -> list[int]:
    """Session of each request: turns when due, new sessions (in order) where none is."""
    due: list[tuple[float, int]] = []
    left = [len(session.lengths) for session in sessions]
    order: list[int] = []
    started = 0
    for position in range(sum(left)):
        if due and (due[0][0] <= position or started == len(sessions)):
            index = heapq.heappop(due)[1]
        else:
            index = started
            started += 1
        order.append(index)
        left[index] -= 1
        if left[index]:
            heapq.heappush(due, (position + max(median * math.exp(sigma * scores[position]), 1.0), index))
    return order


def _gap_quantile(order: list[int], share: float) -> float:
    last: dict[int, int] = {}
    gaps = []
    for position, index in enumerate(order):
        if index in last:
            gaps.append(position - last[index])
        last[index] = position
    return float(np.quantile(gaps, share)) if gaps else 0.0


def _spaced(sessions: list[_Session], scores: list[float], scale: float) -> list[int]:
    """The order whose gaps are nearest to ``scale`` times the published p50 and p90."""
    p50, p90 = targets.GAP_P50_REQUESTS, targets.GAP_P90_REQUESTS
    spread = math.log(p90 / p50) / NormalDist().inv_cdf(0.9)
    best: tuple[float, list[int]] | None = None
    for median in (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2):
        for sigma in (0.8 * spread, 0.9 * spread, spread, 1.1 * spread, 1.2 * spread):
            order = _order(sessions, scores, median * scale, sigma)
            miss = abs(math.log(max(_gap_quantile(order, 0.5), 0.1) / (p50 * scale))) + abs(
                math.log(max(_gap_quantile(order, 0.9), 0.1) / (p90 * scale))
            )
            if best is None or miss < best[0]:
                best = (miss, order)
    assert best is not None
    return best[1]


def synthesise(options: SynthOptions) -> Iterator[TraceRequest]:
    """Requests of a synthetic trace in time order.

    Raises:
        TraceError: settings that cannot be met.
    """
    options.check()
    count, block, scale = options.requests, options.block_tokens, options.length_scale
    rng = np.random.Generator(np.random.PCG64(options.seed))
    inputs = [max(round(x * scale), 2) for x in prompt_lengths(_stratified(rng, count)).tolist()]
    outputs = output_lengths(_stratified(rng, count))[np.argsort(rng.random(count))].tolist()
    draws = rng.random((3, count))
    total = sum(inputs)
    wanted = targets.APC * targets.INTRA_SESSION_SHARE * total
    reach = _solve(lambda r: _intra_tokens(_group(inputs, draws, r, scale), block), 0.002, 3.0, wanted)
    sessions = _group(inputs, draws, reach, scale)
    sessions = [sessions[index] for index in np.argsort(rng.random(len(sessions))).tolist()]
    family_draws = rng.random(len(sessions))
    cross = targets.APC * total - _intra_tokens(sessions, block)
    size = _solve(
        lambda s: _share_system_prompts(sessions, family_draws, s, block), 0.0, targets.INPUT_MEAN_TOKENS * scale, cross
    )
    _share_system_prompts(sessions, family_draws, size, block)
    normal = NormalDist()
    scores = [normal.inv_cdf(min(max(p, 1e-9), 1 - 1e-9)) for p in rng.random(count).tolist()]
    order = _spaced(sessions, scores, options.gap_scale)
    times = np.cumsum(-np.log1p(-rng.random(count)) / options.rate_per_s)
    times -= times[0]
    yield from _emit(sessions, order, outputs, times.tolist(), options)


def _emit(
    sessions: list[_Session], order: list[int], outputs: list[float], times: list[float], options: SynthOptions
) -> Iterator[TraceRequest]:
    """Write ids: a family's blocks, then the session's own; a partial last block has an id of its own."""
    block = options.block_tokens
    families: list[list[int]] = [[] for _ in _FAMILIES]
    chains: dict[int, list[int]] = {}
    turns: dict[int, tuple[int, int]] = {}
    next_id = 0
    for chat_id, index in enumerate(order):
        session = sessions[index]
        parent, turn = turns.get(index, (-1, 0))
        if turn == 0:
            family, shared = families[session.family], session.shared_tokens // block
            missing = max(shared - len(family), 0)
            family.extend(range(next_id, next_id + missing))
            next_id += missing
            chains[index] = family[:shared]
        length = session.lengths[turn]
        chain = chains[index]
        missing = max(length // block - len(chain), 0)
        chain.extend(range(next_id, next_id + missing))
        next_id += missing
        ids = array("q", chain[: length // block])
        if length % block:
            ids.append(next_id)
            next_id += 1
        turns[index] = (chat_id, turn + 1)
        if turn + 1 == len(session.lengths):
            del chains[index], turns[index]
        yield TraceRequest(
            chat_id=chat_id,
            parent_chat_id=parent,
            session_id=f"synth-{index}",
            turn=turn + 1,
            timestamp_s=round(times[chat_id], 6),
            input_length=length,
            output_length=max(round(outputs[chat_id] * options.length_scale), 1),
            hash_ids=ids,
            type="coder",
            tenant=str(session.family),
        )


def synthetic_trace(options: SynthOptions) -> Trace:
    """A synthetic trace in memory (for the simulator and tests; the command line streams to a file)."""
    return Trace(
        requests=list(synthesise(options)), block_tokens=options.block_tokens, tail="ceil", name=f"synth-{options.seed}"
    )
