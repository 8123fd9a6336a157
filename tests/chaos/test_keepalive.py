"""Reused connections to an engine: closed at the worst moment, or with stray bytes in them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from proxy.engines import client as engine_client
from tests.chaos.conftest import BODY, Chaos, StartChaos
from tests.chaos.rig.engine import ChaosEngine, Talk, good
from tests.chaos.rig.wire import EVENTS, good_body, reset, whole

FORGED = whole("200 OK", b'{"id":"forged","choices":[],"usage":null}')
TIMED_OUT = whole("408 Request Timeout", b"", "connection: close")


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine may need more than the real times between two steps of a test."""
    monkeypatch.setattr(engine_client, "_STALE_S", 60.0)
    monkeypatch.setattr(engine_client, "_KEEPALIVE_S", 60.0)


async def ask(proxy: Chaos, stream: bool) -> None:
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert answer.content == (b"".join(EVENTS) if stream else good_body())


async def fin(talk: Talk) -> None:
    await talk.close()


async def rst(talk: Talk) -> None:
    reset(talk.writer)
    talk.open = False


async def late_fin(talk: Talk) -> None:
    await asyncio.sleep(0.05)
    await talk.close()


async def late_rst(talk: Talk) -> None:
    await asyncio.sleep(0.05)
    await rst(talk)


async def answer_nobody_asked_for(talk: Talk) -> None:
    await asyncio.sleep(0.02)
    await talk.send(FORGED)


async def timed_out_then_closed(talk: Talk) -> None:
    await asyncio.sleep(0.02)
    await talk.send(TIMED_OUT)
    await talk.close()


async def garbage(talk: Talk) -> None:
    await asyncio.sleep(0.02)
    await talk.send(b"\0\0\0")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "idle",
    [
        fin,
        late_fin,
        late_rst,
        answer_nobody_asked_for,
        timed_out_then_closed,
        garbage,
    ],
)
async def test_what_happens_to_an_idle_connection_touches_no_request(
    start_chaos: StartChaos, idle: Callable[[Talk], Awaitable[None]], stream: bool
) -> None:
    proxy = await start_chaos(ChaosEngine(idle_fault=idle))
    for number in range(4):
        await ask(proxy, stream)
        # Bytes after the next request was sent are indistinguishable from its answer.
        await proxy.until(lambda: proxy.engines[0].idled > number)  # noqa: B023
    assert [row["attempts"] for row in await proxy.rows()] == [[]] * 4
    assert proxy.instance().failures_in_a_row == 0
    await proxy.nothing_left()


def on_reuse(act: Callable[[Talk], Awaitable[None]]) -> Callable[[Talk], Awaitable[None]]:
    """A good answer to the first request of a connection, then ``act``."""

    async def fault(talk: Talk) -> None:
        seen = getattr(talk.writer, "answered", 0)
        talk.writer.answered = seen + 1  # type: ignore[attr-defined]
        await (act if seen else good)(talk)

    return fault


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("act", [fin, rst])
async def test_a_connection_closed_at_the_moment_it_is_reused_costs_nothing_but_a_new_one(
    start_chaos: StartChaos, act: Callable[[Talk], Awaitable[None]], stream: bool
) -> None:
    """The keep-alive race: the engine closes an idle connection while the next request is sent on it."""
    engine = ChaosEngine(on_reuse(act))
    proxy = await start_chaos(engine)
    for _ in range(4):
        await ask(proxy, stream)
    assert [row["attempts"] for row in await proxy.rows()] == [[]] * 4
    assert proxy.instance().failures_in_a_row == 0
    assert engine.accepted >= 4
    await proxy.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_connections_are_reused_when_nothing_is_wrong(start_chaos: StartChaos, stream: bool) -> None:
    engine = ChaosEngine()
    proxy = await start_chaos(engine)
    for _ in range(5):
        await ask(proxy, stream)
    assert engine.accepted == 1


@pytest.mark.parametrize("act", [fin, rst])
async def test_a_reused_connection_that_closes_after_the_engine_died_is_a_failed_attempt(
    start_chaos: StartChaos, act: Callable[[Talk], Awaitable[None]]
) -> None:
    """The second attempt uses a new connection: refused there, the instance is out and the next one answers."""
    engine = ChaosEngine()
    proxy = await start_chaos(engine, ChaosEngine(), policy={"name": "session_sticky"})
    headers = {"x-session-id": "one"}
    first = await proxy.client.post("/v1/completions", json=BODY, headers=headers)
    victim = int(first.headers["x-warmroute-instance"][-1])

    async def dies(talk: Talk) -> None:
        assert talk.engine._server is not None
        talk.engine._server.close()
        await act(talk)

    proxy.engines[victim].fault = dies
    again = await proxy.client.post("/v1/completions", json=BODY, headers=headers)
    assert (again.status_code, again.content) == (200, good_body())
    assert again.headers["x-warmroute-instance"] == f"inst-{1 - victim}"
    assert not proxy.instance(victim).healthy
    await proxy.nothing_left()


async def test_a_burst_over_reused_connections_that_all_close_loses_nothing(start_chaos: StartChaos) -> None:
    engine = ChaosEngine(on_reuse(rst))
    proxy = await start_chaos(engine)
    for _ in range(3):
        await asyncio.gather(*(ask(proxy, stream=number % 2 == 0) for number in range(40)))
    assert proxy.core.breakdown.outcomes == {"ok": 120}
    await proxy.nothing_left()


async def test_a_request_is_not_sent_twice_over_fresh_connections(start_chaos: StartChaos) -> None:
    """Only a reused connection may be stale: an engine that closes a new one has seen the request and failed it."""
    engine = ChaosEngine(fin)
    proxy = await start_chaos(engine)
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 502
    assert len(engine.posts) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_began_on_a_reused_connection_is_not_asked_for_again_there(
    start_chaos: StartChaos, stream: bool
) -> None:
    async def begins(talk: Talk) -> None:
        await talk.send(talk.answer().head)
        await talk.close()

    engine = ChaosEngine(on_reuse(begins))
    proxy = await start_chaos(engine)
    await ask(proxy, stream)
    answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": stream})
    assert answer.status_code == 502
    assert len(engine.posts) == 2
    await proxy.nothing_left()
