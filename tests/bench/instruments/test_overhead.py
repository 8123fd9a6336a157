"""Overhead of a connector, with engines in virtual time and with simulated ones that the command starts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from bench.instruments.cli import register
from bench.instruments.engine import InstrumentError, MeasuredEngine
from bench.instruments.overhead import (
    ConnectorArm,
    OverheadPlan,
    OverheadRow,
    measure_overhead,
    overhead_sheet,
    starts,
)
from bench.instruments.prompts import Prompts
from bench.instruments.record import read_record
from bench.instruments.steps import StepsPlan
from tests.bench.instruments.virtual import VirtualLab
from tests.launch.conftest import fleet_values

STEPS = StepsPlan(prefills=((1_024, 0),), decodes=((2, 256),), repeats=1)


def measure(plan: OverheadPlan, engines: int = 2) -> list[OverheadRow]:
    lab = VirtualLab("h200", engines=engines)

    @asynccontextmanager
    async def start(arm: ConnectorArm, number: int) -> AsyncIterator[list[MeasuredEngine]]:
        await asyncio.sleep(10.0 if arm is ConnectorArm.NONE else 12.0)
        yield list(lab.engines)

    async def collect() -> list[OverheadRow]:
        found = measure_overhead(plan, start, Prompts(), clock=lambda: lab.fleet.now_s)
        return [row async for row in found]

    return lab.run(collect())


def test_every_arm_is_first_once() -> None:
    order = starts(OverheadPlan(repeats=3))
    assert [arm.value for arm, _ in order] == [
        *("none", "idle", "used"),
        *("idle", "used", "none"),
        *("used", "none", "idle"),
    ]
    assert [repeat for _, repeat in order] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_times_are_those_of_the_engines() -> None:
    rows = measure(OverheadPlan(repeats=1, steps=STEPS, hand_offs=3))
    assert [round(row.start_s, 6) for row in rows] == [10.0, 12.0, 12.0]
    assert [len(row.hand_offs_s) for row in rows] == [0, 0, 3]
    assert all(row.pool_tokens == 738_432 for row in rows)
    assert len({row.prefills[0].median_s for row in rows}) == 1
    sheet = overhead_sheet(rows)
    assert sheet.columns[:6] == ("connector", "n", "start s", "KV pool", "TTFT 1,024+0 ms", "TPOT x2 ms")
    assert [line[0] for line in sheet.rows] == ["none", "idle", "used"]
    assert sheet.rows[0][-2:] == ("-", "-")


def test_hand_offs_need_two_engines() -> None:
    with pytest.raises(InstrumentError, match="two engines"):
        measure(OverheadPlan(arms=(ConnectorArm.USED,), repeats=1, steps=STEPS), engines=1)


def invoke(*arguments: object) -> tuple[int, str, str]:
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, ["measure", "overhead", *(str(each) for each in arguments)])
    return result.exit_code, result.stdout, " ".join(result.output.split())


@pytest.mark.fleet
def test_the_command_starts_and_stops_a_fleet_for_each_arm(tmp_path: Path) -> None:
    fleet = tmp_path / "pair.yaml"
    fleet.write_text(yaml.safe_dump(fleet_values(ready_timeout_s=90)))
    code, out, shown = invoke(
        *(fleet, "--starts", 1, "--prefill-tokens", 512, "--streams", 2, "--context-tokens", 128),
        *("--hand-off-tokens", 512, "--run-dir", tmp_path / "runs", "--json", "-o", tmp_path / "record.json"),
    )
    assert code == 0, shown
    rows = json.loads(out)["rows"]
    assert [row["arm"] for row in rows] == ["none", "idle", "used"]
    assert read_record(tmp_path / "record.json").rows == rows
    # The profile's connector takes a twentieth of the pool.
    assert rows[0]["pool_tokens"] > 1.04 * rows[1]["pool_tokens"] == 1.04 * rows[2]["pool_tokens"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["0-none", "1-idle", "2-used"]


def test_mistakes_end_with_a_remedy() -> None:
    assert "choose among none, idle, used" in invoke("sim-4x", "--arms", "some")[2]
    assert "no fleet file" in invoke("no-such-fleet")[2]
    assert "give at least one arm" in invoke("sim-4x", "--arms", ",")[2]
