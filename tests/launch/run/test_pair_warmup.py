"""Warm-up of the pairs of a fleet: simulated engines that really hand over, and engines that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch.fleet.file import FleetFile
from launch.fleet.sections import PairWarmupSettings
from launch.freshness.proof import StaleEngineError, prove_fresh
from launch.run.pair_warmup import PairEnd, ordered_pairs, warm_pairs
from launch.run.processes import StartError
from launch.run.state import read_state
from launch.run.supervisor import Fleet
from policies.types import Role

MakeFleet = Callable[..., FleetFile]
TOKENS = 64


def end(name: str, role: Role = Role.KV_BOTH) -> PairEnd:
    bootstrap = None if role is Role.KV_CONSUMER else f"http://{name}-bootstrap"
    return PairEnd(name, f"http://{name}", role, bootstrap)


def names(pairs: list[tuple[PairEnd, PairEnd]]) -> list[tuple[str, str]]:
    return [(p.name, d.name) for p, d in pairs]


def test_every_ordered_pair_is_there_once_and_neighbours_differ() -> None:
    found = names(ordered_pairs([end(name) for name in "abc"]))
    assert found == [("a", "b"), ("b", "c"), ("c", "a"), ("a", "c"), ("b", "a"), ("c", "b")]
    roles = [end("p", Role.KV_PRODUCER), end("d", Role.KV_CONSUMER), end("both"), end("none", Role.NONE)]
    assert sorted(names(ordered_pairs(roles))) == [("both", "d"), ("p", "both"), ("p", "d")]
    assert ordered_pairs([end("alone")]) == ordered_pairs([]) == []


async def pulled_tokens(fleet: FleetFile) -> list[float]:
    """Tokens that each engine pulled so far."""
    found = []
    async with httpx.AsyncClient() as client:
        for number in range(fleet.instances):
            text = (await client.get(f"{fleet.url(number)}/metrics")).text
            samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
            found.append(sum(each.value for each in samples if each.name == "vllm:external_prefix_cache_hits_total"))
    return found


def warm(mode: str, **more: Any) -> dict[str, Any]:
    return {"mode": mode, "tokens": TOKENS, **more}


@pytest.mark.fleet
async def test_each_engine_has_pulled_from_every_other_when_the_fleet_is_ready(
    small_fleet: MakeFleet, tmp_path: Path
) -> None:
    fleet = small_fleet(count=3, pair_warmup=warm("require", concurrency=2))
    async with Fleet(fleet, tmp_path) as running:
        assert running.state.status == "ready"
        assert await pulled_tokens(fleet) == [2 * TOKENS] * 3


@pytest.mark.fleet
async def test_a_fleet_proves_fresh_before_its_pairs_are_warmed(small_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = small_fleet(count=2, pair_warmup=warm("require"))
    async with Fleet(fleet, tmp_path, with_proxy=False, defer_warmup=True) as running:
        assert read_state(tmp_path).status == "starting"
        await prove_fresh(running.state.processes, since_unix_s=0.0)
        await running.finish_start()
        assert read_state(tmp_path).status == "ready"
        assert await pulled_tokens(fleet) == [TOKENS] * 2
        with pytest.raises(StaleEngineError):
            await prove_fresh(running.state.processes, since_unix_s=0.0)
        # One that was restarted is warmed with the others only.
        await running.warm_pairs("inst-1")
        assert await pulled_tokens(fleet) == [2 * TOKENS] * 2


@pytest.mark.fleet
async def test_off_sends_nothing(small_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = small_fleet(count=2)
    async with Fleet(fleet, tmp_path, with_proxy=False):
        assert await pulled_tokens(fleet) == [0, 0]


@pytest.mark.fleet
async def test_a_fleet_without_pairs_says_so(small_fleet: MakeFleet, tmp_path: Path) -> None:
    notes: list[str] = []
    fleet = small_fleet(count=2, role="none", pair_warmup=warm("require"))
    async with Fleet(fleet, tmp_path, with_proxy=False, notify=notes.append):
        assert [note.partition(" (")[0] for note in notes] == ["warning: pair_warmup: no two engines exchange KV"]


@pytest.mark.fleet
async def test_failed_pairs_are_warnings_or_an_error(small_fleet: MakeFleet, tmp_path: Path) -> None:
    notes: list[str] = []
    late = {"timeout_s": 1e-6}
    fleet = small_fleet(count=2, pair_warmup=warm("warn", **late))
    async with Fleet(fleet, tmp_path / "warn", with_proxy=False, notify=notes.append) as running:
        assert running.state.status == "ready"
    assert [note for note in notes if "pair_warmup" in note] == [
        "warning: pair_warmup: inst-0 to inst-1: not within 1e-06 s",
        "warning: pair_warmup: inst-1 to inst-0: not within 1e-06 s",
    ]
    with pytest.raises(StartError, match="pair_warmup: 2 of 2 pairs did not hand over KV: inst-0 to inst-1"):
        async with Fleet(
            small_fleet(count=2, pair_warmup=warm("require", **late)), tmp_path / "require", with_proxy=False
        ):
            pass
    assert read_state(tmp_path / "require").status == "failed"


class Answers(httpx.AsyncBaseTransport):
    """Engines without sockets; ``cached`` is what D reports, a host named ``never`` does not answer."""

    def __init__(self, cached: int | None = None) -> None:
        self.cached = cached
        self.at_once = self.most_at_once = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if request.url.host == "never":
                await asyncio.Event().wait()
            await asyncio.sleep(0)
        finally:
            self.at_once -= 1
        if request.url.path == "/query":
            return httpx.Response(200, json={"0": {"engine_id": "e"}})
        if request.url.host == "refuses":
            return httpx.Response(400, text="no such parameter")
        return httpx.Response(200, json={"usage": {"prompt_tokens_details": {"cached_tokens": self.cached}}})


async def warmed(ends: list[PairEnd], answers: Answers, **settings: Any) -> list[str]:
    async with httpx.AsyncClient(transport=answers) as client:
        return await warm_pairs(ordered_pairs(ends), "m", PairWarmupSettings(**settings), client)


async def test_hand_offs_are_bounded_in_number_and_time() -> None:
    answers = Answers()
    assert await warmed([end(f"e{number}") for number in range(6)], answers, concurrency=3) == []
    assert answers.most_at_once == 3
    found = await warmed([end("a"), end("never")], answers, timeout_s=0.2)
    assert found == ["a to never: not within 0.2 s", "never to a: not within 0.2 s"]
    assert answers.at_once == 0


async def test_each_failure_says_which_pair_and_why() -> None:
    found = await warmed([end("a"), end("refuses")], Answers())
    assert found[0] == "a to refuses: refuses answered 400: no such parameter"
    assert found[1] == "refuses to a: refuses answered 400: no such parameter"
    assert await warmed([end("a"), end("b")], Answers(cached=0)) == [
        "a to b: b computed the prompt instead of pulling it",
        "b to a: a computed the prompt instead of pulling it",
    ]
