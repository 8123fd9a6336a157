"""Engines with a small KV pool: evictions are known exactly, and an engine with leaked blocks is replaced.

These two engines are started and stopped before the four that the other tests share.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from launch.fleet.file import FleetFile, load_fleet
from launch.run.supervisor import Fleet
from proxy.settings import load_settings
from tests.engines.conftest import ROOT
from tests.engines.relay import Relay
from tests.engines.rig import (
    BLOCK,
    QUICK_ENGINES,
    REAL_ENGINES,
    Engines,
    Proxy,
    fresh_prompt,
    sse_data,
    until,
    until_trusted,
)
from tests.integration.published import nothing_from
from tests.proxy.conftest import serving

pytestmark = REAL_ENGINES

POOL_BLOCKS = 512
"""8,192 tokens: a few conversations fill it."""
SHARED_TOKENS = 512
"""Most tokens of P's steps for one prompt."""
HEAVY_TOKENS = 500
SETTINGS = {
    "classes": {"medium_tokens": 200, "heavy_tokens": HEAVY_TOKENS},
    "health": {"interval_s": 0.5, "timeout_s": 5.0},
    "events": {"join_interval_s": 0.2},
}
"""Settings of the proxies here."""


@dataclass
class Crowd:
    """Results of a crowd of agents."""

    hit_rate: float
    """By the engines' own counters."""
    mean_s: float
    """Mean time of a turn, waiting included."""
    held_s: list[float]
    reasons: Counter[str]


@dataclass
class SmallPair:
    """Two fleets of one engine each: P alone, D with a proxy that knows P as a peer."""

    p: Engines
    d: Engines
    bootstrap: Relay
    """Address that this proxy, and D through it, uses for P's bootstrap server."""
    proxy: Proxy
    """The proxy of D's fleet."""

    @property
    def both(self) -> tuple[Engines, Engines]:
        return self.p, self.d


def small_fleet(engine_python: Path, tiny_model: Path, number: int, prefix: str, **proxy: Any) -> FleetFile:
    return load_fleet(
        ROOT / "configs" / "fleets" / "vllm-cpu-4x.yaml",
        [
            QUICK_ENGINES,
            "count=1",
            f"name_prefix={prefix}",
            f"base_port={18301 + number}",
            f"base_bootstrap_port={19301 + number}",
            f"base_events_port={17711 + number}",
            f"base_events_replay_port={17811 + number}",
            f"base_master_port={19701 + number}",
            f"vllm.num_gpu_blocks_override={POOL_BLOCKS}",
            "vllm.max_model_len=4096",
            "vllm.transfer.abort_timeout_s=3",
            f"vllm.python={engine_python}",
            f"model={tiny_model}",
            "restart=on_failure",
            "restart_backoff_s=0.2",
            f"proxy.port={18401 + number}",
            *(f"{key}={value}" for key, value in proxy.items()),
        ],
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(
    tmp_path_factory: pytest.TempPathFactory, engine_python: Path, tiny_model: Path
) -> AsyncIterator[SmallPair]:
    """The two engines, and D's proxy."""
    folder = tmp_path_factory.mktemp("small")
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False))
        shared = {"vllm.long_prefill_token_threshold": SHARED_TOKENS}
        p_file = small_fleet(engine_python, tiny_model, 0, "p-", **shared)
        bootstrap_url = p_file.bootstrap_url(0)
        assert bootstrap_url is not None
        bootstrap = Relay(bootstrap_url)
        await bootstrap.start()
        stack.push_async_callback(bootstrap.stop)
        offload = {
            "planner": "threshold",
            "params": {"min_decode_requests": 0},
            "first_token_timeout_s": 8.0,
            "token_timeout_s": 0.05,
            "abandoned_s": 2.0,
            "watch_interval_s": 3600,
            "hold_s": 3.0,
            "leak_share": 0.05,
        }
        peer = {"url": p_file.url(0), "name": "p-0", "role": "kv_producer", "bootstrap_url": bootstrap.url}
        d_file = small_fleet(
            engine_python,
            tiny_model,
            1,
            "d-",
            **{
                "peers": [peer],
                "proxy.offload": offload,
                **{f"proxy.{key}": value for key, value in SETTINGS.items()},
            },
        )
        # Both at the same time: each spends most of its start on one processor.
        async with asyncio.TaskGroup() as starting:
            starting.create_task(stack.enter_async_context(Fleet(p_file, folder / "p", with_proxy=False)))
            starting.create_task(stack.enter_async_context(Fleet(d_file, folder / "d")))
        to_proxy = await stack.enter_async_context(
            httpx.AsyncClient(base_url=d_file.proxy_url(), timeout=120, trust_env=False)
        )
        yield SmallPair(
            Engines(p_file, folder / "p", client),
            Engines(d_file, folder / "d", client),
            bootstrap,
            Proxy(d_file.proxy_url(), to_proxy, d_file.request_model),
        )


