"""The fleet follows a source of discovery: a file that tests replace."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from proxy.discovery.source import DiscoveryError, Wanted, next_pause
from proxy.discovery.status import Reading
from proxy.operations import discovery as operations
from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.fleet_client import Start, admins, ask, asked_of, engine, row_of, was_completed
from tests.proxy.stub_engine import StubEngine


class Fleet:
    """A file with the fleet."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fleet.json"

    def write(self, text: str) -> None:
        other = self.path.with_suffix(".new")
        other.write_text(text)
        os.replace(other, self.path)

    def has(self, **engines: StubEngine | str) -> None:
        """Name -> engine or URL."""
        urls = {name: each if isinstance(each, str) else each.url for name, each in engines.items()}
        self.write(json.dumps([{"name": name, "url": url} for name, url in urls.items()]))

    def settings(self, **other: Any) -> dict[str, Any]:
        return {"source": "file", "file": {"path": str(self.path)}, "interval_s": 0.05, "start_s": 5, **other}


@pytest.fixture
def start(start_proxy: StartProxy) -> Start:
    return admins(start_proxy)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def instances_of(running: Running) -> set[str]:
    return {each.name for each in running.core.instances}


async def condition(running: Running) -> dict[str, Any]:
    answer = await running.client.get("/ready", params={"verbose": "true"})
    (found,) = (each for each in answer.json()["conditions"] if each["name"] == "discovery")
    return found


async def test_the_first_set_is_there_before_the_first_request(start: Start, fleet: Fleet) -> None:
    a, b = await engine(), await engine()
    fleet.has(a=a, b=b)
    running = await start(1, discovery=fleet.settings())
    assert await asked_of(running, 6) == {"inst-0": 2, "a": 2, "b": 2}
    assert (await row_of(running, "a"))["source"] == "discovery"
    assert (await condition(running))["ok"]
    for each in (a, b):
        await each.stop()


async def test_instances_come_and_go_while_streams_run_to_their_end(start: Start, fleet: Fleet) -> None:
    released = asyncio.Event()
    a, b = await engine(tokens=20, streams_end=released), await engine()
    fleet.has(a=a)
    running = await start(1, discovery=fleet.settings(grace_s=20))
    streams = [asyncio.create_task(ask(running, stream=True)) for _ in range(4)]
    await running.until(lambda: len(a.seen) + len(running.engines[0].seen) == 4)
    fleet.has(b=b)
    await running.until(lambda: running.core.instances["a"].draining and "b" in instances_of(running))
    released.set()
    answers = await asyncio.gather(*streams)
    counted = Counter(answer.headers["x-warmroute-instance"] for answer in answers)
    assert counted == {"inst-0": 2, "a": 2}
    assert all(was_completed(each.text, 20 if each.headers["x-warmroute-instance"] == "a" else 4) for each in answers)
    assert a.aborted == 0
    await running.until(lambda: instances_of(running) == {"inst-0", "b"})
    await running.until(lambda: running.core.instances["b"].healthy)
    assert await asked_of(running, 4) == {"inst-0": 2, "b": 2}
    assert ledger_is_zero(await running.settled())
    for each in (a, b):
        await each.stop()


async def test_a_bad_or_missing_file_keeps_the_last_good_set_and_is_reported(start: Start, fleet: Fleet) -> None:
    a = await engine()
    fleet.has(a=a)
    running = await start(1, discovery=fleet.settings(backoff_max_s=0.1))
    status = running.core.discovery
    fleet.write("[{")
    await running.until(lambda: status.failures_in_a_row >= 2)
    found = await condition(running)
    assert not found["ok"]
    assert "failed; 1 instances of the source file are kept" in found["detail"]
    stats = (await running.client.get("/stats")).json()["discovery"]
    assert "neither JSON nor YAML" in stats["last_error"]
    metrics = (await running.client.get("/metrics")).text
    assert 'warmroute_condition{condition="discovery"} 0.0' in metrics
    assert "warmroute_discovery_instances 1.0" in metrics
    fleet.path.unlink()
    await running.until(lambda: "cannot be read" in (status.last_error or ""))
    assert await asked_of(running, 2) == {"inst-0": 1, "a": 1}
    fleet.has(a=a)
    await running.until(lambda: not status.failures_in_a_row)
    assert (await condition(running))["ok"]
    await a.stop()


@pytest.mark.parametrize("accept_empty", [False, True])
async def test_an_empty_set_is_applied_only_where_the_settings_accept_it(
    start: Start, fleet: Fleet, accept_empty: bool
) -> None:
    a = await engine()
    fleet.has(a=a)
    running = await start(1, discovery=fleet.settings(accept_empty=accept_empty))
    fleet.write("[]")
    if accept_empty:
        await running.until(lambda: instances_of(running) == {"inst-0"})
        assert (await condition(running))["ok"]
    else:
        await running.until(lambda: running.core.discovery.readings[Reading.EMPTY] >= 2)
        assert instances_of(running) == {"inst-0", "a"}
        assert "the source has no instance; 1 instances" in (await condition(running))["detail"]
    await a.stop()


