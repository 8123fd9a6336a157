"""Replicas in the test's event loop in front of the same engines, with a real store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.conftest import Running, StartProxy
from tests.proxy.sharing.store_server import StoreServer
from tests.proxy.stub_engine import StubEngine

StartReplicas = Callable[..., Awaitable[list[Running]]]

TTL_S = 3.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreServer]:
    server = StoreServer(tmp_path)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def start_replicas(store: StoreServer, start_proxy: StartProxy) -> StartReplicas:
    """``await start_replicas(n, engines, **settings)``: each knows all others when it returns."""

    async def start(count: int, engines: list[StubEngine] | int = 2, **settings: Any) -> list[Running]:
        fleet = [StubEngine() for _ in range(engines)] if isinstance(engines, int) else engines
        sharing = {"url": store.url, "ttl_s": TTL_S, "publish_interval_s": 0.02, **settings.pop("sharing", {})}
        replicas = [
            await start_proxy(engines=fleet, sharing={**sharing, "replica": f"replica-{number}"}, **settings)
            for number in range(count)
        ]
        for each in replicas:
            await each.until(lambda each=each: knows(each) == count - 1)  # type: ignore[misc]
        return replicas

    return start


def knows(replica: Running) -> int:
    """Number of other replicas that it has heard lately."""
    assert replica.core.sharing is not None
    return len(replica.core.sharing.others)
