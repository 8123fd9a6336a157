"""Clients that try to make prompts look cached that are not: another tenant's, or their own by colliding hashes."""

from __future__ import annotations

from typing import Any

import pytest

from policies.predict.blocks import root_hash
from policies.predict.exact_index import PLAIN_ROOT
from proxy.core import Core
from tests.policies.predict.test_blocks import colliding
from tests.proxy.conftest import Running, StartProxy
from tests.proxy.stub_engine import StubEngine

PROMPT = list(range(160))
ADAPTERS = ("other", "stub1:a")


class Tenants:
    """Requests of several tenants through one proxy."""

    def __init__(self, running: Running) -> None:
        self.core: Core = running.core
        self._running = running

    async def cached(self, prompt: Any, model: str = "stub", **more: Any) -> int:
        """Send a request; returns its predicted cached tokens."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1, **more}
        answer = await self._running.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return int((await self._running.rows(limit=1))[0]["predicted_cached_tokens"])


@pytest.fixture
async def tenants(start_proxy: StartProxy) -> Tenants:
    return Tenants(await start_proxy(engines=[StubEngine(adapters=list(ADAPTERS))]))


@pytest.mark.parametrize("salt", ["", "salt"])
async def test_collisions_constructed_without_the_seed_are_different_prompts(tenants: Tenants, salt: str) -> None:
    named = {"cache_salt": salt} if salt else {}
    for root in (PLAIN_ROOT, root_hash("ids", "stub", salt)):
        ours, theirs = colliding(root)
        assert await tenants.cached([*ours, 1], **named) == 0
        assert await tenants.cached([*theirs, 1], **named) == 0
        assert await tenants.cached([*ours, 1], **named) == 16


@pytest.mark.parametrize("prompt", [PROMPT, "one text of many words " * 400], ids=["ids", "text"])
async def test_a_prefix_is_cached_only_for_its_own_salt_and_model(tenants: Tenants, prompt: Any) -> None:
    assert await tenants.cached(prompt, cache_salt="a") == 0
    assert await tenants.cached(prompt, cache_salt="a") > 0
    for salt in ("b", "", "1:a", "a\x1f", "4:stub1:a"):
        assert await tenants.cached(prompt, cache_salt=salt) == 0, salt
    assert await tenants.cached(prompt, "other", cache_salt="a") == 0
    assert await tenants.cached(prompt, "stub1:a") == 0


async def test_every_process_has_a_seed_of_its_own(tenants: Tenants) -> None:
    settings = tenants.core.settings
    seeds = {Core(settings).router.seed for _ in range(3)} | {tenants.core.router.seed}
    assert len(seeds) == 4
    assert 0 not in seeds