async def test_a_set_that_is_empty_as_every_entry_was_left_out_keeps_its_reasons(
    start: Start, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Pods:
        origin = "pods"

        async def sets(self) -> AsyncGenerator[Wanted, None]:
            yield Wanted((), ("pod a: no port",))
            await asyncio.Event().wait()

    monkeypatch.setattr(operations, "source_of", lambda _: Pods())
    running = await start(1, discovery=fleet.settings())
    running.operations.discovery._apply()  # as every interval_s
    found = await condition(running)
    assert found["detail"].endswith("are kept, 1 left out")
    assert found["remedy"] == "GET /stats has the reasons, under discovery"
    assert (await running.client.get("/stats")).json()["discovery"]["problems"] == ["pod a: no port"]
    assert "pods: not in the fleet: pod a: no port" in caplog.text


async def test_names_and_urls_of_settings_and_api_are_left_alone(start: Start, fleet: Fleet) -> None:
    a, b = await engine(), await engine()
    fleet.write("[]")
    running = await start(1, discovery=fleet.settings())
    assert (await running.client.post("/instances", json={"url": b.url, "name": "by-hand"})).status_code == 201
    wanted: dict[str, StubEngine | str] = {"a": a, "inst-0": "http://127.0.0.1:9", "other": b}
    fleet.has(**wanted)
    await running.until(lambda: len(running.core.discovery.problems) == 2)
    assert instances_of(running) == {"inst-0", "by-hand", "a"}
    assert (await row_of(running, "inst-0"))["url"] == running.engines[0].url
    assert "2 left out" in (await condition(running))["detail"]
    assert (await running.client.delete("/instances/by-hand")).status_code == 200
    await running.until(lambda: "other" in instances_of(running))
    assert (await row_of(running, "other"))["source"] == "discovery"
    for each in (a, b):
        await each.stop()


async def test_an_engine_with_another_address_takes_its_name_over(start: Start, fleet: Fleet) -> None:
    a, b = await engine(), await engine()
    fleet.has(x=a, y=b)
    running = await start(1, discovery=fleet.settings())
    fleet.has(x=b, y=a)
    await running.until(lambda: running.core.instances["x"].url == b.url and running.core.instances["y"].url == a.url)
    await running.until(lambda: not running.operations.fleet.departures)
    await running.until(lambda: len(running.core.instances.healthy()) == 3)
    assert await asked_of(running, 6) == {"inst-0": 2, "x": 2, "y": 2}
    for each in (a, b):
        await each.stop()


async def test_an_instance_removed_over_http_returns_and_a_drained_one_stays_drained(
    start: Start, fleet: Fleet
) -> None:
    a = await engine()
    fleet.has(a=a)
    running = await start(1, discovery=fleet.settings())
    assert (await running.client.post("/instances/a/drain")).status_code == 200
    seen = running.core.discovery.readings[Reading.UNCHANGED]
    await running.until(lambda: running.core.discovery.readings[Reading.UNCHANGED] >= seen + 2)
    assert (await row_of(running, "a"))["draining"]
    assert (await running.client.delete("/instances/a")).status_code == 200
    await running.until(lambda: "a" in instances_of(running) and running.core.instances["a"].healthy)
    assert not (await row_of(running, "a"))["draining"]
    await a.stop()


async def test_a_source_that_fails_after_every_set_is_asked_less_and_less(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where pods may be listed, but not watched."""
    pauses: list[float] = []

    class Failing:
        origin = "failing"

        async def sets(self) -> AsyncGenerator[Wanted, None]:
            yield Wanted()
            raise DiscoveryError("the watch is refused")

    def recorded(*given: float, steady: bool) -> float:
        pauses.append(next_pause(*given, steady=steady))
        return pauses[-1]

    monkeypatch.setattr(operations, "source_of", lambda _: Failing())
    monkeypatch.setattr(operations, "next_pause", recorded)
    monkeypatch.setattr(operations, "_FIRST_PAUSE_S", 100.0)
    monkeypatch.setattr("random.uniform", lambda *_: 1e-4)
    running = await start(1, discovery={"source": "file", "file": {"path": "unused"}, "backoff_max_s": 500.0})
    await running.until(lambda: len(pauses) >= 5)
    assert pauses[:5] == [100.0, 200.0, 400.0, 500.0, 500.0]
    assert running.core.discovery.failures_in_a_row == 1


@pytest.mark.parametrize(
    ("pause_s", "steady", "expected"), [(0.0, False, 0.5), (0.5, False, 1.0), (20.0, False, 30.0), (20.0, True, 0.5)]
)
def test_pauses_double_until_an_attempt_is_steady(pause_s: float, steady: bool, expected: float) -> None:
    assert next_pause(pause_s, 0.5, 30.0, steady=steady) == expected


async def test_a_source_without_a_result_does_not_keep_the_proxy_from_serving(start: Start, fleet: Fleet) -> None:
    running = await start(1, discovery=fleet.settings(start_s=0.05))
    assert await asked_of(running, 2) == {"inst-0": 2}
    assert not (await condition(running))["ok"]
