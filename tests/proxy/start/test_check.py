"""``warmroute serve --check``: one row and one remedy per engine, and the exit status."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from proxy.settings import load_settings
from proxy.start.check import probed
from tests.proxy.sharing.store_server import StoreServer, needs_store
from tests.proxy.stub_engine import StubEngine
from warmroute import build

RUNNER = CliRunner(env={"COLUMNS": "160", "NO_COLOR": "1"})


def check(*flags: str) -> Result:
    return RUNNER.invoke(build(), ["serve", "--check", *flags])


@contextlib.contextmanager
def in_a_thread(*engines: StubEngine) -> Iterator[None]:
    """Engines with an event loop of their own: the command has another."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        for engine in engines:
            asyncio.run_coroutine_threadsafe(engine.start(), loop).result(20)
        yield
        for engine in engines:
            asyncio.run_coroutine_threadsafe(engine.stop(), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


def test_a_fleet_that_can_be_used_is_a_table_and_status_0(tmp_path: Path) -> None:
    engine = StubEngine(block_tokens=32)
    with in_a_thread(engine):
        rows = tmp_path / "rows" / "breakdown.jsonl"
        config = tmp_path / "proxy.yaml"
        config.write_text(f"instances: [{engine.url}]\nbreakdown: {{jsonl_path: {rows}}}\n")
        answer = check("--config", str(config))
    assert answer.exit_code == 0
    row = next(line for line in answer.output.splitlines() if f"127.0.0.1:{engine.port} " in line)
    assert [cell.strip() for cell in row.split("│")[3:-1]] == ["yes", "stub", "32", "off"]
    assert "every engine can be used" in answer.output
    assert not rows.parent.exists(), "a check writes nothing"


def test_names_and_urls_are_whole_on_a_narrow_terminal() -> None:
    """In a narrow terminal they take several lines of a cell."""
    model = "organisation/a-model-with-a-long-name-in-32-bits"
    name = "prefill-engine-of-the-second-rack-0"
    engine = StubEngine(model=model)
    with in_a_thread(engine):
        instance = f'[{{"name": "{name}", "url": "{engine.url}"}}]'
        answer = RUNNER.invoke(build(), ["serve", "--check"], env={"COLUMNS": "80", "WARMROUTE_INSTANCES": instance})
    assert (answer.exit_code, "…" in answer.output) == (0, False), answer.output
    rows = [line.split("│")[1:-1] for line in answer.output.splitlines() if line.startswith("│")]
    cells = ["".join(cell.strip() for cell in column) for column in zip(*rows, strict=True)]
    assert cells == [name, engine.url, "yes", model, "16", "off"]


def test_an_engine_that_cannot_be_used_has_its_remedy_and_status_1() -> None:
    engine = StubEngine()
    with in_a_thread(engine):
        answer = check("--instance", engine.url, "--instance", f"{engine.url}/v1")
    assert answer.exit_code == 1
    assert f"write {engine.url}, without /v1" in answer.output
    assert "not every engine can be used" in answer.output


def test_a_planner_that_can_offload_nothing_is_reported() -> None:
    engine = StubEngine()
    with in_a_thread(engine):
        for planner in ("never", "cost_model"):
            answer = check("--instance", engine.url, "--planner", planner)
            assert answer.exit_code == 0
            assert ("cost_model can offload nothing" in answer.output) is (planner == "cost_model")


def test_invalid_settings_are_status_2() -> None:
    answer = check("--instance", "127.0.0.1:8000")
    assert answer.exit_code == 2
    assert "is not an http:// or https:// URL" in answer.output


def test_an_access_log_that_cannot_be_written_is_status_2(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "access.jsonl"):
        answer = check("--instance", "http://127.0.0.1:1", "--access-log", str(path))
        assert answer.exit_code == 2
        assert "logs.access" in answer.output
    assert not list(tmp_path.iterdir()), "a check writes nothing"


@pytest.mark.parametrize("key", ["breakdown: {jsonl_path", "logs: {access"])
def test_a_file_of_records_below_a_file_is_status_2_checked_and_started(tmp_path: Path, key: str) -> None:
    """Before, `serve` ended in a traceback of a breakdown file that cannot be written, and `--check` found nothing."""
    config = tmp_path / "proxy.yaml"
    config.write_text(f"port: 0\ninstances: [http://127.0.0.1:1]\n{key}: {config}/rows.jsonl}}\n")
    for flags in ([], ["--check"]):
        answer = RUNNER.invoke(build(), ["serve", "--config", str(config), *flags])
        assert answer.exit_code == 2
        assert f"{config}/rows.jsonl cannot be written" in answer.output
    assert [each.name for each in tmp_path.iterdir()] == ["proxy.yaml"]


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
async def test_events_that_cannot_be_reached_and_sizes_that_differ_are_remedies(tmp_path: Path, scheme: str) -> None:
    first, second = StubEngine(), StubEngine(block_tokens=64)
    await first.start()
    await second.start()
    closed = "tcp://127.0.0.1:1" if scheme == "tcp" else f"ipc://{tmp_path}/events"
    given: list[dict[str, Any]] = [
        {"url": first.url, "name": "a", "events_url": closed},
        {"url": second.url, "name": "b", "events_url": f"tcp://127.0.0.1:{second.port}"},
    ]
    try:
        one, two = await probed(load_settings(None, instances=given))
    finally:
        await first.stop()
        await second.stop()
    assert (one.events, two.events) == ("unreachable", "reachable")
    assert [remedy.partition(" ")[0] for remedy in one.remedies] == ["events_url", "block"]
    assert [remedy.partition(":")[0] for remedy in two.remedies] == ["block sizes differ within the fleet (16, 64)"]


def test_engines_that_discovery_finds_are_checked_too(tmp_path: Path) -> None:
    engine = StubEngine()
    fleet = tmp_path / "fleet.yaml"
    with in_a_thread(engine):
        fleet.write_text(f"- {{url: '{engine.url}', name: found}}\n")
        answer = check("--discovery", f"file:{fleet}")
    assert answer.exit_code == 0
    assert "found" in answer.output
    fleet.write_text("[]\n")
    answer = check("--discovery", f"file:{fleet}")
    assert (answer.exit_code, "has no instance" in answer.output) == (1, True)
    fleet.write_text("- [\n")
    answer = check("--discovery", f"file:{fleet}")
    shown = answer.output.replace("\n", "")
    assert (answer.exit_code, shown.count(str(fleet)), f"file {fleet}: not YAML" in shown) == (1, 1, True)
    fleet.unlink()
    answer = check("--discovery", f"file:{fleet}")
    assert (answer.exit_code, "cannot be read" in answer.output) == (1, True)


@needs_store
def test_the_store_of_shared_state_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, store = StubEngine(), StoreServer(tmp_path)
    monkeypatch.setenv("WARMROUTE_SHARING__URL", store.url)
    with in_a_thread(engine):
        store.start()
        try:
            usable = check("--instance", engine.url)
        finally:
            store.kill()
        lost = check("--instance", engine.url)
    assert usable.exit_code == 0, usable.output
    assert "can be used; replicas that run now: none" in usable.output
    assert lost.exit_code == 1
    assert "cannot be used (sharing.url)" in lost.output
