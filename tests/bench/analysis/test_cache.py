"""The cache study: runs against blocks, policies against plain reference models, published figures reproduced."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.analysis.caching.eviction import next_uses
from bench.analysis.caching.placement import Placement, place
from bench.analysis.caching.prefix_tree import build
from bench.analysis.caching.protecting import ENOUGH_RETURNS, SHARED, ReturnTimes, _density
from bench.analysis.caching.study import CachePolicy, PoolSize, hit_tokens, hot_set, study
from replayer.traces.ideal import cached_tokens, sticky
from replayer.traces.loading import LoadOptions, load
from replayer.traces.trace import Trace, TraceRequest

BLOCK = 16


def trace_of(prompts: Sequence[tuple[str, Sequence[int]]], gap_s: float = 1.0) -> Trace:
    """Consecutive requests; a block's id depends on its number and all before it."""
    names: dict[tuple[int, ...], int] = {}
    requests = []
    for index, (session, blocks) in enumerate(prompts):
        ids = [names.setdefault(tuple(blocks[: end + 1]), len(names)) for end in range(len(blocks))]
        requests.append(
            TraceRequest(
                chat_id=index,
                session_id=session,
                timestamp_s=index * gap_s,
                input_length=BLOCK * len(blocks) + 3,
                hash_ids=ids,
            )
        )
    return Trace(requests=requests, block_tokens=BLOCK, tail="floor", name="made")


prompts = st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 2), max_size=7)), min_size=1, max_size=25)


@given(prompts)
@settings(max_examples=40, deadline=None)
def test_runs_spell_every_prompt_and_no_cache_beats_the_ideal(made: list[tuple[str, list[int]]]) -> None:
    trace = trace_of(made)
    tree = build(trace)
    for request, path in zip(trace.requests, tree.paths, strict=True):
        assert sum(tree.run_blocks[run] for run in path) == len(request.hash_ids)
        assert [tree.depths[run] for run in path] == list(range(len(path)))
    assert sum(tree.run_blocks) == len({block for request in trace.requests for block in request.hash_ids})
    for places, rule in (([0] * len(made), lambda _i, _r: 0), (place(trace, 3, Placement.STICKY), sticky(3))):
        expected = cached_tokens(trace.requests, BLOCK, rule)
        assert hit_tokens(trace, tree, places, CachePolicy.INFINITE, None) == expected
        for policy in CachePolicy:
            # A large enough pool loses nothing under any policy.
            assert hit_tokens(trace, tree, places, policy, tree.distinct_tokens) == expected


class BlockwiseCache:
    """Reference cache, block by block, that the runs must equal. Lowest rank is evicted first, deeper blocks first."""

    def __init__(self, capacity: int, rank: Callable[[int], tuple[float, ...]], pins: bool) -> None:
        self.capacity, self.rank, self.pins = capacity, rank, pins
        self.cached: dict[int, int] = {}
        """Depth of each block."""

    def serve(self, ids: Sequence[int]) -> int:
        hits = next((depth for depth, block in enumerate(ids) if block not in self.cached), len(ids))
        self.cached.update({block: depth for depth, block in enumerate(ids)})
        while len(self.cached) > self.capacity:
            others = [block for block in self.cached if not self.pins or block not in ids] or list(ids)
            others = [block for block in others if block in self.cached]
            if not self.pins or others[0] not in ids:
                gone = min(others, key=lambda block: (self.rank(block), -self.cached[block]))
            else:
                gone = max(others, key=lambda block: self.cached[block])
            del self.cached[gone]
        return hits


def plain(trace: Trace, policy: CachePolicy, capacity: int) -> list[int]:
    last: dict[int, int] = {}
    uses: dict[int, int] = {}
    later: list[dict[int, float]] = []
    coming: dict[int, float] = {}
    for index in range(len(trace.requests) - 1, -1, -1):
        later.append(dict(coming))
        coming.update(dict.fromkeys(trace.requests[index].hash_ids, float(index)))
    later.reverse()
    now = 0
    ranks: dict[CachePolicy, Callable[[int], tuple[float, ...]]] = {
        CachePolicy.LRU: lambda block: (last[block],),
        CachePolicy.LFU: lambda block: (uses[block], last[block]),
        CachePolicy.BELADY: lambda block: (-later[now].get(block, inf),),
    }
    cache = BlockwiseCache(capacity, ranks[policy], policy is not CachePolicy.BELADY)
    found = []
    for index, request in enumerate(trace.requests):
        now = index
        for block in request.hash_ids:
            last[block] = index
            uses[block] = uses.get(block, 0) + 1
        found.append(BLOCK * cache.serve(request.hash_ids))
    return found


