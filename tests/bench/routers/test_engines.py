"""Caches that are proven empty by the engines' own counters."""

from __future__ import annotations

import json

import httpx
import pytest

from bench.routers import engines as module
from bench.routers.engines import EnginePage, EngineSet, EngineSetError


class FakeEngine:
    """One engine: counters, and a cache that holds prompts until it is reset."""

    def __init__(self, *, caching: bool = True, stubborn: int = 0, model: str = "q", busy: int = 0) -> None:
        self.caching, self.stubborn, self.model, self.busy = caching, stubborn, model, busy
        self.cached: set[str] = set()
        self.lookups = self.hits = self.resets = 0
        self.steps_clear = False
        """A request ends the others that it reports."""

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Answer a request."""
        match request.url.path:
            case "/metrics":
                self.busy -= self.busy > 0
                return httpx.Response(200, text=self._page())
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": self.model, "max_model_len": 1000}]})
            case "/version":
                return httpx.Response(200, json={"version": "0.20.2"})
            case "/tokenize":
                return httpx.Response(200, json={"count": len(json.loads(request.content)["prompt"].split())})
            case "/reset_prefix_cache":
                self.resets += 1
                if self.resets > self.stubborn:
                    self.cached.clear()
                return httpx.Response(200)
        if self.steps_clear:
            self.busy = 0
        prompt = json.dumps(json.loads(request.content)["prompt"])
        if self.caching:
            self.lookups += 512
            self.hits += 496 * (prompt in self.cached)
            self.cached.add(prompt)
        return httpx.Response(200, json={})

    def _page(self) -> str:
        return (
            f'vllm:prefix_cache_queries_total{{engine="0"}} {self.lookups}\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {self.hits}\n'
            f'vllm:num_requests_running{{engine="0"}} {self.busy}\n'
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
        )


def fleet(*fakes: FakeEngine) -> tuple[EngineSet, httpx.AsyncClient]:
    by_port = dict(enumerate(fakes, 1))
    http = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda request: by_port[request.url.port or 0].answer(request))
    )
    return EngineSet([f"http://127.0.0.1:{port}" for port in by_port], http), http


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POLL_S", "_AGAIN_S", "_COUNTED_S"):
        monkeypatch.setattr(module, name, 0.0)


async def test_every_cache_is_emptied_after_a_probe_was_found_in_it() -> None:
    fakes = [FakeEngine(), FakeEngine(busy=3)]
    engines, http = fleet(*fakes)
    async with http:
        proofs = await engines.emptied("q")
    assert [(each.warm_hit_tokens, each.empty_hit_tokens) for each in proofs] == [(496, 0), (496, 0)]
    # The probe's own blocks are gone too.
    assert not any(fake.cached for fake in fakes)


async def test_a_cache_is_cleared_with_a_step_that_publishes_it() -> None:
    fake = FakeEngine()
    fake.cached = {"old"}
    engines, http = fleet(fake)
    async with http:
        await engines.clear("q")
    assert fake.resets == 1
    assert fake.lookups > 0
    assert "old" not in fake.cached


async def test_a_reset_that_held_blocks_prevented_is_repeated() -> None:
    fake = FakeEngine(stubborn=3)
    engines, http = fleet(fake)
    async with http:
        [proof] = await engines.emptied("q")
    assert proof.empty_hit_tokens == 0
    assert fake.resets == 5


async def test_a_cache_that_stays_full_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EMPTY_S", 0.0)
    engines, http = fleet(FakeEngine(stubborn=10**9))
    async with http:
        with pytest.raises(EngineSetError, match="not empty"):
            await engines.emptied("q")


async def test_an_engine_without_a_prefix_cache_is_refused() -> None:
    engines, http = fleet(FakeEngine(caching=False))
    async with http:
        with pytest.raises(EngineSetError, match="enable-prefix-caching"):
            await engines.emptied("q")


async def test_other_load_on_the_engines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    engines, http = fleet(FakeEngine(busy=10**9))
    async with http:
        with pytest.raises(EngineSetError, match="stop the other load"):
            await engines.until_idle("q")


async def test_the_engines_must_serve_one_model() -> None:
    engines, http = fleet(FakeEngine(), FakeEngine(model="other"))
    async with http:
        with pytest.raises(EngineSetError, match="different models: other, q"):
            await engines.served()
    engines, http = fleet(FakeEngine(), FakeEngine())
    async with http:
        served = await engines.served()
        assert (served.name, served.max_tokens, served.pool_tokens) == ("q", 1000, [1600, 1600])
        assert await engines.prompt_tokens("q", "three words here") == 3


async def test_a_count_that_is_left_from_the_last_step_is_refreshed_by_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_STALE_S", 0.0)
    fake = FakeEngine(busy=10**9)
    fake.steps_clear = True
    engines, http = fleet(fake)
    async with http:
        await engines.until_idle("q")
    assert fake.busy == 0


async def test_every_engine_computes_the_longest_prompt_before_the_first_run() -> None:
    fakes = [FakeEngine(), FakeEngine()]
    engines, http = fleet(*fakes)
    async with http:
        await engines.warm_up("q", 2000)
    assert [sorted(len(json.loads(prompt)) for prompt in fake.cached) for fake in fakes] == [[1024, 2000]] * 2


def test_counters_of_a_page_are_summed_and_may_be_missing() -> None:
    page = EnginePage.parse(
        "# TYPE vllm:prompt_tokens_total counter\n"
        'vllm:prompt_tokens_total{engine="0"} 5.0\nvllm:prompt_tokens_total{engine="1"} 2.0\n'
        'vllm:prompt_tokens_cached_total{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
    )
    assert (page.counters.prompt_tokens, page.counters.cached_tokens, page.in_flight) == (7.0, 3.0, 2)
    assert EnginePage.parse("").counters.cached_tokens is None
