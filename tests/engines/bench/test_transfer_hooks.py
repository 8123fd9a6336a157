"""The connector's hooks in two real engines: applied, pairing complete, removed; and the first transfer of a pair.

These engines are started and stopped before the four that the other tests share, which run without hooks.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx
import pytest
import pytest_asyncio

from bench.instruments.commands.hooks import VARIABLE
from bench.instruments.hooked.hook_file import HookFile
from bench.instruments.hooked.stages import TransferStages
from bench.instruments.prompts import Prompts, TokenRange
from bench.instruments.targets import fleet_targets, opened
from bench.instruments.transfer import TransferPlan, measure_transfers
from bench.instruments.transfer_tables import hooks_sheet
from launch.fleet.file import FleetFile, load_fleet
from launch.fleet.sections import PairWarmupSettings
from launch.run.pair_warmup import PairEnd, warm_pairs
from launch.run.supervisor import Fleet
from launch.transfer_hooks import install
from policies.types import Role
from tests.engines.conftest import ROOT
from tests.engines.relay import Relay
from tests.engines.rig import REAL_ENGINES, until

pytestmark = REAL_ENGINES

TOKENS = TokenRange(10, 2_000)
KV_BYTES = 512
SMALL, LARGE = 512, 8_192


@dataclass
class Pair:
    """Two engines with hooks."""

    file: FleetFile
    records: Path
    before: install.HooksReport
    applied: install.HooksReport
    site: set[str]
    """Names in the folder of vLLM before."""

    def end(self, number: int) -> PairEnd:
        return PairEnd(self.file.name(number), self.file.url(number), Role.KV_BOTH, self.file.bootstrap_url(number))


def site_of(python: Path) -> Path:
    return next((python.parent.parent / "lib").glob("python3*")) / "site-packages"


def names_in(site: Path) -> set[str]:
    return {path.name for path in site.iterdir()} - {"__pycache__"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory, engine_python: Path, tiny_model: Path) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("hooked")
    before = install.revert(str(engine_python))
    site = names_in(site_of(engine_python))
    file = load_fleet(
        ROOT / "configs" / "fleets" / "vllm-cpu-4x.yaml",
        [
            *("count=2", "base_port=18301", "base_bootstrap_port=19301", "base_events_port=17301"),
            *("base_events_replay_port=17351", "base_master_port=19351", "ready_timeout_s=360"),
            f"vllm.python={engine_python}",
            f"model={tiny_model}",
            f"env.{VARIABLE}={folder / 'records.jsonl'}",
        ],
    )
    applied = install.apply(str(engine_python))
    try:
        async with Fleet(file, folder / "run", with_proxy=False):
            yield Pair(file, folder / "records.jsonl", before, applied, site)
    finally:
        install.revert(str(engine_python))


async def hand_over(pair: Pair, source: int, target: int, hand_offs: int) -> tuple[list[TransferStages], int]:
    """So many hand-offs from one engine to the other, one after the other, and how often D asked for P's address."""
    asked = 0

    def count(answer: bytes) -> bytes:
        nonlocal asked
        asked += 1
        return answer

    bootstrap_url = pair.file.bootstrap_url(source)
    assert bootstrap_url is not None
    bootstrap = Relay(bootstrap_url)
    bootstrap.change = count
    hooks, prompts, ids = HookFile(pair.records), Prompts(TOKENS), []
    targets = fleet_targets(pair.file, "vllm-cpu-4x")
    async with AsyncExitStack() as stack:
        await bootstrap.start()
        stack.push_async_callback(bootstrap.stop)
        engines = await stack.enter_async_context(opened(targets.engines, targets.model, None, 120.0))
        for _ in range(hand_offs):
            prompt = prompts.fresh(SMALL)
            leg = await engines[source].prefill(prompt)
            assert leg.decode_params["remote_bootstrap_addr"] == bootstrap_url
            by_relay = {**leg.decode_params, "remote_bootstrap_addr": bootstrap.url}
            await engines[target].generate(prompt, 1, transfer=by_relay)
            ids.append(leg.decode_params["transfer_id"])
    found = await hooks.of(ids)
    assert found.incomplete == {}
    return [found.complete[each] for each in ids], asked