@pytest_asyncio.fixture(loop_scope="session")
async def listening(pair: SmallPair) -> AsyncIterator[Proxy]:
    """A separate proxy over both engines that subscribes to their KV events."""
    instances = [
        {
            "name": engines.name(0),
            "url": engines.file.url(0),
            "bootstrap_url": engines.file.bootstrap_url(0),
            "role": "kv_both",
            "events_url": engines.file.events_url(0),
            "events_replay_url": engines.file.events_replay_url(0),
        }
        for engines in pair.both
    ]
    settings = load_settings(
        None,
        port=0,
        instances=instances,
        offload={"planner": "threshold", "params": {"min_decode_requests": 0}, "hold_s": 3.0},
        policy={"name": "round_robin"},
        log_level="warning",
        **SETTINGS,
    )
    async with (
        serving(settings) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client,
    ):
        proxy = Proxy(url, client, pair.d.file.request_model)
        await proxy.until_healthy("p-0", "d-0")
        yield proxy


async def first_answered(engines: Engines) -> int:
    """Number of the first prompt with a token, of two that take several steps and a short one behind them."""
    prompts = [fresh_prompt(3_900), fresh_prompt(3_900), fresh_prompt(20)]
    body = {"model": engines.file.request_model, "prompt": prompts, "max_tokens": 4, "stream": True, "temperature": 0}
    first = None
    async with engines.client.stream("POST", f"{engines.file.url(0)}/v1/completions", json=body) as answer:
        async for event in sse_data(answer):
            if first is None and event != b"[DONE]":
                first = json.loads(event)["choices"][0]["index"]
    assert first is not None
    return int(first)


async def test_a_short_prompt_shares_steps_with_long_ones_where_they_are_bounded(pair: SmallPair) -> None:
    assert await first_answered(pair.p) == 2
    assert await first_answered(pair.d) == 0


async def events_of(proxy: Proxy, engines: Engines) -> dict[str, Any]:
    return dict((await proxy.instance(engines.name(0)))["kv_events"])


async def until_known(pair: SmallPair, proxy: Proxy) -> None:
    """Wait until the proxy has all events of both engines."""
    for engines in pair.both:
        replay_url = engines.file.events_replay_url(0)
        assert replay_url is not None

        async def known(engines: Engines = engines, replay_url: str = replay_url) -> bool:
            return await nothing_from(replay_url, (await events_of(proxy, engines))["next_sequence"])

        await until(known, f"all events of {engines.name(0)} are known", 30)


async def ask(proxy: Proxy, prompt: list[int], **more: Any) -> tuple[list[int], dict[str, Any]]:
    """Send one request; its answer and its row."""
    said = await proxy.say(proxy.body(prompt, ignore_eos=True, **more))
    assert said.answer
    row = await proxy.row(said.request_id)
    assert row is not None
    return said.token_ids, row


