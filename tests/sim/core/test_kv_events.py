"""KV events of a simulated engine match the content of its cache."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sim.core.content import chain_keys, token_ids
from sim.core.engine import Engine
from sim.core.kvevents import BlockRemoved, BlocksStored, CacheCleared
from tests.sim.sim_engines import BLOCK, drain, keys_of, make_engine, make_request


def follow(engine: Engine, copies: Counter[int]) -> None:
    """Apply the events since the last call, checking that tokens and parents give the reported keys."""
    for event in engine.take_kv_events():
        if isinstance(event, BlocksStored):
            assert len(event.tokens) == len(event.keys) * BLOCK * 4
            assert event.parent is None or copies[event.parent] > 0
            assert chain_keys(event.tokens, BLOCK, event.parent or 0) == list(event.keys)
            copies.update(event.keys)
        elif isinstance(event, BlockRemoved):
            assert copies[event.key] > 0
            copies[event.key] -= 1
        else:
            assert event == CacheCleared()
            copies.clear()


@pytest.mark.parametrize("seed", range(5))
def test_reports_add_up_to_the_cache_under_eviction_and_sharing(seed: int) -> None:
    draw, engine, copies = random.Random(seed), make_engine(num_blocks=40, max_num_batched_tokens=32), Counter[int]()
    engine.report_kv_events()
    now_s = 0.0
    for number in range(60):
        shared = draw.randrange(3)
        ids = [shared * 1_000 + token for token in range(draw.randrange(4, 60))]
        ids += [draw.randrange(10_000) for _ in range(draw.randrange(20))]
        for twin in range(draw.randrange(1, 3)):
            engine.submit(make_request(f"r{number}.{twin}", ids, max_tokens=draw.randrange(1, 12)), now_s)
        _, now_s = drain(engine, now_s)
        follow(engine, copies)
        cached = engine.scheduler.pool.cached_keys()
        assert {key for key, count in copies.items() if count} == cached
    assert engine.state().evictions > 0


def test_a_reset_is_reported_and_nothing_is_kept_without_a_reader() -> None:
    engine = make_engine()
    engine.submit(make_request("quiet", range(20)), 0.0)
    drain(engine)
    assert engine.take_kv_events() == []
    engine.report_kv_events()
    engine.submit(make_request("heard", range(100, 120), max_tokens=2), 0.0)
    drain(engine)
    (event,) = engine.take_kv_events()
    assert isinstance(event, BlocksStored)
    assert list(event.keys) == keys_of(range(100, 120))
    assert token_ids(event.tokens) == list(range(100, 120))
    assert engine.reset_prefix_cache()
    assert engine.take_kv_events() == [CacheCleared()]
