"""Snapshots of a proxy that another proxy restores: only those of engines that still run, and never an error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from policies.costs.book import CostBook, PrefillJob
from policies.costs.learned import LearnedCosts
from policies.predict.blocks import hash_token_blocks
from policies.predict.prefix_tree import PrefixRun
from policies.types import CONTEXT_SEPARATOR
from proxy.request.parse import Endpoint
from proxy.restart.snapshot_file import Runs, framed, read_snapshot, write_snapshot
from proxy.restart.snapshots import Snapshots
from proxy.settings import load_settings
from tests.policies.costs.test_short_step import answers
from tests.proxy.conftest import Running, serving
from tests.proxy.stub_engine import StubEngine

PROMPTS = [list(range(start, start + 320)) for start in (0, 1_000, 2_000, 3_000)]
MOST = 2**28


@pytest.fixture
async def engines() -> AsyncIterator[list[StubEngine]]:
    engines = [await StubEngine().start() for _ in range(2)]
    yield engines
    for engine in engines:
        await engine.stop()


@contextlib.asynccontextmanager
async def proxy_over(engines: list[StubEngine], path: Path, **overrides: Any) -> AsyncIterator[Running]:
    """One life of a proxy with a snapshot at ``path``."""
    instances = [{"name": f"inst-{number}", "url": engine.url} for number, engine in enumerate(engines)]
    snapshot = {"path": str(path), "interval_s": 600, **overrides.pop("snapshot", {})}
    given = {"port": 0, "instances": instances, "log_level": "info", "health": {"interval_s": 0.1, "healthy_after": 1}}
    settings = load_settings(None, **{**given, "snapshot": snapshot, **overrides})
    async with (
        serving(settings) as (app, url),
        httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client,
    ):
        yield Running(app, url, engines, client)


async def send(running: Running, number: int) -> dict[str, Any]:
    """One turn of session ``number``; returns its row."""
    headers = {"x-session-id": f"session-{number}"}
    body = {"model": "stub", "prompt": PROMPTS[number], "max_tokens": 1}
    answer = await running.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return (await running.rows(limit=1))[0]


async def warmed(engines: list[StubEngine], path: Path) -> dict[int, str]:
    """Serve the first turn of every session, then shut down; returns the sessions' instances."""
    async with proxy_over(engines, path, policy={"name": "round_robin"}) as running:
        return {number: (await send(running, number))["instance"] for number in range(len(PROMPTS))}


async def test_the_next_proxy_continues_where_the_last_one_ended(engines: list[StubEngine], tmp_path: Path) -> None:
    where = await warmed(engines, tmp_path / "snapshot")
    assert set(where.values()) == {"inst-0", "inst-1"}
    async with proxy_over(engines, tmp_path / "snapshot") as running:
        assert len(running.core.router.state.sessions) == len(PROMPTS)
        for number, instance in where.items():
            row = await send(running, number)
            assert (row["instance"], row["predicted_cached_tokens"]) == (instance, 304)


async def test_every_session_in_it_has_its_blocks_although_requests_come_while_it_is_copied(
    engines: list[StubEngine], tmp_path: Path
) -> None:
    path = tmp_path / "snapshot"
    async with proxy_over(engines, tmp_path / "other", policy={"name": "round_robin"}) as running:
        await send(running, 0)
        await send(running, 1)
        later = iter((2, 3))
        copying = Snapshots(running.core)._copied()
        records = None
        while records is None:
            try:
                copying.send(None)
            except StopIteration as ended:
                records = ended.value
            else:
                number = next(later, None)
                if number is not None:
                    await send(running, number)
        assert next(later, None) is None
        write_snapshot(path, records)
    keys = [session.decode().partition(CONTEXT_SEPARATOR)[0] for session, _, _ in read_snapshot(path, MOST).pins]
    pinned = {int(session.removeprefix("session-")) for session in keys}
    assert pinned >= {0, 1}
    async with proxy_over(engines, path) as running:
        for number in pinned:
            assert (await send(running, number))["predicted_cached_tokens"] == 304


