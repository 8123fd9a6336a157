"""Share of a trace's reuse that remains after placement on N instances and with a KV pool of bounded size.

APC (here) is prompt tokens of full blocks found in the cache over all prompt tokens. Requests are taken one after the
other in the order of arrival; a request's blocks are hits, then all of its blocks are in the cache and others leave
until the pool is within its size. Output tokens, partial blocks and the overlap of requests are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

import msgspec

from bench.analysis.caching.eviction import Belady, Eviction, Lfu, Lru, Use, next_uses
from bench.analysis.caching.placement import Placement, place
from bench.analysis.caching.prefix_tree import RunTree, build
from bench.analysis.caching.protecting import SessionProtecting
from replayer.traces.ideal import Ideal, ideal
from replayer.traces.trace import Trace


class CachePolicy(StrEnum):
    """Eviction policy of a full cache."""

    INFINITE = "infinite"
    LRU = "lru"
    LFU = "lfu"
    SESSION_PROTECTING = "session_protecting"
    BELADY = "belady"


BOUNDS = frozenset({CachePolicy.INFINITE, CachePolicy.BELADY})
"""Bounds that no engine can implement: no limit, and knowledge of the future."""


class HotSet(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of blocks that have been used and will be used again: the content of a cache that knows the future."""

    mean_tokens: float
    """Mean over the requests of the trace."""
    peak_tokens: int
    distinct_tokens: int
    """Tokens of all distinct full blocks."""


class PoolSize(msgspec.Struct, frozen=True, kw_only=True):
    """The KV pool of one instance."""

    tokens: int
    hot_sets: float | None = None
    """Requested size: the fleet's pools together over the peak of the hot set."""


class CachePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated combination. Shares are of all prompt tokens."""

    placement: str
    """A rule of placement, or ``one_cache``: all instances' pools as one."""
    instances: int
    policy: CachePolicy
    pool_tokens: int | None
    """Pool of one instance; None: unlimited."""
    pool_hot_sets: float | None
    apc: float
    routing_loss: float
    """APC of one unlimited cache less that of unlimited caches under this placement."""
    eviction_loss: float
    """APC of unlimited caches under this placement less that of these caches."""
    is_bound: bool


