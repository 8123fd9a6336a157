"""What a trace's prefix sharing allows: APC of caches that never forget, one shared or split over N instances.

APC (here) = sum of block_tokens x leading full blocks seen before / sum of prompt tokens. A full block is a hit when it
and everything before it was in an earlier request of the same cache; partial last blocks never hit.

The longest seen prefix is found by bisection over the ids, which is exact when ids are chained (the loader's
``chain="repair"`` sees to that). On ids that are not chained, bisection overstates slightly: figures published for
the derived_glm_like traces (.647 / .199 / .622 for one, 8 round-robin, 8 sticky) are those of bisection over the ids
as stored; chained, the same trace gives .644 / .194 / .622.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from replayer.traces.trace import Trace, TraceRequest


class Ideal(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds no router can beat (``shared``) and two plain routers' results, all without eviction."""

    prompt_tokens: int
    shared_apc: float
    """One infinite cache for all requests."""
    round_robin_apc: float
    """Request i on instance i mod N."""
    sticky_apc: float
    """Sessions on instances in order of first appearance, mod N."""
    intra_session_share: float
    """Part of the hits of the one infinite cache that an earlier turn of the same session suffices for."""
    instances: int


def seen_prefix(ids: Sequence[int], full: int, seen: set[int]) -> int:
    """Number of leading blocks in ``seen``, by bisection over the first ``full`` ids; O(log full)."""
    known, unknown = -1, full
    while unknown - known > 1:
        middle = (known + unknown) // 2
        if ids[middle] in seen:
            known = middle
        else:
            unknown = middle
    return known + 1


def cached_tokens(
    requests: Iterable[TraceRequest], block_tokens: int, place: Callable[[int, TraceRequest], object]
) -> list[int]:
    """Prompt tokens of every request that its cache holds when it arrives.

    Args:
        requests: In time order.
        block_tokens: Tokens per block.
        place: Which cache request number i uses; any hashable name.
    """
    caches: defaultdict[object, set[int]] = defaultdict(set)
    hits = []
    for index, request in enumerate(requests):
        cache = caches[place(index, request)]
        full = request.full_blocks(block_tokens)
        hits.append(block_tokens * seen_prefix(request.hash_ids, full, cache))
        cache.update(request.hash_ids[:full])
    return hits


def sticky(instances: int) -> Callable[[int, TraceRequest], int]:
    """Session-sticky placement: sessions in order of first appearance, mod ``instances``."""
    home: dict[str, int] = {}

    def place(_index: int, request: TraceRequest) -> int:
        return home.setdefault(request.session_id, len(home) % instances)

    return place


def ideal(trace: Trace, instances: int = 8) -> Ideal:
    """All ideal figures of a trace. O(blocks) time, memory for the distinct ids."""
    total = sum(request.input_length for request in trace.requests)
    size = trace.block_tokens

    def apc(hits: list[int]) -> float:
        return sum(hits) / total if total else 0.0

    shared = cached_tokens(trace.requests, size, lambda _index, _request: 0)
    own = cached_tokens(trace.requests, size, lambda _index, request: request.session_id)
    intra = sum(min(a, b) for a, b in zip(shared, own, strict=True))
    return Ideal(
        prompt_tokens=total,
        shared_apc=apc(shared),
        round_robin_apc=apc(cached_tokens(trace.requests, size, lambda index, _request: index % instances)),
        sticky_apc=apc(cached_tokens(trace.requests, size, sticky(instances))),
        intra_session_share=intra / sum(shared) if sum(shared) else 0.0,
        instances=instances,
    )