def exact(row: dict[str, Any]) -> bool:
    """Check that the exact index was used, and was right."""
    return bool(
        row["index_source"] == "exact"
        and row["predicted_by_exact_tokens"] == row["predicted_cached_tokens"] == row["actual_cached_tokens"]
    )


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """Text of a failed comparison."""
    shown = ("index_source", "predicted_by_exact_tokens", "predicted_by_shadow_tokens", "predicted_cached_tokens")
    return {key: row[key] for key in (*shown, "actual_cached_tokens", "offload_reason", "instance", "prefill_instance")}


async def test_what_engines_evict_is_known_exactly(pair: SmallPair, listening: Proxy) -> None:
    """Growing conversations, half of them offloaded, in pools too small for them: only the shadow index errs."""
    # Fill the caches before the subscription: only a replay reports these blocks.
    before = fresh_prompt(320)
    for engines in pair.both:
        await engines.post(0, listening.body(before))
    await until_trusted(listening, "p-0", "d-0")
    _, row = await ask(listening, [*before, *fresh_prompt(20)])
    assert exact(row), figures(row)
    assert (row["predicted_by_exact_tokens"], row["predicted_by_shadow_tokens"]) == (320, 0)

    draw = random.Random(7)
    system = fresh_prompt(200)
    talks = [[*system, *fresh_prompt(100)] for _ in range(8)]
    rows = []
    for _ in range(70):
        talk = draw.randrange(len(talks))
        said, row = await ask(listening, talks[talk], max_tokens=draw.randrange(1, 60))
        rows.append(row)
        await until_known(pair, listening)  # what an engine evicted is known only once its events have arrived
        # The answer is part of the next turn; its blocks are in the engine's cache too.
        talks[talk] = [*talks[talk], *said, *fresh_prompt(draw.choice([60, 600]))]
        if len(talks[talk]) > 3000:
            talks[talk] = [*system, *fresh_prompt(100)]
    wrong = [figures(row) for row in rows if not exact(row)]
    assert not wrong, json.dumps(wrong)
    handed_over = [row for row in rows if row["offload_reason"] == "chosen"]
    assert 5 <= len(handed_over) < len(rows) - 5
    assert all(row["prefill_instance"] for row in handed_over)
    errors = (await listening.settled())["prediction_error"]["side_by_side"]
    assert errors["exact"]["requests"] == errors["shadow"]["requests"] == len(rows) + 1
    assert errors["exact"]["absolute_error_tokens"] == 0
    assert errors["exact"]["actual_cached_tokens"] > 0
    assert errors["shadow"]["absolute_error_tokens"] > 0
    for engines in pair.both:
        seen = await events_of(listening, engines)
        assert seen["removed"] > 50, "the pools should be too small"
        assert seen["unknown_parent"] == seen["unknown_removed"] == seen["gaps"] == seen["malformed"] == 0, seen


async def test_a_cleared_cache_is_known(pair: SmallPair, listening: Proxy) -> None:
    await until_trusted(listening, "p-0", "d-0")
    prompt = fresh_prompt(410)
    instances = set()
    for _ in range(2):
        _, row = await ask(listening, prompt)
        instances.add(row["instance"])
    assert instances == {"p-0", "d-0"}
    for engines in pair.both:
        await engines.until_idle(0)
        assert (await engines.client.post(f"{engines.file.url(0)}/reset_prefix_cache")).status_code == 200
        await engines.post(0, listening.body(fresh_prompt(20)))  # vLLM reports with its next step

        async def known(engines: Engines = engines) -> bool:
            return bool((await events_of(listening, engines))["cleared"] >= 1)

        await until(known, "the cleared cache is known", 10)
    # A request whose last block was not yet reported when it ended stands in for it one second more, counted from the
    # next snapshot of the instance: these two are that snapshot.
    for _ in range(2):
        await ask(listening, fresh_prompt(20))
    await asyncio.sleep(1.1)
    for _ in range(2):
        _, row = await ask(listening, prompt)
        assert exact(row), figures(row)
        assert row["actual_cached_tokens"] == 0
        assert row["predicted_by_shadow_tokens"] == len(prompt) // BLOCK * BLOCK


