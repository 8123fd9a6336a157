"""Instances from Kubernetes: the same tests on a stub API server and, where it was built, on the real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from proxy.discovery import kubernetes
from proxy.discovery.kubernetes import PodInstances
from proxy.discovery.source import DiscoveryError, Wanted, next_pause
from proxy.settings import SettingsError
from tests.proxy.discovery.cluster import LABELS, Cluster
from tests.proxy.discovery.real_api_server import real_api_server
from tests.proxy.discovery.stub_api_server import StubApiServer, stub_api_server


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[StubApiServer]:
    async with stub_api_server(tmp_path) as server:
        yield server


@pytest.fixture(params=["stub", "real"])
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with stub_api_server(tmp_path) if request.param == "stub" else real_api_server(tmp_path) as server:
        yield server


async def until(sets: AsyncGenerator[Wanted, None], *names: str) -> Wanted:
    """The next set with exactly these instances; other sets may come before it."""
    async for wanted in sets:
        if [each.name for each in wanted.instances] == sorted(names):
            return wanted
    raise AssertionError("the source ended")


async def test_pods_come_change_and_go(cluster: Cluster) -> None:
    await cluster.put("a", "127.0.0.2")
    await cluster.put("other", "127.0.0.9", labels={"app": "other"})
    async with aclosing(PodInstances(cluster.model()).sets()) as sets:
        await until(sets, "a")
        await cluster.put("b", "127.0.0.3")
        wanted = await until(sets, "a", "b")
        assert [each.url for each in wanted.instances] == ["http://127.0.0.2:8000", "http://127.0.0.3:8000"]
        await cluster.begin_deletion("a")
        await until(sets, "b")
        await cluster.delete("a")
        await cluster.delete("b")
        await until(sets)


async def test_a_pod_that_loses_or_gains_a_label_leaves_or_joins(cluster: Cluster) -> None:
    await cluster.put("a", "127.0.0.2")
    await cluster.put("b", "127.0.0.3", labels={"app": "engine", "release": "b"})
    async with aclosing(PodInstances(cluster.model()).sets()) as sets:
        await until(sets, "a")
        await cluster.relabel("b", {**LABELS, "further": "label"})
        await until(sets, "a", "b")
        await cluster.relabel("a", {"app": "engine"})
        await until(sets, "b")
        await cluster.relabel("a", LABELS)
        await until(sets, "a", "b")


async def test_a_pod_of_the_same_name_is_another_engine(cluster: Cluster) -> None:
    """As a StatefulSet's: deleted, then created again with another address."""
    await cluster.put("a", "127.0.0.2")
    await cluster.put("b", "127.0.0.3")
    async with aclosing(PodInstances(cluster.model()).sets()) as sets:
        await until(sets, "a", "b")
        await cluster.begin_deletion("a")
        await until(sets, "b")
        await cluster.delete("a")
        await cluster.put("a", "127.0.0.4")
        wanted = await until(sets, "a", "b")
        assert wanted.instances[0].url == "http://127.0.0.4:8000"


async def test_a_restart_of_the_api_server_loses_no_change(cluster: Cluster) -> None:
    async def followed() -> AsyncGenerator[Wanted, None]:
        """As its caller does: the source again after a pause."""
        while True:
            async with aclosing(PodInstances(cluster.model()).sets()) as sets:
                with suppress(DiscoveryError):
                    async for wanted in sets:
                        yield wanted
            await asyncio.sleep(0.05)

    await cluster.put("a", "127.0.0.2")
    async with aclosing(followed()) as sets, asyncio.timeout(60):
        await until(sets, "a")
        await cluster.put("b", "127.0.0.3")
        await until(sets, "a", "b")
        following = asyncio.create_task(until(sets, "b"))
        await cluster.restart()
        await cluster.delete("a")
        await following
        await cluster.put("c", "127.0.0.4")
        await until(sets, "b", "c")


async def test_the_watch_is_repeated_from_where_it_ended(cluster: Cluster) -> None:
    await cluster.put("a", "127.0.0.2")
    async with aclosing(PodInstances(cluster.model(watch_s=1)).sets()) as sets:
        await until(sets, "a")
        loop, number = asyncio.get_running_loop(), 0
        ends_s = loop.time() + 2.5
        while loop.time() < ends_s:
            number += 1
            await cluster.put(f"b{number}", "127.0.0.3")
            await until(sets, "a", f"b{number}")
            await cluster.delete(f"b{number}")
            await until(sets, "a")


async def test_a_version_that_has_expired_is_followed_by_a_list(cluster: Cluster) -> None:
    source = PodInstances(cluster.model())
    await cluster.put("a", "127.0.0.2")
    async with aclosing(source.sets()) as sets:
        await until(sets, "a")
        await cluster.compact()
        source._version = "1"
        source._pods.clear()  # only a list brings it back
        await until(sets, "a")