async def test_what_an_engine_held_that_restarted_since_is_dropped(engines: list[StubEngine], tmp_path: Path) -> None:
    where = await warmed(engines, tmp_path / "snapshot")
    await engines[0].stop()
    await engines[0].restart()
    async with proxy_over(engines, tmp_path / "snapshot") as running:
        state = running.core.router.state
        assert (state.index.blocks("inst-0"), state.sessions.count("inst-0")) == (0, 0)
        assert (state.index.blocks("inst-1"), state.sessions.count("inst-1")) == (40, 2)
        for number, instance in where.items():
            if instance == "inst-1":
                assert (await send(running, number))["predicted_cached_tokens"] == 304


async def test_another_engine_under_the_same_name_gets_nothing(engines: list[StubEngine], tmp_path: Path) -> None:
    await warmed(engines, tmp_path / "snapshot")
    async with proxy_over(engines[::-1], tmp_path / "snapshot") as running:
        assert not running.core.router.state.index.distinct_blocks
        assert not len(running.core.router.state.sessions)


def changed(path: Path, change: Callable[[Any], None]) -> None:
    """Write the snapshot again with other contents and a right checksum."""
    contents = read_snapshot(path, MOST)
    fields = msgspec.structs.asdict(contents.header)
    change(fields)
    records = [framed(type(contents.header)(**fields)), framed(contents.learned)]
    for part, runs in contents.engines:
        records += [framed(part), framed(Runs(runs))]
    write_snapshot(path, records)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda header: header.update(written_unix_s=header["written_unix_s"] - 601), "snapshot.max_age_s"),
        (lambda header: header.update(written_unix_s=header["written_unix_s"] + 660), "snapshot.max_age_s"),
        (lambda header: header.update(written_unix_s=float("nan")), "snapshot.max_age_s"),
        (lambda header: header.update(block_tokens=32), "blocks of 32 tokens"),
        (lambda header: header.update(text_block_bytes=512), "index.text_block_bytes"),
    ],
)
async def test_a_snapshot_that_does_not_fit_is_ignored_with_a_warning(
    engines: list[StubEngine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Any], None],
    reason: str,
) -> None:
    await warmed(engines, tmp_path / "snapshot")
    changed(tmp_path / "snapshot", change)
    with caplog.at_level(logging.WARNING, "warmroute.snapshot"):
        async with proxy_over(engines, tmp_path / "snapshot") as running:
            assert (await send(running, 0))["predicted_cached_tokens"] == 0
    assert reason in caplog.text