AGENTS, TURNS = 24, 5
"""Each agent's context grows from 1,000 to 1,400 tokens: in the end all of them need twice what both pools have."""
ARRIVAL_S, THINK_S = 0.4, 1.5
"""Between two agents' first turns, and between an agent's answer and its next turn: most agents overlap."""


async def crowd(pair: SmallPair, **admission: Any) -> Crowd:
    """All agents, one after another; admission as given."""
    instances = [{"name": each.name(0), "url": each.file.url(0), "role": "none"} for each in pair.both]
    settings = load_settings(
        None, port=0, instances=instances, policy={"name": "warm"}, log_level="warning", admission=admission, **SETTINGS
    )

    async def hits_and_queries() -> tuple[float, float]:
        names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
        hits, queries = [sum([(await each.metrics(0))[name] for each in pair.both]) for name in names]
        return hits, queries

    async def agent(proxy: Proxy, number: int) -> list[float]:
        prompt, took_s = fresh_prompt(1_000), []
        await asyncio.sleep(number * ARRIVAL_S)
        for _ in range(TURNS):
            await asyncio.sleep(THINK_S)
            started_s = time.monotonic()
            said = await proxy.say(
                proxy.body(prompt, ignore_eos=True, max_tokens=4, user=f"agent-{number}"), bound_s=300
            )
            took_s.append(time.monotonic() - started_s)
            prompt = [*prompt, *said.token_ids, *fresh_prompt(96)]
        return took_s

    async with (
        serving(settings) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client,
    ):
        proxy = Proxy(url, client, pair.d.file.request_model)
        await proxy.until_healthy("p-0", "d-0")
        before = await hits_and_queries()
        took_s = await asyncio.gather(*(agent(proxy, number) for number in range(AGENTS)))
        after = await hits_and_queries()
        await proxy.settled()
        rows = await proxy.rows()
    assert len(rows) == AGENTS * TURNS
    assert {row["outcome"] for row in rows} == {"ok"}
    hit_rate = (after[0] - before[0]) / (after[1] - before[1])
    mean_s = sum(map(sum, took_s)) / len(rows)
    return Crowd(hit_rate, mean_s, [row["held_s"] for row in rows], Counter(row["admission"] for row in rows))


async def test_holding_sessions_keeps_their_caches(pair: SmallPair) -> None:
    """More agents than the pools hold: without holding each turn evicts what the next one needs."""
    never = await crowd(pair, name="never_hold")
    assert never.reasons == {"never_holds": AGENTS * TURNS}
    # Thresholds for a model whose prefills take milliseconds: engines that idle are no reason to send.
    params = {"keep_s": 5.0, "least_prefilling": 0.0, "kept_share": 1.0}
    holding = await crowd(pair, name="working_set", params=params, max_hold_s=240.0)
    shown = f"{never} against {holding}"
    assert any(holding.held_s), shown
    assert "held_long_enough" not in holding.reasons, shown
    assert holding.hit_rate > never.hit_rate + 0.1, shown