async def test_bookmarks_advance_the_version_of_the_next_watch(stub: StubApiServer) -> None:
    source = PodInstances(stub.model(watch_s=1))
    await stub.put("a", "127.0.0.2")
    async with aclosing(source.sets()) as sets:
        await until(sets, "a")
        following = asyncio.create_task(anext(sets))
        # Of pods that the selector leaves out the source hears in bookmarks only.
        await stub.put("other", "127.0.0.9", labels={"app": "other"})
        for _ in range(500):
            if len(stub.watches) >= 2 and int(stub.watches[-1]) > int(stub.watches[0]):
                break
            await asyncio.sleep(0.02)
        assert int(stub.watches[-1]) == int(stub.watches[0]) + 1
        assert stub.lists == 1
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


@pytest.mark.parametrize("with_event", [False, True])
async def test_a_watch_that_cannot_continue_is_followed_by_a_list(stub: StubApiServer, with_event: bool) -> None:
    stub.expires_watches_with_event = with_event
    stub.bookmarks = False
    await stub.put("a", "127.0.0.2")
    async with aclosing(PodInstances(stub.model(watch_s=1)).sets()) as sets:
        await until(sets, "a")
        await stub.put("other", "127.0.0.9", labels={"app": "other"})
        await stub.compact()
        await until(sets, "a")
        await stub.put("b", "127.0.0.3")
        await until(sets, "a", "b")
    assert stub.lists >= 2


@pytest.mark.parametrize("with_event", [False, True])
async def test_a_server_that_ends_every_watch_at_once_is_asked_less_and_less(
    stub: StubApiServer, with_event: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def recorded(*given: float, steady: bool) -> float:
        pauses.append(next_pause(*given, steady=steady))
        return pauses[-1]

    monkeypatch.setattr(kubernetes, "next_pause", recorded)
    monkeypatch.setattr(kubernetes, "_PACE_S", 0.01)
    monkeypatch.setattr(kubernetes, "_SHORT_S", 1e9)  # a loaded machine takes longer
    stub.expires_watches_with_event = with_event
    await stub.put("a", "127.0.0.2")
    stub.expired = True
    async with aclosing(PodInstances(stub.model()).sets()) as sets:
        for _ in range(7):
            await until(sets, "a")
        assert pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.2]
        stub.expired = False
        following = asyncio.create_task(until(sets, "a", "b"))
        await stub.put("b", "127.0.0.3")
        await following


async def test_lists_have_pages(stub: StubApiServer) -> None:
    stub.page = 2
    for number in range(5):
        await stub.put(f"p{number}", f"127.0.0.{number + 2}")
    async with aclosing(PodInstances(stub.model()).sets()) as sets:
        await until(sets, *(f"p{number}" for number in range(5)))
    assert stub.lists == 3


async def test_refusals_name_the_remedy(stub: StubApiServer) -> None:
    stub.allowed = False
    with pytest.raises(DiscoveryError, match=r"403.*get, list and watch on pods"):
        await anext(PodInstances(stub.model()).sets())
    stub.token_file.write_text("expired")
    with pytest.raises(DiscoveryError, match=r"401.*token_file"):
        await anext(PodInstances(stub.model()).sets())


async def test_a_watch_that_is_refused_is_an_error_after_the_list(stub: StubApiServer) -> None:
    stub.watch_allowed = False
    await stub.put("a", "127.0.0.2")
    async with aclosing(PodInstances(stub.model()).sets()) as sets:
        await until(sets, "a")
        with pytest.raises(DiscoveryError, match=r"403.*cannot watch.*get, list and watch on pods"):
            await anext(sets)


async def test_a_new_token_is_used_without_a_restart(stub: StubApiServer) -> None:
    good = stub.token_file.read_text()
    source = PodInstances(stub.model())
    stub.token_file.write_text("expired")
    with pytest.raises(DiscoveryError):
        await anext(source.sets())
    stub.token_file.write_text(good)
    await anext(source.sets())


async def test_a_server_with_another_authority_is_not_trusted(stub: StubApiServer) -> None:
    from proxy.settings import DiscoverySettings

    settings = stub.settings()
    del settings["kubernetes"]["ca_file"]
    with pytest.raises(DiscoveryError, match="certificate"):
        await anext(PodInstances(DiscoverySettings.model_validate(settings)).sets())


async def test_a_server_that_is_gone_is_an_error(stub: StubApiServer) -> None:
    await stub.put("a", "127.0.0.2")
    async with aclosing(PodInstances(stub.model()).sets()) as sets:
        await until(sets, "a")
        await stub.stop()
        with pytest.raises(DiscoveryError):
            await anext(sets)


def test_outside_of_a_pod_the_api_server_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from proxy.settings import DiscoverySettings

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    settings = {"source": "kubernetes", "kubernetes": {"selector": "a=b"}}
    with pytest.raises(SettingsError, match="api_url"):
        PodInstances(DiscoverySettings.model_validate(settings))
