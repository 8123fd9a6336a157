"""Transfers between simulated engines whose transfer times are known."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from bench.instruments.calibration import transport_points
from bench.instruments.engine import Generated, InstrumentError, refuse_busy
from bench.instruments.prompts import Prompts
from bench.instruments.transfer import TransferPlan, TransferRow, measure_transfers
from bench.instruments.transfer_tables import by_load, parts_sheet, transfer_sheet
from tests.bench.instruments.virtual import VirtualEngine, VirtualLab

BYTES = 98_304
STALLED = 40.0


def measure(plan: TransferPlan, transport: str = "tcp", role: str = "kv_both") -> list[TransferRow]:
    lab = VirtualLab("h200", engines=2, transport=transport, role=role)
    source, target = lab.engines
    rows = lab.run(measure_transfers(source, target, plan, Prompts(nonce="n"), BYTES))
    lab.run(refuse_busy(lab.engines))
    return rows


def test_the_transfer_is_that_of_the_profile_at_every_size() -> None:
    lab = VirtualLab("h200", engines=2)
    table = lab.profile.transport("tcp")
    rows = measure(TransferPlan(tokens=(2_048, 8_192, 65_536), repeats=1))
    assert [row.tokens for row in rows] == [2_048, 8_192, 65_536]
    for row in rows:
        assert row.size_bytes == row.tokens * BYTES
        assert row.transfer_s == pytest.approx(table.seconds(row.size_bytes, 0, 1), rel=0.05)
        assert row.bytes_per_s == pytest.approx(row.size_bytes / row.transfer_s, rel=0.01)
        assert row.pulled
        assert row.same_text
        assert row.pulled_tokens in {row.tokens, row.tokens + 1}
    assert all(low.d_leg_s < high.d_leg_s and low.p_leg_s < high.p_leg_s for low, high in pairwise(rows))


def test_background_streams_slow_the_transfer_down() -> None:
    rows = measure(TransferPlan(tokens=(16_384,), background=(0, 4), repeats=2))
    groups = {key.background: median(row.transfer_s for row in found) for key, found in by_load(rows).items()}
    assert groups[4] > 3 * groups[0]
    cells = transfer_sheet(rows).rows
    assert [line[0] for line in cells] == ["0", "4"]
    assert cells[0][10] == "1.0x"
    assert float(cells[1][10].rstrip("x")) > 3
    assert [line[2] for line in parts_sheet(rows).rows] == ["16,384", "16,384"]


def test_background_prefills_are_a_load_too() -> None:
    plan = TransferPlan(
        tokens=(4_096,), background=(0, 2), background_kind="prefill", background_tokens=4_096, repeats=2
    )
    rows = measure(plan)
    legs = {key.background: median(row.p_leg_s for row in found) for key, found in by_load(rows).items()}
    assert legs[2] > 1.2 * legs[0]
    assert {row.background_kind for row in rows} == {"prefill"}


def test_transfers_at_once_share_the_link() -> None:
    rows = measure(TransferPlan(tokens=(16_384,), concurrent=(1, 4), repeats=1), transport="nvlink")
    alone, together = [row for row in rows if row.concurrent == 1], [row for row in rows if row.concurrent == 4]
    assert (len(alone), len(together)) == (1, 4)
    assert len({row.together_s for row in together}) == 1
    assert max(row.transfer_s for row in together) > 2 * alone[0].transfer_s
    assert all(row.pulled_tokens == pytest.approx(16_384, abs=1) for row in together)


def test_a_stall_is_counted_and_kept_out_of_the_median() -> None:
    rows = measure(TransferPlan(tokens=(2_048,), repeats=3))
    rows[1].d_leg_s = STALLED
    (line,) = transfer_sheet(rows).rows
    assert line[11] == "1"
    assert float(line[8].replace(",", "")) < 1_000


def test_where_most_transfers_take_over_ten_seconds_that_is_their_time() -> None:
    rows = measure(TransferPlan(tokens=(2_048,), repeats=3))
    rows[0].d_leg_s = rows[1].d_leg_s = STALLED
    (line,) = transfer_sheet(rows).rows
    assert line[11] == "2"
    assert float(line[6].replace(",", "")) == pytest.approx(1e3 * STALLED)
    assert [leg.seconds for leg in transport_points(rows).legs] == [STALLED]


def fail_pulls(engine: VirtualEngine, monkeypatch: pytest.MonkeyPatch, failing: set[int], hang: bool = False) -> None:
    """Make the D legs of these numbers fail, or wait until they are cancelled; the first is the warm-up's."""
    generate, count = engine.generate, itertools.count()

    async def faulty(prompt: Sequence[int], max_tokens: int, **more: Any) -> Generated:
        if more.get("transfer") is not None and next(count) in failing:
            if hang:
                await asyncio.Event().wait()
            raise InstrumentError("the engine answered 500")
        return await generate(prompt, max_tokens, **more)

    monkeypatch.setattr(engine, "generate", faulty)


@pytest.mark.parametrize("hang", [False, True])
def test_one_failed_pull_is_recorded_and_the_rest_measured(monkeypatch: pytest.MonkeyPatch, hang: bool) -> None:
    lab = VirtualLab("h200", engines=2)
    source, target = lab.engines
    fail_pulls(target, monkeypatch, {2}, hang)
    failures: list[str] = []
    plan = TransferPlan(tokens=(2_048,), repeats=3, give_up_s=0.5 if hang else 60)
    rows = lab.run(measure_transfers(source, target, plan, Prompts(nonce="n"), BYTES, failures=failures))
    assert [row.repeat for row in rows] == [0, 2]
    (failure,) = failures
    assert failure.startswith("2,048 tokens, 1 at a time, 0 background streams a side, repeat 2: ")
    assert ("no first token" if hang else "answered 500") in failure
    assert failure in transfer_sheet(rows, failures).notes


def test_pulls_that_all_fail_end_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = VirtualLab("h200", engines=2)
    source, target = lab.engines
    fail_pulls(target, monkeypatch, set(range(1, 100)))
    failures: list[str] = []
    with pytest.raises(InstrumentError, match="answered 500"):
        lab.run(
            measure_transfers(
                source, target, TransferPlan(tokens=(2_048,)), Prompts(nonce="n"), BYTES, failures=failures
            )
        )
    assert len(failures) == 2


def test_an_engine_without_a_connector_is_an_error() -> None:
    with pytest.raises(InstrumentError):
        measure(TransferPlan(tokens=(2_048,), repeats=1), role="none")
