"""The engines behind every router: what they serve, their counters, and caches that are proven empty."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import httpx
import msgspec

from bench.routers.records import CacheProof, EngineCounters

PROBE_TOKENS = 512
"""Of the probe prompt: whole blocks of any usual size."""
_PROBE_FIRST_ID = 500
_CONTROL_S = 20.0
_ANSWER_S = 120.0
"""For a probe: a first request may compile kernels."""
_COUNTED_S = 10.0
"""For a counter to include a request that has been answered."""
IDLE_S = 180.0
"""For requests that a finished or cut run has left on an engine."""
EMPTY_S = 90.0
"""For a cache that cannot be emptied because blocks are still held."""
_STALE_S = 5.0
"""An engine that steps no more may report requests that have ended; after so long one more request makes it step."""
_WARM_UP_S = 300.0
_WARM_UP_TOKENS = (1024, 8192)
WARM_UP_OUTPUT = 16
_POLL_S = 0.1
_AGAIN_S = 1.0
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})? (\S+)", re.MULTILINE)
_T = TypeVar("_T")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class EngineSetError(Exception):
    """Engines that cannot be compared on; the message names the engine and the remedy."""


class ServedModel(NamedTuple):
    """The model that all engines serve, and what is known of them."""

    name: str
    max_tokens: int | None
    """Most tokens of prompt plus output on the smallest engine; None: not reported."""
    versions: list[str]
    pool_tokens: list[int]


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Tokens(msgspec.Struct):
    count: int


class EnginePage(msgspec.Struct, frozen=True):
    """One reading of an engine's metrics."""

    counters: EngineCounters
    in_flight: int
    pool_tokens: int

    @classmethod
    def parse(cls, page: str) -> EnginePage:
        """Read Prometheus' text format; a metric that is missing counts as 0."""
        sums: dict[str, float] = {}
        pool = 0
        for name, labels, value in samples(page):
            sums[name] = sums.get(name, 0.0) + value
            if name == "vllm:cache_config_info":
                found = dict(_LABEL.findall(labels))
                pool = _whole(found.get("num_gpu_blocks")) * _whole(found.get("block_size"))
        counters = EngineCounters(
            prompt_tokens=sums.get("vllm:prompt_tokens_total", 0.0),
            cached_tokens=sums.get("vllm:prompt_tokens_cached_total"),
            lookup_tokens=sums.get("vllm:prefix_cache_queries_total", 0.0),
            hit_tokens=sums.get("vllm:prefix_cache_hits_total", 0.0),
            pulled_tokens=sums.get("vllm:external_prefix_cache_hits_total", 0.0),
            preemptions=sums.get("vllm:num_preemptions_total", 0.0),
        )
        busy = sums.get("vllm:num_requests_running", 0.0) + sums.get("vllm:num_requests_waiting", 0.0)
        return cls(counters, int(busy), pool)


def samples(page: str) -> Iterator[tuple[str, str, float]]:
    """(name, labels, value) of every sample of a metrics page."""
    for name, labels, value in _SAMPLE.findall(page):
        yield name, labels, float(value)


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


