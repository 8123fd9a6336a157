"""The instruments on two real engines: sizes, pairing and verification are checked, times only for their order."""

from __future__ import annotations

import asyncio
import os
from itertools import pairwise
from pathlib import Path

from bench.instruments.calibration import calibrated, points_yaml
from bench.instruments.engine import refuse_busy
from bench.instruments.facts import CalibratedEngine
from bench.instruments.interference import InterferencePlan, measure_interference
from bench.instruments.plans import EngineLimits, reduced
from bench.instruments.prompts import Prompts, TokenRange
from bench.instruments.self_test import hand_offs
from bench.instruments.steps import measure_decodes, measure_prefills
from bench.instruments.targets import fleet_targets, notes_of, opened
from bench.instruments.transfer import TransferPlan, measure_transfers
from bench.instruments.transfer_tables import by_load, typical
from launch.doctor.probes.deep import gather_deep
from launch.doctor.probes.python import ask_python
from policies.types import Transport
from sim.fit_report import profile_yaml
from sim.hardware import load_profile
from sim.points import load_points
from tests.engines.rig import REAL_ENGINES, Engines

pytestmark = REAL_ENGINES

TOKENS = TokenRange(10, 2_000)
TIMEOUT_S = 120.0
SMALL, LARGE = 512, 4_096


async def test_a_prefill_among_streams_is_measured(engines: Engines) -> None:
    targets = fleet_targets(engines.file, "vllm-cpu-4x")
    plan = InterferencePlan(
        streams=(2,), prefill_tokens=(SMALL, LARGE), repeats=2, context_tokens=64, before_tokens=16, stream_tokens=8_000
    )
    async with opened(targets.engines[:1], targets.model, None, TIMEOUT_S) as (engine,):
        await engines.until_idle(0)
        rows = await measure_interference(engine, plan, Prompts(TOKENS))
        await refuse_busy((engine,))
    assert [row.prefill_tokens for row in rows] == [SMALL, LARGE] * 2
    assert all(not row.cached_tokens for row in rows)
    assert all(row.before.tokens >= 2 * 16 and row.decode_s > 0 for row in rows)
    fastest = {size: min(row.ttft_s for row in rows if row.prefill_tokens == size) for size in (SMALL, LARGE)}
    assert fastest[SMALL] < fastest[LARGE]


async def test_hand_offs_are_pulled_whole_idle_and_under_load(engines: Engines) -> None:
    targets = fleet_targets(engines.file, "vllm-cpu-4x")
    # Two layers of one KV head of 32 values, float32.
    assert targets.kv_bytes_per_token == 2 * 2 * 1 * 32 * 4
    assert (targets.transport, targets.expert_miss) == ("tcp", 0.0)
    plan = TransferPlan(
        tokens=(SMALL, LARGE),
        concurrent=(1, 2),
        background=(0, 1),
        background_tokens=64,
        background_output=500,
        repeats=1,
    )
    async with opened(targets.engines[:2], targets.model, None, TIMEOUT_S) as (source, target):
        await engines.until_idle(0, 1)
        rows = await measure_transfers(source, target, plan, Prompts(TOKENS), targets.kv_bytes_per_token)
    assert len(rows) == 2 * (1 + 2) * 2
    assert all(row.pulled for row in rows)
    for row in rows:
        assert row.size_bytes == row.tokens * 512
        assert row.pulled_tokens is not None
        assert abs(row.pulled_tokens - row.tokens) <= 16
        assert 0 < row.d_leg_s <= row.together_s + 1e-6
    assert all(row.p_prefill_s is not None and row.p_prefill_s <= row.p_leg_s for row in rows if not row.background)
    idle = [row for row in rows if not row.background]
    assert all(row.same_text for row in idle)
    legs = {key.tokens: typical(found)[0].p_leg_s for key, found in by_load(idle).items() if key.concurrent == 1}
    assert legs[SMALL] < legs[LARGE]


async def test_a_calibration_gives_a_usable_profile(engines: Engines, tmp_path: Path) -> None:
    targets = fleet_targets(engines.file, "vllm-cpu-4x")
    prompts = Prompts(TOKENS)
    async with opened(targets.engines[:2], targets.model, None, TIMEOUT_S) as (engine, other):
        await engines.until_idle(0, 1)
        (note, _) = await notes_of((engine, other), targets)
        assert note.version is not None
        assert note.pool_tokens == 131_072
        limits = EngineLimits(
            max_model_len=await engine.max_model_len() or 0,
            pool_tokens=note.pool_tokens,
            max_num_seqs=targets.max_num_seqs or 0,
            largest_tokens=2_048,
        )
        assert (limits.max_model_len, limits.max_num_seqs) == (65_536, 8)
        plan = reduced(limits, 1)
        found = calibrated(
            CalibratedEngine(
                name="cpu",
                source="test",
                pool_tokens=limits.pool_tokens,
                kv_bytes_per_token=targets.kv_bytes_per_token or 0,
                max_num_batched_tokens=8_192,
                max_num_seqs=8,
                max_model_len=65_536,
                expert_miss=targets.expert_miss,
            ),
            await measure_prefills(engine, plan.steps, prompts),
            await measure_decodes(engine, plan.steps, prompts),
            await measure_interference(engine, plan.interference, prompts),
            {"tcp": await measure_transfers(engine, other, plan.transfer, prompts, targets.kv_bytes_per_token or 0)},
        )
    path = tmp_path / "cpu.yaml"
    path.write_text(profile_yaml(found.profile))
    assert load_profile(str(path)) == found.profile
    (tmp_path / "cpu_points.yaml").write_text(points_yaml(found.points))
    assert load_points(tmp_path / "cpu_points.yaml") == found.points
    assert found.profile.step.expert_miss == 0.0
    model = found.costs.book()
    assert 0 < model.prefill.seconds(512, 0) < model.prefill.seconds(8_192, 0)
    assert found.costs.transfers[Transport.TCP].bytes_per_s > 0


async def test_the_doctor_tests_every_engine_of_a_running_fleet(engines: Engines, engine_python: Path) -> None:
    names = [member.name for member in engines.file.members]
    await engines.until_idle(*range(len(names)))
    found = await asyncio.to_thread(hand_offs, engines.file, "vllm-cpu-4x.yaml")
    assert [(one.source, one.target) for one in found] == [*pairwise(names), (names[-1], names[0])]
    for one in found:
        assert (one.error, one.same_text) == (None, True)
        assert one.pulled_tokens is not None
        assert abs(one.pulled_tokens - 512) <= 16
        assert one.size_bytes == one.pulled_tokens * 512
    deep = gather_deep(ask_python(str(engine_python)), dict(os.environ), None, None, None)
    assert deep.near_nics is not None, deep.near_nics_error
    assert "cpu:0" in deep.near_nics