async def test_an_engine_that_was_killed_is_followed_again(pair: SmallPair, listening: Proxy) -> None:
    await until_trusted(listening, "p-0", "d-0")
    prompt = fresh_prompt(410)
    for _ in range(2):
        await ask(listening, prompt)
    known = await listening.instance("d-0")
    restarts = pair.d.state(0).restarts
    pair.d.kill(0)
    await pair.d.until_all_ready()
    assert pair.d.state(0).restarts == restarts + 1
    # Stored before the proxy has noticed the change: it has to request a replay.
    await pair.d.post(0, listening.body(fresh_prompt(64)))
    await listening.until_healthy("d-0")

    async def seen_as_new() -> bool:
        now = await listening.instance("d-0")
        return bool(now["engine_id"] != known["engine_id"] and now["restarts"] == known["restarts"] + 1)

    await until(seen_as_new, "the proxy has noticed the new engine", 30)
    await until_trusted(listening, "p-0", "d-0")
    found = {}
    for _ in range(2):
        _, row = await ask(listening, prompt)
        assert exact(row), figures(row)
        found[row["instance"]] = row["actual_cached_tokens"]
    assert found == {"p-0": len(prompt) // BLOCK * BLOCK, "d-0": 0}


async def test_an_engine_that_keeps_abandoned_kv_is_recycled(pair: SmallPair) -> None:
    """Automatic recovery: the proxy requests it, the supervisor replaces the engine, the hand-offs continue."""
    proxy = pair.proxy
    p_id = (await pair.p.client.get(f"{pair.p.file.bootstrap_url(0)}/query")).json()["0"]["engine_id"].encode()

    # P under another id, at a port without a listener: D asks there, and waits forever.
    def mislead(answer: bytes) -> bytes:
        return re.sub(rb"tcp://[^\"]+", b"tcp://127.0.0.1:9", answer.replace(p_id, b"0" * 8 + p_id[8:]))

    pair.bootstrap.change = mislead

    async def renamed() -> bool:
        return bool((await proxy.instance("p-0"))["engine_id"] != p_id.decode())

    await until(renamed, "the proxy has the wrong engine id of P", 30)
    old_id = (await proxy.instance("d-0"))["engine_id"]
    before = pair.d.state(0)
    prompt = fresh_prompt(1000)
    said = await proxy.say(proxy.body(prompt))
    row = await proxy.row(said.request_id)
    assert row is not None
    assert row["offload_reason"] == "fell_back_d_timeout"
    assert said.answer == (await proxy.say(proxy.body(prompt))).answer

    async def recycled() -> bool:
        now = pair.d.state(0)
        return now.recycles == before.recycles + 1 and now.status == "ready"

    await until(recycled, "the supervisor has replaced D", 120)
    assert pair.d.state(0).restarts == before.restarts
    pair.bootstrap.change = None

    async def served() -> bool:
        d, p = await proxy.instance("d-0"), await proxy.instance("p-0")
        return bool(
            d["healthy"] and d["engine_id"] != old_id and not d["recycle_wanted"] and p["engine_id"] == p_id.decode()
        )

    await until(served, "the proxy uses the new D", 30)
    assert (await pair.d.metrics(0))["vllm:kv_cache_usage_perc"] < 0.01
    said = await proxy.say(proxy.body(fresh_prompt(1000)))
    assert said.answer
    row = await proxy.row(said.request_id)
    assert row is not None
    assert row["offload_reason"] == "chosen", row
    assert pair.d.state(0).recycles == before.recycles + 1
    await proxy.settled()


async def test_text_that_an_engine_has_evicted_is_not_expected_there(pair: SmallPair) -> None:
    """Without KV events: the index has blocks of text, the engine's pool is one of tokens."""
    instances = [{"name": pair.d.name(0), "url": pair.d.file.url(0), "role": "none"}]
    settings = load_settings(None, port=0, instances=instances, log_level="warning", **SETTINGS)
    async with (
        serving(settings) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client,
    ):
        proxy = Proxy(url, client, pair.d.file.request_model)
        await proxy.until_healthy(pair.d.name(0))

        async def sent(number: int) -> dict[str, Any]:
            text = " ".join(random.Random(f"text {number}").choices(["alpha", "beta", "gamma", "delta"], k=520))
            said = await proxy.say(proxy.body(text, max_tokens=1, chat=number % 2 == 0))
            row = await proxy.row(said.request_id)
            assert row is not None
            return row

        count = tokens = 0
        while tokens < 3 * POOL_BLOCKS * BLOCK:
            tokens += (await sent(count))["prompt_tokens"]
            count += 1
        latest, oldest = await sent(count - 1), await sent(0)
        assert latest["predicted_cached_tokens"] > 0 < latest["actual_cached_tokens"]
        assert oldest["predicted_cached_tokens"] == 0, f"{oldest['actual_cached_tokens']} of {tokens} tokens in {count}"
        assert oldest["actual_cached_tokens"] < BLOCK * 3, "the first blocks are the chat's template"