class CacheStudy(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ``analyse cache``."""

    trace: str
    sha256: str
    requests: int
    sessions: int
    prompt_tokens: int
    block_tokens: int
    instances: int
    hot_set: HotSet
    ideal: Ideal
    ideal_as_stored: Ideal | None
    """Ideal figures by bisection over the ids as stored, unchained, as in published figures."""
    points: list[CachePoint]
    notes: list[str]


def hot_set(tree: RunTree) -> HotSet:
    """Size of the set of blocks between two of their uses, after each request. O(runs used)."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, path in enumerate(tree.paths):
        for run in path:
            first.setdefault(run, index)
            last[run] = index
    changes = [0] * (len(tree.paths) + 1)
    for run, start in first.items():
        changes[start] += tree.run_blocks[run]
        changes[last[run]] -= tree.run_blocks[run]
    blocks = peak = total = 0
    for change in changes[: len(tree.paths)]:
        blocks += change
        peak = max(peak, blocks)
        total += blocks
    return HotSet(
        mean_tokens=total * tree.block_tokens / max(1, len(tree.paths)),
        peak_tokens=peak * tree.block_tokens,
        distinct_tokens=tree.distinct_tokens,
    )


class _Cache:
    """One instance's prefix cache of ``capacity`` blocks."""

    def __init__(self, run_blocks: Sequence[int], capacity: int, eviction: Eviction) -> None:
        self._run_blocks = run_blocks
        self._capacity = capacity
        self._eviction = eviction
        self._cached: dict[int, int] = {}
        self._used = 0

    def serve(self, use: Use) -> int:
        """Hit blocks of a request, whose blocks are then cached as far as the pool holds them."""
        hits = 0
        whole = True
        for run in use.path:
            blocks, cached = self._run_blocks[run], self._cached.get(run, 0)
            if whole:
                hits += cached
                whole = cached == blocks
            self._cached[run] = blocks
            self._used += blocks - cached
        self._eviction.use(use)
        while self._used > self._capacity:
            victim = self._eviction.victim()
            if victim is None:
                self._shorten(use.path)
                break
            self._take(victim)
        return hits

    def _take(self, run: int) -> None:
        cached = self._cached[run]
        taken = min(cached, self._used - self._capacity)
        self._used -= taken
        if taken == cached:
            del self._cached[run]
            self._eviction.drop(run)
        else:
            self._cached[run] = cached - taken

    def _shorten(self, path: Sequence[int]) -> None:
        """Drop the end of a prompt that does not fit the pool by itself."""
        for run in reversed(path):
            if self._used <= self._capacity:
                return
            self._take(run)


def _no_cache(_tree: RunTree) -> Callable[[], Eviction]:
    raise ValueError("an unlimited cache evicts nothing")


def _protecting(tree: RunTree) -> Callable[[], Eviction]:
    parents = tree.parents()
    return lambda: SessionProtecting(parents)


_EVICTIONS: dict[CachePolicy, Callable[[RunTree], Callable[[], Eviction]]] = {
    CachePolicy.INFINITE: _no_cache,
    CachePolicy.LRU: lambda _tree: Lru,
    CachePolicy.LFU: lambda tree: lambda: Lfu(tree.depths),
    CachePolicy.SESSION_PROTECTING: _protecting,
    CachePolicy.BELADY: lambda tree: lambda: Belady(tree.depths),
}


def hit_tokens(
    trace: Trace, tree: RunTree, places: Sequence[int], policy: CachePolicy, pool_tokens: int | None
) -> list[int]:
    """Prompt tokens of each request found in the cache of its place.

    Args:
        trace: The trace that ``tree`` was built from.
        tree: The trace's runs.
        places: Cache of each request.
        policy: ``INFINITE`` ignores ``pool_tokens``.
        pool_tokens: Size of each cache; rounded down to whole blocks.
    """
    if policy is CachePolicy.INFINITE or pool_tokens is None:
        capacity, new_eviction = tree.distinct_tokens, _EVICTIONS[CachePolicy.LRU](tree)
    else:
        capacity, new_eviction = pool_tokens // tree.block_tokens, _EVICTIONS[policy](tree)
    coming = next_uses(tree.paths, places) if policy is CachePolicy.BELADY else None
    caches: dict[int, _Cache] = {}
    found = []
    for index, request in enumerate(trace.requests):
        at = places[index]
        if at not in caches:
            caches[at] = _Cache(tree.run_blocks, capacity, new_eviction())
        use = Use(index, request.timestamp_s, request.session_id, tree.paths[index], coming[index] if coming else ())
        found.append(caches[at].serve(use) * tree.block_tokens)
    return found


def study(
    trace: Trace,
    *,
    instances: int = 8,
    pools: Sequence[PoolSize] = (),
    pool_hot_sets: Sequence[float] = (0.25, 1.0, 4.0),
    placements: Sequence[Placement] = tuple(Placement),
    policies: Sequence[CachePolicy] = tuple(CachePolicy),
    as_stored: Trace | None = None,
) -> CacheStudy:
    """Every combination of placement, policy and pool, and one cache with the pools of all instances together.

    Args:
        trace: With chained ids (the loader's default).
        instances: Number of caches that the placements spread over.
        pools: Sizes of one instance's pool, in addition to those of ``pool_hot_sets``.
        pool_hot_sets: Sizes of all instances' pools together, as multiples of the peak of the hot set; one block an
            instance at the least.
        placements: Rules to try.
        policies: Policies to try; ``INFINITE`` is always included, once for each placement.
        as_stored: The same trace with ids as stored, for ``ideal_as_stored``.

    Raises:
        ValueError: a pool that is smaller than one block.
    """
    tree = build(trace)
    hot = hot_set(tree)
    # A small trace's hot set may be less than one block an instance.
    shares = [(x, max(tree.block_tokens, int(x * hot.peak_tokens / instances))) for x in pool_hot_sets]
    sizes = [*pools, *(PoolSize(tokens=tokens, hot_sets=x) for x, tokens in shares)]
    for size in sizes:
        if size.tokens < tree.block_tokens:
            raise ValueError(
                f"a pool of {size.tokens} tokens does not hold one block of {tree.block_tokens}; give a larger one"
            )
    spread = [(rule.value, instances, place(trace, instances, rule)) for rule in placements]
    points: list[CachePoint] = []
    best = -1.0
    for name, count, places in [("one_cache", 1, [0] * len(trace.requests)), *spread]:
        for point in _points(trace, tree, name, count, places, instances, sizes, policies, best):
            best = point.apc if best < 0 else best
            points.append(point)
    return CacheStudy(
        trace=trace.name,
        sha256=trace.sha256,
        requests=len(trace.requests),
        sessions=len({request.session_id for request in trace.requests}),
        prompt_tokens=sum(request.input_length for request in trace.requests),
        block_tokens=trace.block_tokens,
        instances=instances,
        hot_set=hot,
        ideal=ideal(trace, instances),
        ideal_as_stored=ideal(as_stored, instances) if as_stored is not None else None,
        points=points,
        notes=list(trace.notes),
    )


def _points(
    trace: Trace,
    tree: RunTree,
    name: str,
    count: int,
    places: Sequence[int],
    fleet: int,
    sizes: Sequence[PoolSize],
    policies: Sequence[CachePolicy],
    best: float,
) -> Iterator[CachePoint]:
    """The points of one placement; ``best`` is the APC of one unlimited cache, negative: this one's."""
    total = sum(request.input_length for request in trace.requests)

    def apc(policy: CachePolicy, pool: int | None) -> float:
        return sum(hit_tokens(trace, tree, places, policy, pool)) / total if total else 0.0

    def point(policy: CachePolicy, pool: int | None, hot_sets: float | None, value: float) -> CachePoint:
        return CachePoint(
            placement=name,
            instances=count,
            policy=policy,
            pool_tokens=pool,
            pool_hot_sets=hot_sets,
            apc=value,
            routing_loss=best - unlimited if best >= 0 else 0.0,
            eviction_loss=unlimited - value,
            is_bound=policy in BOUNDS,
        )

    unlimited = apc(CachePolicy.INFINITE, None)
    yield point(CachePolicy.INFINITE, None, None, unlimited)
    for size in sizes:
        pool = size.tokens * fleet // count
        for policy in policies:
            if policy is not CachePolicy.INFINITE:
                yield point(policy, pool, size.hot_sets, apc(policy, pool))
