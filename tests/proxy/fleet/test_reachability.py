"""Engines that cannot be reached from the start: cause and remedy in the log, in ``GET /instances`` and in 503s."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from proxy.fleet.instances import Instance, Instances
from proxy.fleet.reachability import diagnosis, outage, status_diagnosis
from proxy.settings import HealthSettings, InstanceSettings
from tests.proxy.conftest import Running, StartProxy
from tests.proxy.stub_engine import StubEngine

BODY = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 2}
ONCE = {"interval_s": 600.0, "timeout_s": 5.0}
"""Only the probe at the start, which therefore gives the warning."""


async def served_with(start_proxy: StartProxy, url: str, **settings: Any) -> Running:
    """A proxy in front of one engine URL, after its first probe."""
    return await start_proxy(1, instances=[{"url": url, "name": "e"}], health=ONCE, **settings)


async def everywhere(proxy: Running, caplog: pytest.LogCaptureFixture) -> str:
    """The reason, which the warning, ``GET /instances`` and both 503s must have alike."""
    reason = (await proxy.client.get("/instances")).json()["instances"][0]["last_error"].removeprefix("probe: ")
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"e is not used: {reason}" in warned
    for answer in (await proxy.client.post("/v1/completions", json=BODY), await proxy.client.get("/v1/models")):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_instance"
        assert f"e: {reason}" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) > 0
    return str(reason)


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection of a web server without engine."""
    with contextlib.suppress(ConnectionError):
        await reader.read(4096)
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def web_server(tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Port of a web server that has none of the paths."""
    server = await asyncio.start_server(closes, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_refused_connection_asks_for_the_engine(
    start_proxy: StartProxy, caplog: pytest.LogCaptureFixture
) -> None:
    async with web_server() as port:
        pass
    proxy = await served_with(start_proxy, f"http://127.0.0.1:{port}")
    reason = await everywhere(proxy, caplog)
    assert f"connection refused: is vLLM listening on 127.0.0.1:{port}?" in reason


WITHOUT_MODEL = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
}


async def test_a_request_without_a_model_may_be_repeated_while_no_engine_can_be_used(start_proxy: StartProxy) -> None:
    async with web_server() as port:
        pass
    proxy = await served_with(start_proxy, f"http://127.0.0.1:{port}")
    for path, body in WITHOUT_MODEL.items():
        answer = await proxy.client.post(path, json=body)
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True), path
    explained = await proxy.client.post("/explain", json={"prompt": "a"})
    assert (explained.status_code, explained.json()["error"]["code"]) == (503, "no_instance")
    assert {row["outcome"] for row in await proxy.rows()} == {"no_instance"}


async def test_a_url_that_ends_in_v1_is_given_without_it(
    start_proxy: StartProxy, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await StubEngine().start()
    try:
        proxy = await served_with(start_proxy, f"{engine.url}/v1")
        assert f"GET /v1/health answered 404: write {engine.url}, without /v1" in await everywhere(proxy, caplog)
    finally:
        await engine.stop()


async def test_https_to_a_plain_port_suggests_http(start_proxy: StartProxy, caplog: pytest.LogCaptureFixture) -> None:
    async with web_server() as port:
        proxy = await served_with(start_proxy, f"https://127.0.0.1:{port}")
        assert "use http://" in await everywhere(proxy, caplog)


async def test_http_to_a_tls_port_suggests_https(start_proxy: StartProxy, caplog: pytest.LogCaptureFixture) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)
    async with web_server(tls) as port:
        proxy = await served_with(start_proxy, f"http://127.0.0.1:{port}")
        assert "use https:// if the engine serves TLS" in await everywhere(proxy, caplog)


async def test_a_certificate_that_is_not_trusted_names_the_variable(
    start_proxy: StartProxy, caplog: pytest.LogCaptureFixture
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)
    async with web_server(tls) as port:
        proxy = await served_with(start_proxy, f"https://127.0.0.1:{port}")
        assert "SSL_CERT_FILE" in await everywhere(proxy, caplog)


async def test_a_certificate_that_has_expired_is_to_be_renewed(
    start_proxy: StartProxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tls, authority = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    authority.issue_cert("127.0.0.1", not_after=datetime(2024, 1, 1, tzinfo=UTC)).configure_cert(tls)
    async with web_server(tls) as port:
        proxy = await served_with(start_proxy, f"https://127.0.0.1:{port}")
        shown = await everywhere(proxy, caplog)
    assert "its certificate is not accepted (certificate has expired): renew it" in shown
    assert "SSL_CERT_FILE" not in shown


async def test_an_unknown_host_is_named(start_proxy: StartProxy, caplog: pytest.LogCaptureFixture) -> None:
    proxy = await served_with(start_proxy, "http://engine.invalid:8000")
    assert "unknown host 'engine.invalid'" in await everywhere(proxy, caplog)


async def test_another_web_server_is_recognised(start_proxy: StartProxy, caplog: pytest.LogCaptureFixture) -> None:
    async with web_server() as port:
        proxy = await served_with(start_proxy, f"http://127.0.0.1:{port}")
        assert "GET /health answered 404: is this a vLLM server?" in await everywhere(proxy, caplog)


async def test_the_same_reason_is_logged_once(start_proxy: StartProxy, caplog: pytest.LogCaptureFixture) -> None:
    async with web_server() as port:
        proxy = await served_with(start_proxy, f"http://127.0.0.1:{port}")
        for _ in range(3):
            await proxy.operations.fleet.probe(proxy.core.instances["e"])
    assert len([message for message in caplog.messages if "is not used" in message]) == 1
    await proxy.operations.fleet.probe(proxy.core.instances["e"])
    assert len([message for message in caplog.messages if "is not used" in message]) == 2, "another reason"


async def test_models_that_were_known_are_still_listed(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    await proxy.engines[0].stop()
    await proxy.until(lambda: not proxy.core.instances.healthy())
    answer = await proxy.client.get("/v1/models")
    assert (answer.status_code, [card["id"] for card in answer.json()["data"]]) == (200, ["stub"])
    refused = await proxy.client.post("/v1/completions", json=BODY)
    assert refused.status_code == 503
    assert "is vLLM listening" in refused.json()["error"]["message"]


async def test_the_reason_goes_with_the_first_good_probe(start_proxy: StartProxy) -> None:
    engine = StubEngine(mode="sick")
    proxy = await start_proxy(engines=[engine], health={"interval_s": 600.0})
    assert (await proxy.client.get("/v1/models")).status_code == 503
    engine.mode = "ok"
    await proxy.operations.fleet.probe(proxy.core.instances["inst-0"])
    assert proxy.core.instances["inst-0"].diagnosis is None
    assert outage(proxy.core.instances) is None
    assert (await proxy.client.get("/v1/models")).status_code == 200


class KeyedEngine(StubEngine):
    """Requires a key for its models, like vLLM with --api-key."""

    async def _models(self, request: Any) -> Any:
        answer = await super()._models(request)
        answer.set_status(401)
        return answer


async def test_a_key_that_is_missing_is_logged_once(start_proxy: StartProxy, caplog: pytest.LogCaptureFixture) -> None:
    proxy = await start_proxy(engines=[KeyedEngine()])
    await proxy.operations.fleet.probe(proxy.core.instances["inst-0"])
    said = [message for message in caplog.messages if "does not list its models" in message]
    assert len(said) == 1
    assert "engine_key_env" in said[0]
    assert proxy.core.instances.healthy() == {"inst-0"}, "it may serve any model"
    listed = await proxy.client.get("/v1/models")
    assert (listed.status_code, "engine_key_env" in listed.json()["error"]["message"]) == (503, True)
    assert "engine_key_env" in (await proxy.client.get("/instances")).json()["instances"][0]["last_error"]


@pytest.mark.parametrize(
    ("status", "url", "remedy"),
    [
        (401, "http://e:1", "engine_key_env"),
        (403, "http://e:1", "engine_key_env"),
        (404, "https://e:1/some/v1", "write https://e:1/some, without /v1"),
        (400, "http://e:1", "use https://"),
        (307, "http://e:1", "redirects are not followed"),
        (503, "http://e:1", "see its log"),
        (500, "http://e:1", "see the engine's log"),
    ],
)
def test_an_answer_names_its_remedy(status: int, url: str, remedy: str) -> None:
    assert remedy in status_diagnosis("/health", status, url)


def test_other_failures_are_shown_as_they_are() -> None:
    refused = httpx.ConnectError("All connection attempts failed")
    refused.__cause__ = ConnectionRefusedError()
    assert diagnosis(refused, "http://127.0.0.1:1", 2.0).endswith("once its model is loaded")
    assert diagnosis(refused, "http://10.0.0.1:1", 2.0).endswith("with --host 0.0.0.0 only")
    assert "within 2 s" in diagnosis(httpx.ReadTimeout("late"), "http://e:1", 2.0)
    assert "no connection (no route)" in diagnosis(httpx.ConnectError("no route"), "http://e:1", 2.0)
    assert diagnosis(KeyError("x"), "http://e:1", 2.0) == "KeyError('x')"


def test_an_outage_names_the_first_instances_and_counts_the_others() -> None:
    health = HealthSettings()
    assert "no instance: add one" in str(outage(Instances((), health)))
    fleet = Instances(tuple(InstanceSettings(url=f"http://127.0.0.1:{port}") for port in range(1, 6)), health)
    fleet.probe_failed("127.0.0.1:1", "probe: gone")
    fleet["127.0.0.1:2"].draining = True
    text = str(outage(fleet))
    assert "127.0.0.1:1: gone; 127.0.0.1:2: it is draining; 127.0.0.1:3: it has not answered" in text
    assert text.endswith("; and 2 more (GET /instances)")
    fleet.add(Instance(InstanceSettings(url="http://127.0.0.1:9")))
    fleet.probed("127.0.0.1:9")
    assert outage(fleet) is None