async def test_the_first_hand_off_of_a_pair_connects_it_unless_it_was_warmed(pair: Pair) -> None:
    async with httpx.AsyncClient() as client:
        warmed = [(pair.end(1), pair.end(0))]
        assert await warm_pairs(warmed, pair.file.request_model, PairWarmupSettings(), client) == []
    cold, asked_cold = await hand_over(pair, 0, 1, 5)
    warm, asked_warm = await hand_over(pair, 1, 0, 5)
    usual = median(each.connect_s for each in cold[1:])
    print(
        f"connect: first {cold[0].connect_s * 1000:.1f} ms, later {usual * 1000:.2f} ms, "
        f"first after the warm-up {warm[0].connect_s * 1000:.2f} ms"
    )
    assert (asked_cold, asked_warm) == (1, 0)
    # A look-up over HTTP, with a client made for it, against one turn of an event loop.
    assert cold[0].connect_s > usual


async def test_records_of_both_sides_pair_and_their_sizes_are_those_of_the_prompts(pair: Pair) -> None:
    hooks = HookFile(pair.records)
    targets = fleet_targets(pair.file, "vllm-cpu-4x")
    plan = TransferPlan(tokens=(SMALL, LARGE), concurrent=(1, 2), repeats=1)
    async with opened(targets.engines, targets.model, None, 120.0) as (source, target):
        rows = await measure_transfers(source, target, plan, Prompts(TOKENS), KV_BYTES)
    found = await hooks.of([row.transfer_id or "" for row in rows])
    assert found.incomplete == {}
    for row in rows:
        stages = row.stages = found.complete[row.transfer_id or ""]
        assert row.tokens * KV_BYTES <= stages.size_bytes <= (row.tokens + 16) * KV_BYTES
        assert stages.blocks == stages.size_bytes // (16 * KV_BYTES)
        assert stages.pieces >= 4  # keys and values of two layers
        assert stages.ready_wait_s == 0  # P was ready before D was asked
        assert min(stages.wire_s, stages.control_s, stages.admission_s, stages.p_prefill_s) > 0
        on_d_s = stages.d_queue_s + stages.control_s + stages.wire_s + stages.admission_s
        assert on_d_s < row.d_leg_s
        assert stages.p_queue_s + stages.p_prefill_s < row.p_leg_s
    by_size = {row.tokens: row.stages for row in rows if row.concurrent == 1 and row.stages}
    assert by_size[SMALL].size_bytes < by_size[LARGE].size_bytes
    assert by_size[SMALL].p_prefill_s < by_size[LARGE].p_prefill_s
    assert len(hooks_sheet(rows).rows) == 4


async def test_d_that_asks_first_waits_for_p(pair: Pair) -> None:
    """The D leg is sent before the P leg: the wait for readiness is recorded as such."""
    hooks, prompt = HookFile(pair.records), Prompts(TOKENS).fresh(SMALL)
    targets = fleet_targets(pair.file, "vllm-cpu-4x")
    async with httpx.AsyncClient(timeout=60) as client:
        engine = (await client.get(f"{pair.file.bootstrap_url(0)}/query")).json()["0"]["engine_id"]
        body = {"model": pair.file.request_model, "prompt": prompt, "max_tokens": 1, "min_tokens": 1}
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": "early",
            "remote_engine_id": engine,
            "remote_bootstrap_addr": pair.file.bootstrap_url(0),
        }

        async def waits() -> bool:
            metrics = (await client.get(f"{targets.engines[1].url}/metrics")).text
            found = re.search(r"^vllm:num_requests_waiting\{.*\} (\S+)$", metrics, re.MULTILINE)
            return found is not None and float(found[1]) >= 1

        d_leg = asyncio.create_task(
            client.post(f"{targets.engines[1].url}/v1/completions", json={**body, "kv_transfer_params": params})
        )
        try:
            await until(waits, "D has the request and waits for its KV")
            params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "early"}
            answer = await client.post(
                f"{targets.engines[0].url}/v1/completions", json={**body, "kv_transfer_params": params}
            )
            assert answer.status_code == 200
            assert (await d_leg).status_code == 200
        finally:
            d_leg.cancel()
            await asyncio.gather(d_leg, return_exceptions=True)
    stages = (await hooks.of(["early"])).complete["early"]
    # As long as P's whole prefill, which began when D had the request.
    assert stages.ready_wait_s > 0


async def test_hooks_change_no_file_and_leave_none(pair: Pair, engine_python: Path) -> None:
    assert (pair.before.hooks, pair.applied.hooks) == ("absent", "applied")
    assert pair.applied.files == pair.before.files
    assert pair.applied.made_for == "0.18.1"
    reverted = install.revert(str(engine_python))
    assert reverted == pair.before
    assert names_in(site_of(engine_python)) == pair.site
    assert not list(site_of(engine_python).glob("__pycache__/warmroute_transfer_hooks*"))
