"""Many connections, and too many: the limit on clients' connections, and a process that is out of descriptors."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.clients.bounds import SPARE_CONNECTIONS, default_connections
from proxy.engines.shortage import own_shortage
from tests.chaos.conftest import BODY, StartChaos
from tests.chaos.rig.client import RawClient, head, post
from tests.chaos.rig.engine import ChaosEngine
from tests.chaos.rig.wire import good_body
from tests.proxy.serve_process import serve_process

PLAIN = json.dumps(BODY).encode()
HEALTH = head(path="/health", method="GET")


@contextmanager
def no_descriptors() -> Iterator[None]:
    """No file, socket or pipe can be opened by this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_above_the_limit_generation_is_refused_and_health_answered(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(), limits={"connections": 5})
    before = proxy.core.clients.open
    async with AsyncExitStack() as stack:
        early = [await stack.enter_async_context(RawClient(proxy.port)) for _ in range(5 - before)]
        await proxy.until(lambda: proxy.core.clients.open == 5)
        late = await stack.enter_async_context(RawClient(proxy.port))
        await late.send(HEALTH)
        got = await late.answer(method="GET")
        assert (got.status, got.headers["connection"]) == (200, "close")
        assert await late.at_end()
        for path in ("/ready", "/stats"):
            async with RawClient(proxy.port) as admin:
                await admin.send(head(path=path, method="GET"))
                assert (await admin.answer(method="GET")).status == 200
        for body in (post(PLAIN), head("content-length: 1000") + b"{"):
            async with RawClient(proxy.port) as refused:
                await refused.send(body)
                got = await refused.answer()
                assert (got.status, got.error["code"], got.headers["retry-after"]) == (503, "too_many_connections", "1")
                assert "limits.connections" in got.error["message"]
                assert await refused.at_end()
        assert 'warmroute_clients_refused_total{limit="connections"} 2.0' in (await proxy.client.get("/metrics")).text
        for client in early:
            await client.send(post(PLAIN))
            assert (await client.answer()).body == good_body()
    await proxy.until(lambda: proxy.core.clients.open <= before)
    assert len(proxy.engines[0].posts) == 5 - before
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200


async def test_with_the_spare_connections_used_up_clients_get_503_at_once(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine(), limits={"connections": 1}, admin={"port": 0})
    assert proxy.core.admin_port is not None
    async with AsyncExitStack() as stack:
        for _ in range(SPARE_CONNECTIONS + 2):
            await stack.enter_async_context(RawClient(proxy.port))
        await proxy.until(lambda: proxy.core.clients.open >= SPARE_CONNECTIONS + 1)
        async with RawClient(proxy.port) as refused:
            assert (await refused.answer()).status == 503
            assert await refused.at_end()
        async with RawClient(proxy.core.admin_port) as admin:
            await admin.send(head(path="/stats", method="GET"))
            assert (await admin.answer(method="GET")).status == 200
    await proxy.until(lambda: proxy.core.clients.open <= 1)


def test_the_limit_leaves_descriptors_for_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for descriptors, connections in {1024: 704, 20_000: 14_936, 64: 16}.items():
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=descriptors: (soft, soft))
        assert default_connections() == connections


async def test_hundreds_of_idle_connections_do_not_disturb(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RawClient(proxy.port)) for _ in range(400)]
        for client in clients[::2]:
            await client.send(HEALTH)
        for client in clients[::2]:
            assert (await client.answer(method="GET")).status == 200
        assert (await proxy.client.get("/health")).status_code == 200
        assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
        assert proxy.core.clients.open >= 400
    await proxy.until(lambda: proxy.core.clients.open <= 1)
    await proxy.nothing_left()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_proxys_own_shortage_is_no_engines_failure(start_chaos: StartChaos, stream: bool) -> None:
    engines = [ChaosEngine(), ChaosEngine()]
    proxy = await start_chaos(*engines)
    async with RawClient(proxy.port) as client:
        await client.send(HEALTH)
        await client.answer(method="GET")
        with no_descriptors():
            for _ in range(4):
                await client.send(post(json.dumps({**BODY, "stream": stream}).encode()))
                got = await client.answer()
                assert (got.status, got.error["code"], got.headers["retry-after"]) == (503, "out_of_sockets", "1")
                assert os.strerror(errno.EMFILE) in got.error["message"]
                assert "limits.connections" in got.error["message"]
            for instance in proxy.core.instances:
                await proxy.app.operations.fleet.probe(instance)
        assert all(instance.healthy and not instance.failures_in_a_row for instance in proxy.core.instances)
        await client.send(post(PLAIN))
        assert (await client.answer()).body == good_body()
    await proxy.nothing_left()
    assert proxy.core.breakdown.outcomes == {"no_instance": 4, "ok": 1}


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOMEM, errno.ENOBUFS])
def test_shortages_are_distinguished(number: int) -> None:
    assert own_shortage(OSError(number, "x")) == os.strerror(number)
    nested = httpx.ConnectError("All connection attempts failed")
    nested.__cause__ = OSError("All connection attempts failed")
    nested.__cause__.__cause__ = ExceptionGroup("multiple", [OSError(errno.ECONNREFUSED, "x"), OSError(number, "y")])
    assert own_shortage(nested) == os.strerror(number)


@pytest.mark.parametrize(
    "error",
    [ConnectionRefusedError(errno.ECONNREFUSED, "x"), OSError("x"), TimeoutError(), socket.gaierror(-2, "unknown")],
    ids=repr,
)
def test_engines_failures_are_no_shortage(error: OSError) -> None:
    assert own_shortage(error) is None


def test_an_unknown_name_without_descriptors_is_a_shortage() -> None:
    with no_descriptors():
        assert own_shortage(socket.gaierror(-2, "unknown")) == os.strerror(errno.EMFILE)


_CROWD = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500))
address = ("127.0.0.1", int(sys.argv[1]))
crowd = [socket.create_connection(address, timeout=20) for _ in range(300)]
print("there", flush=True)
sys.stdin.read()
"""


async def test_a_process_without_descriptors_accepts_again_afterwards(tmp_path: Path) -> None:
    """Connections above `ulimit -n` are closed by the event loop; it neither spins nor stops to listen."""
    engine = await ChaosEngine().start()
    limited: dict[str, Any] = {
        "instances": [{"name": "inst-0", "url": engine.url}],
        "limits": {"connections": 10_000},
        "log_level": "info",
    }
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        async with (
            serve_process(tmp_path / "config.yaml", limited) as served,
            httpx.AsyncClient(
                base_url=served.url, timeout=30, limits=httpx.Limits(keepalive_expiry=None), trust_env=False
            ) as early,
        ):
            resource.prlimit(served.pid, resource.RLIMIT_NOFILE, (100, hard))
            assert (await early.get("/health")).status_code == 200
            port = served.url.rsplit(":", 1)[1]
            crowd = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _CROWD, port), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            assert crowd.stdin is not None
            assert crowd.stdout is not None
            assert await crowd.stdout.readline() == b"there\n"
            assert (await early.get("/health")).status_code == 200  # on the connection that it has
            crowd.stdin.close()
            await crowd.wait()
            async with httpx.AsyncClient(base_url=served.url, timeout=20, trust_env=False) as another:
                for _ in range(100):
                    try:
                        assert (await another.post("/v1/completions", json=BODY)).status_code == 200
                        break
                    except httpx.TransportError:
                        await asyncio.sleep(0.1)
                else:
                    raise AssertionError("the listener is gone")
            assert not [line for line in served.lines if "Traceback" in line]
    finally:
        await engine.stop()