@pytest.mark.parametrize("policy", [CachePolicy.LRU, CachePolicy.LFU, CachePolicy.BELADY])
@given(made=prompts, capacity=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_a_policy_on_runs_is_the_policy_on_blocks(
    policy: CachePolicy, made: list[tuple[str, list[int]]], capacity: int
) -> None:
    trace = trace_of(made)
    assert hit_tokens(trace, build(trace), [0] * len(made), policy, capacity * BLOCK) == plain(trace, policy, capacity)


@given(made=prompts, capacity=st.integers(1, 12), instances=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_nothing_beats_the_bound_and_the_losses_add_up(
    made: list[tuple[str, list[int]]], capacity: int, instances: int
) -> None:
    trace = trace_of(made, gap_s=40.0)
    found = study(trace, instances=instances, pools=[PoolSize(tokens=capacity * BLOCK)], pool_hot_sets=())
    best = found.ideal.shared_apc
    bounds = {point.placement: point.apc for point in found.points if point.policy is CachePolicy.BELADY}
    for point in found.points:
        assert point.apc + point.routing_loss + point.eviction_loss == pytest.approx(best)
        assert point.routing_loss >= -1e-12
        assert point.eviction_loss >= -1e-12
        if not point.is_bound:
            assert point.apc <= bounds[point.placement] + 1e-12


def test_the_hot_set_is_what_the_bound_needs() -> None:
    # Two conversations in turn, then many one-off prompts, no part of which needs to be kept.
    made: list[tuple[str, list[int]]] = []
    for turn in range(1, 5):
        made += [(name, [first] + [7] * turn) for name, first in (("a", 1), ("b", 2))]
        made += [(f"once{turn}", [10 + turn, 3, 3])]
    trace = trace_of(made)
    tree = build(trace)
    hot = hot_set(tree)
    # Hot set: of both conversations all blocks but the last turn's.
    assert hot.peak_tokens == BLOCK * (4 + 4)
    places = [0] * len(made)
    unlimited = hit_tokens(trace, tree, places, CachePolicy.INFINITE, None)
    assert hit_tokens(trace, tree, places, CachePolicy.BELADY, hot.peak_tokens) == unlimited
    assert sum(hit_tokens(trace, tree, places, CachePolicy.BELADY, hot.peak_tokens - BLOCK)) < sum(unlimited)
    assert sum(hit_tokens(trace, tree, places, CachePolicy.LRU, hot.peak_tokens)) < sum(unlimited)


def test_next_uses_are_of_the_same_place() -> None:
    assert next_uses([[0], [0, 1], [0], [1]], [0, 1, 0, 1]) == [[2], [inf, 3], [inf], [inf]]


def test_sessions_that_come_back_are_protected_from_those_that_do_not() -> None:
    # Ten conversations return every ten seconds; between them come one-off prompts, more than the pool holds.
    made: list[tuple[str, list[int]]] = []
    for turn in range(1, 60):
        for session in range(10):
            made.append((f"s{session}", [100 + session] + [1] * min(turn, 6)))
            made += [(f"x{turn}.{session}.{copy}", [10**6 + 100 * turn + 10 * session + copy] * 6) for copy in range(2)]
    trace = trace_of(made, gap_s=10.0 / 30)
    tree = build(trace)
    places = [0] * len(made)
    hits = {
        policy: sum(hit_tokens(trace, tree, places, policy, 110 * BLOCK))
        for policy in (CachePolicy.LRU, CachePolicy.SESSION_PROTECTING, CachePolicy.BELADY)
    }
    assert hits[CachePolicy.LRU] < 0.1 * hits[CachePolicy.BELADY]
    assert hits[CachePolicy.SESSION_PROTECTING] > 0.6 * hits[CachePolicy.BELADY]


def test_a_class_is_worth_its_chance_of_return_over_the_time_until_then() -> None:
    bins = 19
    always = [0] * bins
    always[3] = 100
    half, waiting = [0] * bins, [0] * bins
    half[3], waiting[-1] = 50, 50
    sure, coin = _density(always, [0] * bins), _density(half, waiting)
    # Half as likely to come back at the same time: half the density; past the only return: none.
    assert coin[0] == pytest.approx(sure[0] / 2)
    assert sure[0] == pytest.approx(1 / 1.5)
    assert sure[3] > sure[0]
    assert sure[4] == coin[4] == 0.0


def test_a_class_without_returns_has_the_average_density() -> None:
    returns = ReturnTimes()
    for step in range(ENOUGH_RETURNS + 1):
        returns.seen("often", 0, 2.0 * step)
    returns.seen("new", 3, 10.0)
    densities = returns.densities(2.0 * ENOUGH_RETURNS)
    assert densities[3] == densities[SHARED]
    assert densities[0] != densities[3]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Placement.ROUND_ROBIN, [0, 1, 0, 1]),
        (Placement.STICKY, [0, 1, 0, 0]),
        (Placement.STICKY_BALANCED, [0, 1, 0, 1]),
        (Placement.LEAST_TOKENS, [0, 1, 1, 1]),
    ],
)
def test_placements(rule: Placement, expected: list[int]) -> None:
    # Tokens: 67, 19, 19, 19.
    trace = trace_of([("a", [1, 2, 3, 4]), ("b", [5]), ("a", [6]), ("c", [7])])
    assert place(trace, 2, rule) == expected


