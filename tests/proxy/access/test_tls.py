"""TLS on the listeners: real handshakes with generated certificates."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from aiohttp import web

from proxy.clients.certificate_end import chain_end_unix_s
from proxy.engines.upstream import UpstreamError
from proxy.settings import SettingsError, TlsSettings, load_settings
from tests.proxy.conftest import Running, StartProxy
from tests.proxy.stub_engine import StubEngine

BODY = {"model": "stub", "prompt": list(range(300)), "max_tokens": 4}


@dataclass
class Certificates:
    """Files of one authority: the server's certificate and key, and the authority's own certificate."""

    authority: trustme.CA
    certificate: Path
    key: Path
    ca: Path

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca))


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    made = Certificates(authority, tmp_path / "server.pem", tmp_path / "server.key", tmp_path / "ca.pem")
    issued.private_key_pem.write_to_path(made.key)
    for number, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(made.certificate, append=number > 0)
    authority.cert_pem.write_to_path(made.ca)
    return made


def tls(certificates: Certificates, **more: Any) -> dict[str, Any]:
    return {"certificate": certificates.certificate, "key": certificates.key, **more}


def secure(proxy: Running, context: ssl.SSLContext, port: int | None = None) -> httpx.AsyncClient:
    port = port or int(proxy.url.rsplit(":", 1)[1])
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=context, trust_env=False, timeout=20)


async def test_requests_and_streams_over_tls(start_proxy: StartProxy, certificates: Certificates) -> None:
    engine = StubEngine(tokens=50, padding_bytes=4000, token_delay_s=0.001)
    proxy = await start_proxy(engines=[engine], tls=tls(certificates))
    expected = b"".join(engine.event(number) for number in range(50)) + b"data: [DONE]\n\n"
    async with secure(proxy, certificates.trusting()) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        pieces = 0
        got = b""
        async with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for piece in answer.aiter_raw():
                pieces += 1
                got += piece
        assert got == expected
        assert pieces > 1
        large = {**BODY, "prompt": "x" * 2_000_000}
        assert (await client.post("/v1/completions", json=large)).status_code == 200
        assert engine.seen[-1]["prompt"] == large["prompt"]
        # A client that leaves is detected through TLS as well.
        engine.mode = "hang"
        leaving = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await proxy.until(lambda: engine.running == 1)
        leaving.cancel()
        await proxy.until(lambda: engine.aborted == 1)


async def test_plain_http_and_unknown_authorities_get_nowhere(
    start_proxy: StartProxy, certificates: Certificates
) -> None:
    proxy = await start_proxy(1, tls=tls(certificates))
    with pytest.raises(httpx.TransportError):
        await proxy.client.get("/health")
    with pytest.raises(httpx.TransportError):
        await proxy.client.post("/v1/completions", json=BODY)
    async with secure(proxy, ssl.create_default_context()) as client:
        with pytest.raises(httpx.ConnectError, match="certificate"):
            await client.get("/health")
    assert proxy.engines[0].seen == []
    # None of these affects well-behaved clients.
    async with secure(proxy, certificates.trusting()) as client:
        assert (await client.get("/ready")).status_code == 200


async def test_a_refused_handshake_is_logged_with_its_peer_and_counted(
    start_proxy: StartProxy, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await start_proxy(1, tls=tls(certificates, client_ca=certificates.ca), admin={"port": 0})
    assert proxy.core.admin_port is not None
    bounds = proxy.core.clients
    counted: dict[str, int] = {}

    async def refused(code: str, text: str, scheme: str, trust: ssl.SSLContext) -> None:
        for port in (int(proxy.url.rsplit(":", 1)[1]), proxy.core.admin_port):
            caplog.clear()
            bounds.refusals._logged_s = float("-inf")  # as if the interval were over
            # Like curl, and unlike asyncio, it sends its alerts.
            with httpx.Client(verify=trust, trust_env=False, timeout=20) as client, pytest.raises(httpx.TransportError):
                await asyncio.to_thread(client.get, f"{scheme}://127.0.0.1:{port}/health")
            counted[code] = counted.get(code, 0) + 1
            await proxy.until(lambda: bounds.turned_away == counted)
            [line] = [each.getMessage() for each in caplog.records if each.name == "warmroute.clients"]
            assert line.startswith("refused the TLS handshake of 127.0.0.1: ")
            assert text in line

    expired, stranger, distrustful = certificates.trusting(), certificates.trusting(), ssl.create_default_context()
    yesterday = datetime.now(UTC) - timedelta(days=1)
    certificates.authority.issue_cert("agent", not_after=yesterday).configure_cert(expired)
    trustme.CA().issue_cert("agent").configure_cert(stranger)
    await refused("tls_plain_http", "use https://", "http", certificates.trusting())
    await refused("tls_no_client_certificate", "tls.client_ca", "https", certificates.trusting())
    await refused("tls_client_certificate", "certificate has expired", "https", expired)
    bounds.turned_away.clear()
    counted.clear()
    await refused("tls_client_certificate", "certificate is not accepted", "https", stranger)
    await refused("tls_refused_by_client", "unknown ca", "https", distrustful)
    # A check that only opens the port is no refusal.
    _, writer = await asyncio.open_connection("127.0.0.1", proxy.core.admin_port)
    writer.close()
    certificates.authority.issue_cert("agent").configure_cert(trusted := certificates.trusting())
    async with secure(proxy, trusted, proxy.core.admin_port) as client:
        metrics = (await client.get("/metrics")).text
    assert 'warmroute_client_errors_total{code="tls_refused_by_client"} 2.0' in metrics
    assert bounds.turned_away == counted


async def test_old_versions_of_tls_are_not_spoken(start_proxy: StartProxy, certificates: Certificates) -> None:
    proxy = await start_proxy(1, tls=tls(certificates, min_version="1.3"))
    old, new = certificates.trusting(), certificates.trusting()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with secure(proxy, old) as client:
        with pytest.raises(httpx.TransportError):
            await client.get("/health")
    async with secure(proxy, new) as client:
        assert (await client.get("/health")).status_code == 200


async def test_with_a_client_ca_every_client_shows_a_certificate(
    start_proxy: StartProxy, certificates: Certificates
) -> None:
    proxy = await start_proxy(1, tls=tls(certificates, client_ca=certificates.ca))
    async with secure(proxy, certificates.trusting()) as nobody:
        with pytest.raises(httpx.TransportError):
            await nobody.get("/health")
    stranger, known = certificates.trusting(), certificates.trusting()
    trustme.CA().issue_cert("agent").configure_cert(stranger)
    certificates.authority.issue_cert("agent").configure_cert(known)
    async with secure(proxy, stranger) as client:
        with pytest.raises(httpx.TransportError):
            await client.get("/health")
    async with secure(proxy, known) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_the_admin_listener_uses_tls_too(start_proxy: StartProxy, certificates: Certificates) -> None:
    proxy = await start_proxy(1, tls=tls(certificates), admin={"port": 0})
    async with secure(proxy, certificates.trusting(), proxy.core.admin_port) as admin:
        assert (await admin.get("/instances")).status_code == 200
    async with httpx.AsyncClient(trust_env=False) as plain:
        with pytest.raises(httpx.TransportError):
            await plain.get(f"http://127.0.0.1:{proxy.core.admin_port}/instances")


async def test_a_renewed_certificate_serves_new_connections(
    start_proxy: StartProxy, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a reload and by the regular look; the connections that are open go on."""
    monkeypatch.setattr("proxy.clients.certificate.LOOK_S", 0.02)
    proxy = await start_proxy(1, tls=tls(certificates), admin={"port": 0})
    ports = (int(proxy.url.rsplit(":", 1)[1]), proxy.core.admin_port)
    assert {await shown(certificates, port) for port in ports} == {on_disk(certificates)}
    async with secure(proxy, certificates.trusting()) as client:
        assert (await client.get("/health")).status_code == 200
        renew(certificates)
        await until_shown(certificates, ports)
        assert (await client.get("/health")).status_code == 200


