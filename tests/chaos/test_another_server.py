"""Another engine, or another server, on the port of an engine that crashed: it gets no requests meant for the first."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.conftest import BODY, Chaos, StartChaos
from tests.chaos.rig.engine import ChaosEngine, Fault, Talk
from tests.chaos.rig.wire import good_body, head, whole

QUICK = {"interval_s": 0.1, "timeout_s": 5.0, "unhealthy_after": 100}


def lists(model: str, started_unix_s: float | None = None) -> Fault:
    """Probe answers of an engine with one model; without ``started_unix_s`` its process is indistinguishable."""

    async def answer(talk: Talk) -> None:
        path = talk.request.path
        if path == "/v1/models":
            content = b'{"object":"list","data":[{"id":"%s","object":"model"}]}' % model.encode()
        elif path == "/query":
            content = b'{"0":{"engine_id":"same"}}'
            talk.engine.probes += 1
        elif path == "/metrics" and started_unix_s is not None:
            content = f"process_start_time_seconds {started_unix_s}\n".encode()
        else:
            content = b""
        await talk.send(head("200 OK", f"content-length: {len(content)}") + content)

    return answer


async def another_web_server(talk: Talk) -> None:
    """Healthy by its status, with pages for everything."""
    await talk.send(whole("200 OK", b"<html>welcome</html>"))


async def a_server_without_models(talk: Talk) -> None:
    ok = talk.request.path == "/health"
    await talk.send(whole("200 OK" if ok else "404 Not Found", b"{}" if ok else b"not here"))


async def answers_for_any_model(talk: Talk) -> None:
    """An engine that does not check the model's name."""
    await talk.send(whole("200 OK", b'{"object":"text_completion","choices":[{"text":"of another model"}]}'))


async def served(proxy: Chaos, count: int = 6) -> None:
    for _ in range(count):
        answer = await proxy.client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.content) == (200, good_body())


@pytest.mark.parametrize("known_start", [True, False])
async def test_another_model_on_the_port_of_an_engine_gets_no_requests_for_the_first(
    start_chaos: StartChaos, known_start: bool
) -> None:
    crashed = ChaosEngine()
    if not known_start:
        crashed.probe_fault = lists("stub")
    proxy = await start_chaos(crashed, ChaosEngine(), health=QUICK)
    await served(proxy)
    state = proxy.core.router.state
    assert state.index.blocks("inst-0")
    await crashed.stop()
    crashed.posts.clear()
    crashed.fault = answers_for_any_model
    crashed.probe_fault = lists("intruder", crashed.started_unix_s + 5 if known_start else None)
    await proxy.until(lambda: not proxy.instance(0).healthy)
    await crashed.start()
    await proxy.until(lambda: proxy.instance(0).healthy and "intruder" in proxy.core.instances.served.names)
    await served(proxy)
    assert not crashed.posts
    assert (proxy.instance(0).restarts, state.index.blocks("inst-0")) == (1, 0), "the cache of the first is gone"
    answer = await proxy.client.post("/v1/completions", json={**BODY, "model": "intruder"})
    assert (answer.status_code, answer.headers["x-warmroute-instance"]) == (200, "inst-0")
    await proxy.nothing_left()


@pytest.mark.parametrize("server", [another_web_server, a_server_without_models])
async def test_a_server_that_is_no_engine_is_taken_out_by_its_first_probe(
    start_chaos: StartChaos, server: Fault
) -> None:
    crashed = ChaosEngine()
    proxy = await start_chaos(crashed, ChaosEngine(), health=QUICK)
    for _ in range(2):
        crashed.posts.clear()
        crashed.probe_fault = server
        await proxy.until(lambda: not proxy.instance(0).healthy)
        assert "another server on its port" in str(proxy.instance(0).last_error)
        await served(proxy)
        await asyncio.sleep(0.2)
        assert not proxy.instance(0).healthy
        crashed.probe_fault = None
        await proxy.until(lambda: proxy.instance(0).healthy)
    await proxy.nothing_left()


async def test_a_restart_between_two_probes_with_another_model_is_noticed_at_the_first_request(
    start_chaos: StartChaos,
) -> None:
    """The engine was back before a probe failed; like vLLM, it refuses names that it does not serve."""
    crashed = ChaosEngine()
    proxy = await start_chaos(crashed, ChaosEngine())
    missing = b'{"error":{"message":"The model `stub` does not exist.","type":"NotFoundError","code":404}}'

    async def refuses(talk: Talk) -> None:
        await talk.send(whole("404 Not Found", missing))

    crashed.fault, crashed.probe_fault = refuses, lists("intruder")
    await served(proxy)
    assert len(crashed.posts) == 1
    await proxy.until(lambda: "intruder" in proxy.core.instances.served.names)
    assert proxy.instance(0).healthy
    assert proxy.instance(0).breaker.openings == 0
    await proxy.nothing_left()


async def test_an_engine_whose_list_of_models_fails_for_a_moment_stays_in(start_chaos: StartChaos) -> None:
    """A 500 says nothing about the models."""
    engine = ChaosEngine()
    proxy = await start_chaos(engine, health=QUICK)
    failed = 0

    async def fails(talk: Talk) -> None:
        nonlocal failed
        if talk.request.path == "/v1/models":
            failed += 1
            await talk.send(whole("500 X", b"busy"))
        else:
            await talk.send(talk.engine._probed(talk.request.path))

    engine.probe_fault = fails
    await proxy.until(lambda: failed >= 3)
    assert proxy.instance(0).healthy
    await served(proxy, 2)
    await proxy.nothing_left()


async def test_what_answers_instead_of_an_engine_is_reported_once(
    start_chaos: StartChaos, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ChaosEngine()
    proxy = await start_chaos(engine)
    engine.probe_fault = another_web_server
    for _ in range(3):
        await proxy.app.operations.fleet.probe(proxy.instance())
    assert not proxy.instance().healthy
    said = [message for message in caplog.messages if "another server on its port" in message]
    assert len(said) == 1
    assert "another server" in said[0]