def test_a_pool_below_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold one block"):
        study(trace_of([("a", [1])]), pools=[PoolSize(tokens=BLOCK - 1)])


def test_a_trace_without_reuse_has_no_hot_set_and_loses_nothing() -> None:
    found = study(trace_of([("a", [1]), ("b", [2])]), instances=2)
    assert found.hot_set.peak_tokens == 0
    assert {point.pool_tokens for point in found.points if point.placement == "sticky"} == {None, BLOCK}
    assert all(point.apc == point.routing_loss == point.eviction_loss == 0.0 for point in found.points)


@pytest.fixture
def traces() -> Path:
    folder = Path(os.environ.get("WARMROUTE_TRACES", Path(__file__).parents[4] / "shared" / "traces"))
    if not folder.is_dir():
        pytest.skip(f"public traces not found at {folder}; set WARMROUTE_TRACES")
    return folder


@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("agentic/derived_glm_like_2h.jsonl.zst", (0.698, 0.310, 0.668)),
        ("mooncake/conversation_trace_with_derived_sessions.jsonl.gz", (0.373, 0.139, 0.354)),
    ],
)
def test_the_published_figures_of_public_traces(traces: Path, name: str, published: tuple[float, float, float]) -> None:
    trace = load(traces / name)
    found = study(
        trace,
        pool_hot_sets=[1.0],
        placements=[Placement.ROUND_ROBIN, Placement.STICKY],
        policies=[CachePolicy.BELADY],
        as_stored=load(traces / name, LoadOptions(chain="keep")),
    )
    stored = found.ideal_as_stored
    assert stored is not None
    assert tuple(round(x, 3) for x in (stored.shared_apc, stored.round_robin_apc, stored.sticky_apc)) == published
    unlimited = {point.placement: point.apc for point in found.points if point.policy is CachePolicy.INFINITE}
    chained = found.ideal
    assert unlimited["one_cache"] == pytest.approx(chained.shared_apc)
    assert unlimited["round_robin"] == pytest.approx(chained.round_robin_apc)
    assert unlimited["sticky"] == pytest.approx(chained.sticky_apc)
    # Chained ids hit a little less than the stored ones, from which the published figures were computed.
    assert all(
        value == pytest.approx(figure, abs=0.006)
        for value, figure in zip(
            (unlimited["one_cache"], unlimited["round_robin"], unlimited["sticky"]), published, strict=True
        )
    )
    whole = next(point for point in found.points if point.policy is CachePolicy.BELADY)
    assert whole.eviction_loss == pytest.approx(0.0, abs=1e-12)
