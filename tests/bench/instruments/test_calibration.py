"""Calibration against simulated engines: the fit must find the constants that timed them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from bench.instruments.calibration import (
    Calibrated,
    calibrated,
    fit_transfer_formula,
    points_yaml,
)
from bench.instruments.engine import InstrumentError
from bench.instruments.facts import CalibratedEngine
from bench.instruments.interference import InterferencePlan, measure_interference
from bench.instruments.plans import EngineLimits, reduced
from bench.instruments.prompts import Prompts
from bench.instruments.steps import StepsPlan, measure_decodes, measure_prefills
from bench.instruments.transfer import TransferRow, measure_transfers
from policies.costs.formulas import TransferJob, transfer_formula
from policies.costs.transfer_constants import TRANSFER_FORMULAS, TransferConstants, TransferFormula
from policies.types import Transport
from sim.fit_report import profile_yaml
from sim.hardware import HardwareProfile, load_profile
from sim.points import load_points
from tests.bench.instruments.virtual import VirtualLab

STEPS = StepsPlan(
    prefills=((64, 0), (1_024, 0), (4_096, 0), (8_192, 0), (16_384, 0), (32_768, 0), (512, 8_192), (2_048, 32_768)),
    decodes=((1, 1_024), (2, 1_024), (4, 1_024), (8, 1_024), (16, 1_024), (32, 1_024), (1, 16_384), (8, 16_384)),
    repeats=1,
)
INTERFERENCE = InterferencePlan(streams=(4, 16), prefill_tokens=(1_024, 8_192, 32_768), repeats=1)


def calibrate(profile: HardwareProfile | str, expert_miss: float | None = None) -> Calibrated:
    lab = VirtualLab(profile)
    engine = lab.engines[0]
    prompts = Prompts(nonce="calibration")

    async def measure() -> Calibrated:
        prefills = await measure_prefills(engine, STEPS, prompts)
        decodes = await measure_decodes(engine, STEPS, prompts)
        rows = await measure_interference(engine, INTERFERENCE, prompts)
        report = await engine.report()
        known = CalibratedEngine(
            name="mine",
            source="simulated",
            pool_tokens=report.pool_tokens or 0,
            kv_bytes_per_token=lab.profile.kv.bytes_per_token,
            max_num_batched_tokens=lab.profile.max_num_batched_tokens,
            max_num_seqs=lab.profile.max_num_seqs,
            max_model_len=lab.profile.max_model_len,
            expert_miss=expert_miss,
        )
        return calibrated(known, prefills, decodes, rows)

    return lab.run(measure())


@pytest.fixture(scope="module")
def h200() -> Calibrated:
    return calibrate("h200")


def test_the_fit_finds_the_step_times_of_the_engine(h200: Calibrated) -> None:
    known, found = load_profile("h200").step, h200.profile.step
    for name in ("decode_s", "decode_experts_s", "decode_context_s", "expert_miss"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=0.02), name
    for name in ("prefill_token_s", "prefill_context_s", "prefill_floor_s"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=0.1), name
    # A prefill waits for the decode step in flight, which the fit counts as front end.
    assert known.frontend_s <= found.frontend_s <= known.frontend_s + known.decode_s


def test_all_modelled_times_are_close_to_the_measured_ones(h200: Calibrated) -> None:
    assert h200.fit.median_error < 0.02
    assert abs(h200.fit.worst.error) < 0.2


def test_the_cost_models_start_from_the_measured_prefills(h200: Calibrated) -> None:
    assert all(abs(each.error) < 0.3 for each in h200.cost_residuals)
    model = h200.costs.book().prefill
    timing = load_profile("h200").timing
    whole = timing.frontend(32_768) + sum(
        timing.mixed(timing.chunk(8_192, done), 0, 0) for done in range(0, 32_768, 8_192)
    )
    assert model.seconds(32_768, 0) == pytest.approx(whole, rel=0.15)


def test_another_engine_gives_other_constants() -> None:
    profile = load_profile("h200")
    slow = profile.model_copy(
        update={"step": profile.step.model_copy(update={"decode_s": 0.03, "prefill_token_s": 4e-5})}
    )
    found = calibrate(slow).profile.step
    assert found.decode_s == pytest.approx(0.03, rel=0.05)
    assert found.prefill_token_s == pytest.approx(4e-5, rel=0.1)


def test_a_dense_model_is_found_to_be_dense() -> None:
    profile = load_profile("h200")
    dense = {"decode_experts_s": 0.0, "expert_miss": 0.0, "decode_s": 0.01, "decode_context_s": 1e-7}
    found = calibrate(profile.model_copy(update={"step": profile.step.model_copy(update=dense)})).profile.step
    assert (found.decode_experts_s, found.expert_miss) == (0.0, 0.0)
    assert found.decode_s == pytest.approx(0.01, rel=0.02)


def test_points_and_profile_are_read_again(h200: Calibrated, tmp_path: Path) -> None:
    points, profile = tmp_path / "mine_points.yaml", tmp_path / "mine.yaml"
    points.write_text(points_yaml(h200.points))
    profile.write_text(profile_yaml(h200.profile))
    assert load_points(points) == h200.points
    assert load_profile(str(profile)) == h200.profile
    assert yaml.safe_load(profile.read_text())["costs"]["prefill"] == h200.costs.prefill._asdict()


def test_transfers_give_the_profiles_table_and_the_cost_models_formula() -> None:
    lab = VirtualLab("h200", engines=2, transport="nvlink")
    source, target = lab.engines
    size = lab.profile.kv.bytes_per_token
    prompts = Prompts(nonce="calibration")
    plan = reduced(EngineLimits(max_model_len=200_000, pool_tokens=738_432, max_num_seqs=64), 1)

    async def measure() -> Calibrated:
        prefills = await measure_prefills(source, STEPS, prompts)
        decodes = await measure_decodes(source, STEPS, prompts)
        rows = await measure_interference(source, INTERFERENCE, prompts)
        moved = await measure_transfers(source, target, plan.transfer, prompts, size)
        moved += await measure_transfers(source, target, plan.sharing, prompts, size)
        known = CalibratedEngine(
            name="mine",
            source="simulated",
            pool_tokens=738_432,
            kv_bytes_per_token=size,
            max_num_batched_tokens=8_192,
            max_num_seqs=64,
            max_model_len=200_000,
        )
        return calibrated(known, prefills, decodes, rows, {"nvlink": moved})

    found = lab.run(measure())
    table, known = found.profile.transport("nvlink"), lab.profile.transport("nvlink")
    assert found.profile.default_transport == "nvlink"
    assert [row.streams for row in table.rows] == [0, 4, 12]
    for tokens in (16_384, 65_536):
        for streams in (0, 12):
            seconds = table.seconds(tokens * size, streams, 1)
            # Waiting for a step's end and for the front end is part of a D leg: up to a few steps.
            assert seconds == pytest.approx(known.seconds(tokens * size, streams, 1), rel=0.15, abs=0.04)
    formula = found.costs.transfers[Transport.NVLINK]
    assert formula.bytes_per_s > TRANSFER_FORMULAS[Transport.NVLINK].bytes_per_s
    assert formula.crowd > 0
    jobs = [each for each in found.cost_residuals if each.kind == "cost model, nvlink"]
    assert len(jobs) == 4 * 3 + 2
    assert sorted(abs(each.error) for each in jobs)[len(jobs) // 2] < 0.3


def test_a_linear_transport_is_found_by_the_formula() -> None:
    """Rows made by a formula give its constants back."""
    formula = TransferFormula(0.05, 0.01, 5e9, 0.3, 2.0)
    rows = []
    for tokens in (1_024, 16_384, 65_536):
        for background, concurrent in ((0, 1), (4, 1), (12, 1), (0, 4)):
            job = TransferJob(("p", "d"), Transport.TCP, tokens * 98_304, background, concurrent - 1)
            seconds = transfer_formula(job, TransferConstants({Transport.TCP: formula}, {}))
            rows.append(
                TransferRow(
                    tokens=tokens,
                    size_bytes=tokens * 98_304,
                    background=background,
                    background_kind="decode",
                    concurrent=concurrent,
                    repeat=0,
                    p_leg_s=1.0,
                    d_leg_s=seconds,
                    cached_leg_s=0.03,
                    together_s=seconds,
                    pulled=True,
                    same_text=True,
                )
            )
    found, residuals = fit_transfer_formula(rows, Transport.TCP)
    assert list(found) == pytest.approx(list(formula), rel=0.02)
    assert all(abs(each.error) < 0.01 for each in residuals)
    idle, _ = fit_transfer_formula([row for row in rows if row.background == 0 and row.concurrent == 1], Transport.TCP)
    published = TRANSFER_FORMULAS[Transport.TCP]
    assert (idle.stream_setup_s, idle.slowdown, idle.crowd) == published[1:2] + published[3:]
    assert idle.bytes_per_s == pytest.approx(5e9, rel=0.02)


def test_small_engines_get_smaller_sizes_and_tiny_ones_are_refused() -> None:
    plan = reduced(EngineLimits(max_model_len=4_096, pool_tokens=8_192, max_num_seqs=8, largest_tokens=2_048), 1)
    assert max(new for new, cached in plan.steps.prefills if not cached) == 2_048
    assert max(sum(pair) for pair in plan.steps.prefills) == 2_048 + 256 < 4_096
    assert max(streams for streams, _ in plan.steps.decodes) <= 8
    assert plan.interference.streams == (4,)
    assert plan.transfer.background == (0, 4)
    assert all(tokens % 128 == 0 for tokens in plan.transfer.tokens)
    with pytest.raises(InstrumentError, match="too few to calibrate"):
        reduced(EngineLimits(max_model_len=20, pool_tokens=64, max_num_seqs=1), 1)