@pytest.mark.parametrize(
    "contents", [b"", b"no snapshot", b"warmroute-snap-1" + bytes(40), b"warmroute-snap-2" + bytes(40)]
)
async def test_garbage_is_ignored_with_a_warning_and_replaced(
    engines: list[StubEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture, contents: bytes
) -> None:
    path = tmp_path / "snapshot"
    path.write_bytes(contents)
    path.chmod(0o600)
    with caplog.at_level(logging.WARNING, "warmroute.snapshot"):
        assert len(await warmed(engines, path)) == len(PROMPTS)
    assert "is ignored" in caplog.text
    assert len(read_snapshot(path, MOST).engines) == 2


async def test_runs_that_are_no_tree_leave_an_empty_index(
    engines: list[StubEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "snapshot"
    await warmed(engines, path)
    contents = read_snapshot(path, MOST)
    contents.engines[1][1].append(PrefixRun(77, bytes(8)))
    parts = [record for part, runs in contents.engines for record in (framed(part), framed(Runs(runs)))]
    write_snapshot(path, [framed(contents.header), framed(contents.learned), *parts])
    with caplog.at_level(logging.WARNING, "warmroute.snapshot"):
        async with proxy_over(engines, path) as running:
            assert not running.core.router.state.index.distinct_blocks
            assert (await send(running, 0))["predicted_cached_tokens"] == 0
    assert "is damaged" in caplog.text


async def learn(engines: list[StubEngine], path: Path) -> LearnedCosts:
    """PrefixRun a proxy that learns times and a text ratio; returns the times."""
    async with proxy_over(engines, path) as running:
        await send(running, 0)
        router = running.core.router
        for seconds in (1.0, 2.0, 3.0):
            router.state.costs.prefilled(PrefillJob("inst-0", 2_000, 0, 0, 0), seconds)
        for each in answers(450, 0.012):
            router.state.costs.steps.observe(each)
        router.text_ratios.learn(Endpoint.CHAT, 700, 100)
        return LearnedCosts.of(router.state.costs)


async def test_learned_times_and_ratios_come_back(engines: list[StubEngine], tmp_path: Path) -> None:
    learned = await learn(engines, tmp_path / "snapshot")
    async with proxy_over(engines, tmp_path / "snapshot") as running:
        router = running.core.router
        assert LearnedCosts.of(router.state.costs) == learned
        assert router.state.costs.at(0.0).short_step.known
        assert router.text_ratios.of(Endpoint.CHAT) > router.text_ratios.of(Endpoint.COMPLETIONS)
        metrics = (await running.client.get("/metrics")).text
        assert "\nwarmroute_short_prefill_step_seconds 0.01" in metrics


async def test_they_are_learned_again_where_every_engine_has_restarted(
    engines: list[StubEngine], tmp_path: Path
) -> None:
    """Another model may run there."""
    await learn(engines, tmp_path / "snapshot")
    for engine in engines:
        await engine.stop()
        await engine.restart()
    async with proxy_over(engines, tmp_path / "snapshot") as running:
        assert LearnedCosts.of(running.core.router.state.costs) == LearnedCosts.of(CostBook())


async def test_times_that_correct_other_constants_are_left(
    engines: list[StubEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await learn(engines, tmp_path / "snapshot")
    with caplog.at_level(logging.INFO, "warmroute.snapshot"):
        async with proxy_over(engines, tmp_path / "snapshot", hardware="h100-nvlink-128") as running:
            assert not running.core.router.state.costs.prefill.buckets
            assert (await send(running, 0))["predicted_cached_tokens"] == 304
    assert "other constants" in caplog.text


@pytest.mark.parametrize("ratios", [{"/v1/chat/completions": 99.0}, {"/v1/unknown": 3.0}])
async def test_learned_values_that_cannot_be_leave_an_empty_index(
    engines: list[StubEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture, ratios: dict[str, float]
) -> None:
    path = tmp_path / "snapshot"
    await warmed(engines, path)
    contents = read_snapshot(path, MOST)
    parts = [record for part, runs in contents.engines for record in (framed(part), framed(Runs(runs)))]
    damaged = msgspec.structs.replace(contents.learned, text_ratios=ratios)
    write_snapshot(path, [framed(contents.header), framed(damaged), *parts])
    with caplog.at_level(logging.WARNING, "warmroute.snapshot"):
        async with proxy_over(engines, path) as running:
            assert not running.core.router.state.index.distinct_blocks
            assert not running.core.router.text_ratios.learned
    assert "is damaged" in caplog.text


async def test_a_folder_that_does_not_exist_costs_a_warning_only(
    engines: list[StubEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "warmroute.snapshot"):
        await warmed(engines, tmp_path / "missing" / "snapshot")
    assert "no snapshot was written" in caplog.text


async def test_it_is_written_from_time_to_time_and_stays_within_its_bound(
    engines: list[StubEngine], tmp_path: Path
) -> None:
    path, prompts = tmp_path / "snapshot", 400
    async with proxy_over(engines, path, snapshot={"interval_s": 0.05, "max_bytes": 65_536}) as running:
        state = running.core.router.state
        for number in range(prompts):
            state.index.insert("inst-0", hash_token_blocks(range(number * 1_000, number * 1_000 + 320), 16))
            state.sessions.pin(f"{number}" * 50, "inst-1", float(number))
        await running.until(lambda: path.exists() and read_snapshot(path, MOST).engines[0][1] != [])
        size = path.stat().st_size
        assert size <= 65_536
        contents = read_snapshot(path, 65_536)
        # The most recent ones, as many as fit into a third of the file.
        newest = hash_token_blocks(range((prompts - 1) * 1_000, (prompts - 1) * 1_000 + 320), 16)
        assert contents.engines[0][1][0][1] == b"".join(block.to_bytes(8, "little") for block in newest)
        assert 50 <= len(contents.engines[0][1]) < prompts
        written = contents.header.written_unix_s
        await running.until(lambda: read_snapshot(path, MOST).header.written_unix_s > written)