async def test_a_reload_takes_a_renewed_certificate_at_once(
    start_proxy: StartProxy, certificates: Certificates
) -> None:
    proxy = await start_proxy(1, tls=tls(certificates))
    port = int(proxy.url.rsplit(":", 1)[1])
    proxy.operations.reloader.load = lambda: proxy.core.settings
    before = on_disk(certificates)
    renew(certificates)
    await proxy.operations.reloader.reload(dry_run=True)
    assert await shown(certificates, port) == before
    await proxy.operations.reloader.reload()
    assert await shown(certificates, port) == on_disk(certificates) != before


async def test_a_certificate_without_its_key_yet_changes_nothing(
    start_proxy: StartProxy, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await start_proxy(1, tls=tls(certificates))
    port, before = int(proxy.url.rsplit(":", 1)[1]), on_disk(certificates)
    key = renew(certificates, with_key=False)
    for _ in range(3):
        proxy.core.certificate.look()
    assert await shown(certificates, port) == before
    [warning] = [each.getMessage() for each in caplog.records if each.name == "warmroute.tls"]
    assert warning.startswith("TLS continues with the certificate that was read before: tls.certificate ")
    certificates.key.unlink()
    proxy.core.certificate.look()
    assert await shown(certificates, port) == before
    certificates.key.write_bytes(key)
    proxy.core.certificate.look()
    assert await shown(certificates, port) == on_disk(certificates) != before


@pytest.mark.parametrize(
    ("days", "text"),
    [
        (-1.5, "has expired: clients refuse it"),
        (5.5, "expires in 5 day(s)"),
        (13.5, "expires in 13 day(s)"),
        (20, None),
    ],
)
async def test_the_end_of_a_certificate_is_warned_of_and_measured(
    start_proxy: StartProxy,
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
    days: float,
    text: str | None,
) -> None:
    end = (datetime.now(UTC) + timedelta(days=days)).replace(microsecond=0)
    renew(certificates, not_after=end)
    proxy = await start_proxy(1, tls=tls(certificates))

    def warnings() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.levelname == "WARNING" and "TLS: " in each.msg]

    proxy.core.certificate.look()  # the second one: the day has been warned of
    expected = f"TLS: the certificate in {certificates.certificate} {text} ({end.isoformat()}); renew it in its file"
    assert warnings() == [expected] * (text is not None)
    metric = "warmroute_tls_certificate_not_after_timestamp_seconds"
    registry = proxy.core.metrics.registry
    assert registry.get_sample_value(metric) == end.timestamp()
    # A renewed one that ends soon as well is warned of when it is read.
    later = end + timedelta(seconds=2)
    renew(certificates, not_after=later)
    proxy.core.certificate.look()
    assert registry.get_sample_value(metric) == later.timestamp()
    assert len(warnings()) == 2 * (text is not None)
    renew(certificates)
    proxy.core.certificate.look()
    ends = registry.get_sample_value(metric)
    assert ends is not None
    assert ends > later.timestamp()
    assert len(warnings()) == 2 * (text is not None)


