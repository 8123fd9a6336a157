"""Price of evicted contexts, and the tokens that a request's KV evicts."""

from __future__ import annotations

import pytest

from policies.admission.homes import POOL_FILL, Homes
from policies.costs.evictions import recomputed_s
from policies.costs.formulas import PrefillModel
from policies.types import InstanceView, RequestView

MODEL = PrefillModel()
POOL = 100_000


def homes(active: int, kept: int) -> Homes:
    made = Homes()
    made.add("a")
    home = made.by_name["a"]
    home.active_sessions, home.active_tokens = 1, active
    home.keep(kept)
    return made


def evicted(made: Homes, prompt: int, cached: int = 0, own_tokens: int = 0, pool: int = POOL) -> dict[str, float]:
    view = InstanceView("a", cached_tokens=cached, kv_capacity_tokens=pool)
    own = made.by_name["a"] if own_tokens else None
    return made.evicted(RequestView("r", prompt), [view], own, own_tokens)


def test_contexts_are_computed_again_one_after_the_other() -> None:
    one = MODEL.seconds(30_000, 0)
    assert recomputed_s(60_000, 30_000, MODEL) == pytest.approx(2 * one)
    assert recomputed_s(10_000, 30_000, MODEL) == MODEL.seconds(10_000, 0)
    assert recomputed_s(0, 30_000, MODEL) == 0.0


def test_what_exceeds_the_free_tokens_is_evicted() -> None:
    free = POOL_FILL * POOL - 30_000 - 50_000
    assert evicted(homes(30_000, 50_000), 40_000) == {"a": 40_000 - free}
    assert evicted(homes(30_000, 50_000), int(free)) == {}
    assert evicted(homes(30_000, 50_000), 40_000, cached=30_000) == {}


def test_no_more_than_the_kept_contexts_of_others_is_evicted() -> None:
    assert evicted(homes(80_000, 5_000), 60_000) == {"a": 5_000}
    assert evicted(homes(80_000, 5_000), 60_000, own_tokens=5_000) == {}
    assert evicted(homes(80_000, 5_000), 60_000, pool=0) == {}


def test_contexts_of_other_replicas_count() -> None:
    made = homes(30_000, 10_000)
    made.set_elsewhere([{"a": (1, 20_000, 1, 30_000)}])
    assert evicted(made, 40_000) == {"a": 40_000 - (POOL_FILL * POOL - 90_000)}