class EngineSet:
    """Running engines by URL. Opens no connection of its own: the client is its owner's.

    Args:
        urls: of the engines' OpenAI servers.
        http: client that its owner closes.
    """

    def __init__(self, urls: Sequence[str], http: httpx.AsyncClient) -> None:
        self.urls = list(urls)
        self._http = http

    async def served(self) -> ServedModel:
        """The one model that all engines serve.

        Raises:
            EngineSetError: an engine does not answer, or serves another model.
        """
        models, versions = await self._each(self._model), await self._each(self._version)
        names = sorted({model.id for model in models})
        if len(names) != 1:
            raise EngineSetError(f"the engines serve different models: {', '.join(names)}; start them with one")
        limits = [model.max_model_len for model in models if model.max_model_len is not None]
        pools = [page.pool_tokens for page in await self._each(self._page)]
        return ServedModel(names[0], min(limits, default=None), versions, pools)

    async def counters(self) -> list[EngineCounters]:
        """Each engine's counters now. Raises EngineSetError."""
        return [page.counters for page in await self._each(self._page)]

    async def warm_up(self, model: str, longest: int) -> None:
        """Let every engine compute short and long prompts once, so that the first run does not wait for its kernels.

        Args:
            model: name of the served model.
            longest: tokens of the longest prompt to come.

        Raises:
            EngineSetError: an engine refused one, failed, or took too long.
        """

        async def compute(url: str) -> None:
            for tokens in sorted({min(each, longest) for each in (*_WARM_UP_TOKENS, longest)}):
                # Prompts that share no beginning, as none of them may be found in the cache.
                prompt = [_PROBE_FIRST_ID + (tokens + 7919 * place) % 1000 for place in range(tokens)]
                await self._complete(url, model, prompt, WARM_UP_OUTPUT, _WARM_UP_S)

        await self._each(compute)

    async def until_idle(self, model: str) -> None:
        """Wait until no engine has a request.

        Raises:
            EngineSetError: one still has after `IDLE_S`, or does not answer.
        """
        began_s = time.monotonic()
        nudged_s = began_s
        while busy := {url: page.in_flight for url, page in await self._pages() if page.in_flight}:
            now_s = time.monotonic()
            if now_s > began_s + IDLE_S:
                listed = ", ".join(f"{url}: {count}" for url, count in busy.items())
                raise EngineSetError(f"requests in flight after {IDLE_S:g} s ({listed}): stop the other load")
            if now_s > nudged_s + _STALE_S:
                nudged_s = now_s
                for url in busy:
                    await self._complete(url, model, [_PROBE_FIRST_ID], 1, _ANSWER_S)
            await asyncio.sleep(_POLL_S)

    async def emptied(self, model: str) -> list[CacheProof]:
        """Empty every prefix cache and prove it: a probe prompt that was cached before hits nothing afterwards.

        Raises:
            EngineSetError: an engine stays busy, has no prefix cache, or cannot be emptied.
        """
        await self.until_idle(model)

        async def prove(url: str) -> CacheProof:
            await self._hits_of_probe(url, model)
            warm = await self._hits_of_probe(url, model)
            if warm <= 0:
                raise EngineSetError(f"{url}: a repeated prompt hits nothing; start it with --enable-prefix-caching")
            deadline_s = time.monotonic() + EMPTY_S
            while True:
                await self._reset(url)
                left = await self._hits_of_probe(url, model)
                if left == 0:
                    break
                if time.monotonic() > deadline_s:
                    raise EngineSetError(
                        f"{url}: its prefix cache is not empty {EMPTY_S:g} s after the first reset: something holds "
                        "its blocks; wait, or start the engines again"
                    )
                await asyncio.sleep(_AGAIN_S)
            # The probe itself is in the cache now.
            await self._reset(url)
            return CacheProof(url, warm, left)

        return await self._each(prove)

    async def clear(self, model: str) -> None:
        """Empty every prefix cache once more, with a step that publishes it as a KV event. Raises EngineSetError."""

        async def one(url: str) -> None:
            await self._reset(url)
            await self._complete(url, model, [_PROBE_FIRST_ID], 1, _ANSWER_S)

        await self._each(one)

    async def prompt_tokens(self, model: str, prompt: str) -> int | None:
        """Tokens of a text by the first engine's tokenizer; None if it has no ``/tokenize``. Raises EngineSetError."""
        url = f"{self.urls[0]}/tokenize"
        try:
            answer = await self._http.post(url, json={"model": model, "prompt": prompt}, timeout=_ANSWER_S)
            return msgspec.json.decode(answer.content, type=_Tokens).count if answer.is_success else None
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            raise EngineSetError(f"{url}: {error or type(error).__name__}") from error

    async def _hits_of_probe(self, url: str, model: str) -> float:
        """Tokens of the probe prompt that the engine finds cached."""
        before = await self._page(url)
        probe = list(range(_PROBE_FIRST_ID, _PROBE_FIRST_ID + PROBE_TOKENS))
        await self._complete(url, model, probe, 1, _ANSWER_S)
        deadline_s = time.monotonic() + _COUNTED_S
        while True:
            grown = (await self._page(url)).counters.since(before.counters)
            if grown.lookup_tokens > 0:
                return grown.hit_tokens
            if time.monotonic() > deadline_s:
                raise EngineSetError(
                    f"{url}: vllm:prefix_cache_queries_total does not count; start it with --enable-prefix-caching"
                )
            await asyncio.sleep(_POLL_S)

    async def _complete(self, url: str, model: str, prompt: list[int], max_tokens: int, timeout_s: float) -> None:
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        await self._asked("POST", f"{url}/v1/completions", json=body, timeout=timeout_s)

    async def _reset(self, url: str) -> None:
        try:
            await self._asked("POST", f"{url}/reset_prefix_cache", timeout=_CONTROL_S)
        except EngineSetError as error:
            raise EngineSetError(f"{error}: start the engines with VLLM_SERVER_DEV_MODE=1") from error

    async def _page(self, url: str) -> EnginePage:
        return EnginePage.parse((await self._asked("GET", f"{url}/metrics", timeout=_CONTROL_S)).text)

    async def _pages(self) -> list[tuple[str, EnginePage]]:
        return list(zip(self.urls, await self._each(self._page), strict=True))

    async def _model(self, url: str) -> _Model:
        answer = await self._asked("GET", f"{url}/v1/models", timeout=_CONTROL_S)
        try:
            return msgspec.json.decode(answer.content, type=_Models).data[0]
        except (msgspec.MsgspecError, IndexError) as error:
            raise EngineSetError(f"{url}/v1/models names no model") from error

    async def _version(self, url: str) -> str:
        answer = await self._asked("GET", f"{url}/version", timeout=_CONTROL_S)
        try:
            found: dict[str, object] = msgspec.json.decode(answer.content, type=dict[str, object])
        except msgspec.MsgspecError:
            return ""
        return str(found.get("version", ""))

    async def _asked(self, method: str, url: str, **options: Any) -> httpx.Response:
        try:
            answer = await self._http.request(method, url, **options)
        except httpx.HTTPError as error:
            raise EngineSetError(f"{url}: {error or type(error).__name__}; is the engine running?") from error
        if not answer.is_success:
            raise EngineSetError(f"{url} answered {answer.status_code}: {answer.text[:200]}")
        return answer

    async def _each(self, ask: Callable[[str], Coroutine[Any, Any, _T]]) -> list[_T]:
        """Ask all engines at once; the answers in the order of the URLs. The first failure ends the others."""
        tasks = [asyncio.create_task(ask(url)) for url in self.urls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