def test_the_earliest_end_of_a_chain_counts(tmp_path: Path) -> None:
    chain, ends = tmp_path / "chain.pem", [datetime(year, 3, 1, tzinfo=UTC) for year in (2040, 2031, 2055)]
    for end in ends:
        trustme.CA().issue_cert("a.test", not_after=end).cert_chain_pems[0].write_to_path(chain, append=True)
    assert chain_end_unix_s(chain) == ends[1].timestamp()
    chain.write_text("-----BEGIN CERTIFICATE-----\nMAMCAQU=\n-----END CERTIFICATE-----\n")
    assert chain_end_unix_s(chain) is None
    assert chain_end_unix_s(tmp_path / "none.pem") is None


async def test_files_that_become_readable_later_are_taken(
    start_proxy: StartProxy, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `chown`, which changes neither content nor time."""
    proxy = await start_proxy(1, tls=tls(certificates))
    port = int(proxy.url.rsplit(":", 1)[1])
    renew(certificates)

    def denied(_: TlsSettings) -> ssl.SSLContext:
        raise ValueError("Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(TlsSettings, "context", denied)
        proxy.core.certificate.look()
        assert await shown(certificates, port) != on_disk(certificates)
    proxy.core.certificate.look()
    assert await shown(certificates, port) == on_disk(certificates)


async def test_an_authority_that_is_added_is_accepted(start_proxy: StartProxy, certificates: Certificates) -> None:
    proxy = await start_proxy(1, tls=tls(certificates, client_ca=certificates.ca))
    newcomer, authority = certificates.trusting(), trustme.CA()
    authority.issue_cert("agent").configure_cert(newcomer)
    async with secure(proxy, newcomer) as client:
        with pytest.raises(httpx.TransportError):
            await client.get("/health")
    authority.cert_pem.write_to_path(certificates.ca, append=True)
    proxy.core.certificate.look()
    async with secure(proxy, newcomer) as client:
        assert (await client.get("/health")).status_code == 200


async def test_handshakes_that_stall_are_ended(start_proxy: StartProxy, certificates: Certificates) -> None:
    """A client that connects and says nothing, and one that sends a byte of the handshake now and then."""
    proxy = await start_proxy(1, tls=tls(certificates, handshake_s=0.5), admin={"port": 0})
    assert proxy.core.admin_port is not None
    for port in (int(proxy.url.rsplit(":", 1)[1]), proxy.core.admin_port):
        for byte_now_and_then in (False, True):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                ending = asyncio.create_task(reader.read())
                for byte in client_hello(certificates.trusting()) * byte_now_and_then:
                    if ending.done():
                        break
                    writer.write(bytes((byte,)))
                    await asyncio.sleep(0.05)
                with contextlib.suppress(ConnectionResetError):
                    await asyncio.wait_for(ending, 20)
            finally:
                writer.close()
    await proxy.until(lambda: proxy.core.clients.turned_away == {"tls_timeout": 4})
    async with secure(proxy, certificates.trusting()) as client, asyncio.timeout(30):
        while True:
            # On a slow machine this handshake may last too long as well.
            with contextlib.suppress(httpx.TransportError):
                assert (await client.get("/health")).status_code == 200
                break


def client_hello(context: ssl.SSLContext) -> bytes:
    """The first bytes of a handshake."""
    written = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), written, server_hostname="127.0.0.1").do_handshake()
    return written.read()


@pytest.mark.parametrize("start", [b"", b"POST /v1/completions HTTP/1.1\r\nx-a: "], ids=["nothing", "part of a head"])
async def test_a_client_that_is_slow_after_the_handshake_is_ended(
    start_proxy: StartProxy, certificates: Certificates, start: bytes
) -> None:
    proxy = await start_proxy(1, tls=tls(certificates), timeouts={"header_s": 0.5})
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(proxy.url.rsplit(":", 1)[1]), ssl=certificates.trusting(), server_hostname="127.0.0.1"
    )
    try:
        ending = asyncio.create_task(reader.read())
        writer.write(start)
        while start and not ending.done():
            writer.write(b"a")
            await asyncio.sleep(0.05)
        answer = await asyncio.wait_for(ending, 20)
    finally:
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408" if start else b"")
    assert bool(answer) is bool(start)
    await proxy.until(lambda: proxy.core.clients.open == 0)


class SecureEngine(StubEngine):
    """A scripted engine with TLS."""

    tls: ssl.SSLContext

    async def _listen(self) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.tls)
        await self._site.start()
        assert self._site._server is not None
        self.port = self._site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"


def secure_engine(authority: trustme.CA) -> SecureEngine:
    engine = SecureEngine()
    engine.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(engine.tls)
    return engine


async def test_engines_over_tls_are_those_the_systems_authorities_vouch_for(
    start_proxy: StartProxy, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    engines = [secure_engine(certificates.authority), secure_engine(trustme.CA())]
    proxy = await start_proxy(engines=list(engines), role="kv_both")
    assert proxy.core.instances.healthy() == {"inst-0"}
    for stream in (False, True):
        answer = await proxy.client.post("/v1/completions", json={**BODY, "stream": stream})
        assert (answer.status_code, answer.headers["x-warmroute-instance"]) == (200, "inst-0")
    # Requests are as strict as probes.
    with pytest.raises(UpstreamError, match="certificate"):
        await proxy.core.upstream.post(engines[1].url + "/v1/completions", b"{}", {})
    assert engines[1].seen == []


def test_unusable_files_are_named(certificates: Certificates, tmp_path: Path) -> None:
    other = trustme.CA().issue_cert("127.0.0.1")
    other_key, garbage = tmp_path / "other.key", tmp_path / "garbage.pem"
    other.private_key_pem.write_to_path(other_key)
    garbage.write_text("this is no certificate")
    for wrong, says in (
        ({"certificate": certificates.certificate}, "go together"),
        ({"key": certificates.key}, "go together"),
        ({"client_ca": certificates.ca}, "tls.client_ca"),
        (tls(certificates, key=tmp_path / "none.key"), "no file at"),
        (tls(certificates, key=other_key), "other.key"),
        (tls(certificates, certificate=garbage), "garbage.pem"),
        (tls(certificates, client_ca=garbage), "garbage.pem"),
        (tls(certificates, min_version="1.1"), "tls.min_version"),
    ):
        with pytest.raises(SettingsError) as caught:
            load_settings(None, instances=[{"url": "http://a"}], tls=wrong)
        assert says in str(caught.value)


def renew(certificates: Certificates, *, with_key: bool = True, not_after: datetime | None = None) -> bytes:
    """Write another certificate of the authority to the files, and its key, which is returned."""
    issued = certificates.authority.issue_cert("127.0.0.1", "localhost", not_after=not_after)
    key = issued.private_key_pem.bytes()
    if with_key:
        certificates.key.write_bytes(key)
    certificates.certificate.write_bytes(issued.cert_chain_pems[0].bytes())
    return key


def on_disk(certificates: Certificates) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificates.certificate.read_text())


async def shown(certificates: Certificates, port: int | None) -> bytes:
    """The certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=certificates.trusting())
    try:
        found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return found
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def until_shown(certificates: Certificates, ports: tuple[int | None, ...]) -> None:
    """Wait until all ports show the certificate that is in the file."""
    for _ in range(1500):
        if {await shown(certificates, port) for port in ports} == {on_disk(certificates)}:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the certificate was not renewed in 30 s")
