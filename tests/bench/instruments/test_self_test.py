"""The self-test of `doctor --deep` on simulated engines: in virtual time, and over HTTP through the command."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bench.instruments.engine import BusyFleetError, Generated, InstrumentError
from bench.instruments.prompts import Prompts
from bench.instruments.self_test import TOKENS, hand_offs, pairs, self_test
from launch.doctor.facts import HandOffTest
from launch.doctor.probes.deep import HandOffError
from launch.fleet.file import load_fleet, parse_fleet
from launch.run.supervisor import Fleet
from policies.types import Role
from tests.bench.instruments.virtual import VirtualLab
from tests.launch.conftest import fleet_values
from warmroute import build

BOTH, GIVES, TAKES, NONE = Role.KV_BOTH, Role.KV_PRODUCER, Role.KV_CONSUMER, Role.NONE
BYTES = 98_304


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ([BOTH, BOTH], [(0, 1), (1, 0)]),
        ([BOTH] * 3, [(0, 1), (1, 2), (2, 0)]),
        ([GIVES, GIVES, TAKES], [(0, 2), (1, 2)]),
        ([GIVES, TAKES, TAKES], [(0, 2), (0, 1)]),
        ([GIVES, BOTH], [(0, 1)]),
        ([BOTH], []),
        ([NONE, NONE], []),
    ],
)
def test_every_engine_sends_and_receives_what_its_role_allows(
    roles: Sequence[Role], expected: list[tuple[int, int]]
) -> None:
    found = pairs(roles)
    assert set(expected) <= {tuple(pair) for pair in found}
    senders = {place for place, role in enumerate(roles) if role in {BOTH, GIVES}}
    receivers = {place for place, role in enumerate(roles) if role in {BOTH, TAKES}}
    assert all(pair.source in senders and pair.target in receivers and pair.source != pair.target for pair in found)
    for places, used in ((senders, {one.source for one in found}), (receivers, {one.target for one in found})):
        assert not expected or places == used or len(receivers) == 1  # the only receiver has nobody to send to


def made(lab: VirtualLab) -> HandOffTest:
    source, target = lab.engines
    return lab.run(self_test(source, target, Prompts(nonce="n"), BYTES))


def test_a_hand_off_that_arrives() -> None:
    found = made(VirtualLab("h200", engines=2, transport="tcp"))
    assert (found.source, found.target, found.error, found.same_text) == ("a", "b", None, True)
    assert found.pulled_tokens is not None
    assert abs(found.pulled_tokens - TOKENS) <= 64
    assert found.size_bytes == found.pulled_tokens * BYTES


def test_a_hand_off_that_fails_is_a_result() -> None:
    lab = VirtualLab("h200", engines=2)

    async def refused(*_: object, **__: object) -> Generated:
        raise InstrumentError("b: answered 500")

    lab.engines[1].generate = refused  # type: ignore[method-assign]
    found = made(lab)
    assert (found.error, found.same_text, found.pulled_tokens) == ("b: answered 500", False, None)


def test_another_answer_than_p_gives_is_reported() -> None:
    lab = VirtualLab("h200", engines=2)
    right = lab.engines[1].generate

    async def garbled(*given: object, **values: object) -> Generated:
        answer = await right(*given, **values)  # type: ignore[arg-type]
        answer.text = "garbage"
        return answer

    lab.engines[1].generate = garbled  # type: ignore[method-assign]
    found = made(lab)
    assert (found.error, found.same_text) == (None, False)


@pytest.mark.parametrize(
    ("values", "reason", "remedy"),
    [
        ({"count": 1, "role": "kv_both"}, "no two engines", "give one a role that sends"),
        ({"sim": {"time_scale": 2.0}, "role": "kv_both"}, "run the engines with sim.time_scale: 1", ""),
        ({"sim": {"time_scale": 1.0}, "role": "kv_both"}, "is the fleet up?", "start the fleet with `warmroute up`"),
    ],
)
def test_a_fleet_without_hand_offs_has_a_remedy(values: dict[str, Any], reason: str, remedy: str) -> None:
    with pytest.raises(HandOffError, match=re.escape(reason)) as refused:
        hand_offs(parse_fleet({**fleet_values(), **values}), "fleet.yaml")
    assert refused.value.remedy.startswith(remedy)
    assert bool(refused.value.remedy) == bool(remedy)


async def test_a_busy_fleet_is_to_be_tested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_: object) -> None:
        raise BusyFleetError("the fleet is busy")

    monkeypatch.setattr("bench.instruments.self_test.refuse_busy", refuse)
    fleet = parse_fleet({**fleet_values(), "role": "kv_both", "sim": {"time_scale": 1.0}})
    with pytest.raises(HandOffError, match="the fleet is busy") as refused:
        await asyncio.to_thread(hand_offs, fleet, "fleet.yaml")
    assert refused.value.remedy == "run this again while the fleet is idle"


@pytest.mark.fleet
async def test_the_command_tests_a_running_fleet(tmp_path: Path) -> None:
    values = {**fleet_values(2), "role": "kv_both", "sim": {"profile": "h200", "time_scale": 1.0}}
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(values))

    def findings() -> dict[str, list[str]]:
        arguments = ["doctor", "--fleet", str(path), "--engine-python", sys.executable, "--deep", "--json"]
        found: dict[str, list[str]] = {}
        for one in json.loads(CliRunner().invoke(build(), arguments).output)["findings"]:
            found.setdefault(one["check"], []).append(f"{one['status']}: {one['found']}")
        return found

    async with Fleet(load_fleet(path), tmp_path / "run", with_proxy=False):
        running = await asyncio.to_thread(findings)
    one, other = running["hand-off"]
    assert one.startswith("ok: inst-0 to inst-1: 513 tokens, ")
    assert one.endswith(" bytes pulled, same answer")
    assert other.startswith("ok: inst-1 to inst-0: 513 tokens, ")
    [stopped] = (await asyncio.to_thread(findings))["hand-off"]
    assert stopped.startswith("note: no hand-off was made: ")
    assert "is the fleet up?" in stopped
