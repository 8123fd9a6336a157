"""A real engine with two data-parallel ranks behind one URL, started by the launcher before the shared engines.

It schedules by priority, one request at a time: the order of its prompts is tested here too.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from launch.fleet.file import FleetFile, load_fleet
from launch.run.state import read_state
from launch.run.supervisor import Fleet
from proxy.app import ProxyApp
from proxy.settings import load_settings
from tests.engines.conftest import ROOT
from tests.engines.rig import QUICK_ENGINES, REAL_ENGINES, fresh_prompt, many, sse_data, until
from tests.proxy.conftest import serving

pytestmark = REAL_ENGINES


@dataclass
class Ranks:
    """The engine's fleet, and a proxy over its ranks."""

    file: FleetFile
    run_dir: Path
    app: ProxyApp
    client: httpx.AsyncClient
    """Client of the proxy."""

    def core(self, rank: int) -> psutil.Process:
        """The process that schedules a rank."""
        guard = psutil.Process(read_state(self.run_dir).processes[0].pid)
        title = f"EngineCore_DP{rank}"
        return next(each for each in guard.children(recursive=True) if title in " ".join(each.cmdline()))

    async def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (await self.client.get("/instances")).json()["instances"]
        return rows

    async def ask(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """The breakdown row of one request, with its answer."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
        answer = await self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        row: dict[str, Any] = (await self.client.get("/breakdown", params={"limit": 1})).json()["rows"][0]
        return {**row, "text": answer.json()["choices"][0]["text"]}

    async def policy(self, name: str) -> None:
        (await self.client.put("/policy", json={"name": name})).raise_for_status()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranks(
    tmp_path_factory: pytest.TempPathFactory, engine_python: Path, tiny_model: Path
) -> AsyncIterator[Ranks]:
    """One engine with two ranks, and a proxy that follows the events of both."""
    file = load_fleet(
        ROOT / "configs" / "fleets" / "vllm-cpu-4x.yaml",
        [
            QUICK_ENGINES,
            "count=1",
            "name_prefix=engine-",
            "base_port=18501",
            "base_bootstrap_port=19501",
            "base_events_port=17731",
            "base_events_replay_port=17831",
            "base_master_port=19901",
            "vllm.data_parallel_size=2",
            "vllm.scheduling_policy=priority",
            "vllm.max_num_seqs=1",
            "vllm.num_gpu_blocks_override=1024",
            "vllm.max_model_len=8192",
            f"vllm.python={engine_python}",
            f"model={tiny_model}",
        ],
    )
    settings = {
        "port": 0,
        "instances": file.proxy_config()["instances"],
        "policy": {"name": "round_robin"},
        "fields": {"allow": ["priority"]},
        "classes": {"medium_tokens": 200, "heavy_tokens": 2_000},
        "health": {"interval_s": 0.5, "timeout_s": 5.0},
        "timeouts": {"connect_s": 30},  # an engine that decodes takes both cores of a small machine
        "events": {"join_interval_s": 0.2},
        "offload": {"planner": "never", "first_token_timeout_s": 20.0, "prefill_timeout_s": 20.0},
        "log_level": "warning",
    }
    async with AsyncExitStack() as stack:
        run_dir = tmp_path_factory.mktemp("ranks") / "run"
        await stack.enter_async_context(Fleet(file, run_dir, with_proxy=False))
        app, url = await stack.enter_async_context(serving(load_settings(None, **settings)))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60, trust_env=False))
        found = Ranks(file, run_dir, app, client)

        async def well() -> bool:
            rows = await found.rows()
            return all(row["healthy"] and row["kv_events"]["trusted"] for row in rows)

        await until(well, "both ranks healthy and their events followed", 120)
        yield found


async def test_the_engine_is_two_instances_with_a_pool_each(ranks: Ranks) -> None:
    rows = await ranks.rows()
    assert [row["name"] for row in rows] == ["engine-0/0", "engine-0/1"]
    # vLLM reports the sum of both pools.
    assert [row["engine"]["kv_capacity_tokens"] for row in rows] == [1024 * 16] * 2
    assert [row["engine_id"].rpartition("_")[2] for row in rows] == ["dp0", "dp1"]
    listed = (await ranks.client.get("/ready?verbose")).json()["conditions"]
    assert {each["name"]: each["ok"] for each in listed}["data_parallel"]


async def test_cached_tokens_are_those_of_the_routed_rank(ranks: Ranks) -> None:
    await ranks.policy("round_robin")
    prompts = [fresh_prompt(400) for _ in range(4)]
    first = [await ranks.ask(prompt) for prompt in prompts]
    assert [row["actual_cached_tokens"] for row in first] == [0] * 4
    by_instance = {row["instance"] for row in first}
    assert by_instance == {"engine-0/0", "engine-0/1"}
    await ranks.policy("linear")
    again = [await ranks.ask([*prompt, *fresh_prompt(8)]) for prompt in prompts]
    assert [row["instance"] for row in again] == [row["instance"] for row in first]
    assert [row["actual_cached_tokens"] for row in again] == [400] * 4
    # The same prompt is unknown to the other rank.
    other = {"engine-0/0": "engine-0/1", "engine-0/1": "engine-0/0"}[first[0]["instance"]]
    await ranks.policy("round_robin")
    seen: dict[str, int] = {}
    for _ in range(2):
        row = await ranks.ask(prompts[0])
        seen.setdefault(row["instance"], row["actual_cached_tokens"])
    assert seen[other] == 0
    assert seen[first[0]["instance"]] >= 384


async def test_the_events_of_both_ranks_predict_exactly(ranks: Ranks) -> None:
    await ranks.policy("round_robin")
    prompts = [fresh_prompt(320) for _ in range(4)]
    before = {row["name"]: row["kv_events"]["blocks"] for row in await ranks.rows()}
    for prompt in prompts:
        await ranks.ask(prompt)

    async def reported() -> bool:
        return all(row["kv_events"]["blocks"] >= before[row["name"]] + 40 for row in await ranks.rows())

    await until(reported, "blocks of two prompts on each rank")
    await ranks.policy("linear")
    rows = [await ranks.ask([*prompt, *fresh_prompt(8)]) for prompt in prompts]
    assert [row["index_source"] for row in rows] == ["exact"] * 4
    assert [row["predicted_by_exact_tokens"] for row in rows] == [320] * 4
    assert [row["actual_cached_tokens"] for row in rows] == [320] * 4


async def test_one_rank_prefills_for_the_other(ranks: Ranks) -> None:
    prompt = fresh_prompt(2_400)
    switched = {"planner": "threshold", "planner_params": {"min_decode_requests": 0}}
    (await ranks.client.put("/policy", json={"name": "linear", **switched})).raise_for_status()
    try:
        handed = await ranks.ask(prompt)
    finally:
        (await ranks.client.put("/policy", json={"name": "round_robin", "planner": "never"})).raise_for_status()
    assert handed["offload_reason"] == "chosen"
    assert {handed["instance"], handed["prefill_instance"]} == {"engine-0/0", "engine-0/1"}
    texts = {(await ranks.ask(prompt))["text"] for _ in range(2)}
    assert texts == {handed["text"]}


async def test_short_prompts_overtake_long_ones_that_wait(ranks: Ranks) -> None:
    """While the core of rank 0 is suspended, long prompts are sent, then one whose client gave it a later tier, then
    short ones. Which of them it has when it goes on, beside the first, is a matter of milliseconds: hence several.
    """
    # All have room in its pool: the proxy holds requests that have none.
    long = {f"long-{number}": fresh_prompt(1_500) for number in range(8)}
    short = {"later": fresh_prompt(60)} | {f"short-{number}": fresh_prompt(50) for number in range(3)}
    prompts = long | short
    # Due times an hour and a day later: however long the requests take to get here, they decide.
    order = {"name": "warm", "params": {"slowdown": 1e7}}
    (await ranks.client.put("/policy", json=order)).raise_for_status()
    ranks.app.operations.fleet.drain("engine-0/1")
    answers: dict[str, str] = {}
    """In the order of their first tokens."""

    async def stream(name: str) -> None:
        body = {"model": "tiny", "prompt": prompts[name], "max_tokens": 8, "temperature": 0, "stream": True}
        body |= {"priority": 5} if name == "later" else {}
        async with ranks.client.stream("POST", "/v1/completions", json=body, timeout=300) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for event in sse_data(answer):
                if event != b"[DONE]":
                    answers[name] = answers.get(name, "") + json.loads(event)["choices"][0]["text"]

    async def sent(count: int) -> bool:
        return bool((await ranks.rows())[0]["requests"] == count)

    core = ranks.core(0)
    try:
        core.suspend()
        async with many([stream(name) for name in long]) as first:
            await until(functools.partial(sent, len(long)), "the long prompts are sent to the engine")
            async with many([stream(name) for name in short]) as then:
                await until(functools.partial(sent, len(prompts)), "all prompts are sent to the engine")
                await asyncio.sleep(2)  # until its API server has passed them on; one that comes later is only later
                assert not answers
                core.resume()
                await asyncio.gather(*first, *then)
    finally:
        core.resume()
        ranks.app.operations.fleet.undrain("engine-0/1")
        await ranks.policy("round_robin")
    # vLLM reads the last of two priorities, which is the proxy's: the first, 5, would have gone before all others.
    *others, last = answers
    assert last == "later"
    assert others[-1].startswith("long"), others
    pairs = ranks.app.core.router.state.ledger.account("engine-0/0").pairs
    assert pairs.kept >= 2 * len(short)
    assert pairs.kept > pairs.broken  # of these is ``later``: its due time is early, but not its tier
    url, headers = ranks.file.url(0), {"x-data-parallel-rank": "1"}
    for name in ("long-0", "later", "short-0"):
        body = {"model": "tiny", "prompt": prompts[name], "max_tokens": 8, "temperature": 0}
        plain = await ranks.client.post(f"{url}/v1/completions", json=body, headers=headers)
        assert plain.json()["choices"][0]["text"] == answers[name], name
