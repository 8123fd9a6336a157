"""Instances from DNS, asked over UDP from a stub name server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import dns.rcode
import pytest

from proxy.discovery.dns import DnsInstances, DnsRecord, remembered
from proxy.discovery.source import DiscoveryError
from proxy.settings import DiscoverySettings, SettingsError
from tests.proxy.discovery.stub_dns import StubDns, stub_dns


@pytest.fixture
async def server() -> AsyncIterator[StubDns]:
    async with stub_dns() as running:
        yield running


def source(server: StubDns, engine: dict[str, Any] | None = None, timeout_s: float = 5, **dns: Any) -> DnsInstances:
    settings = {
        "source": "dns",
        "interval_s": 0.01,
        "timeout_s": timeout_s,
        "engine": {"port": 8000, **(engine or {})},
        "dns": {"name": "engines.test.", "servers": [server.address], "absent_s": 0, **dns},
    }
    return DnsInstances(DiscoverySettings.model_validate(settings))


async def urls(found: DnsInstances) -> list[str]:
    async with aclosing(found.sets()) as sets:
        return [each.url for each in (await anext(sets)).instances]


async def test_each_address_of_a_headless_service_is_an_engine(server: StubDns) -> None:
    found = source(server, {"events_port": 5557, "events_replay_port": 5558})
    server.records["engines.test.", "A"] = ["127.0.0.3", "127.0.0.2"]
    server.records["engines.test.", "AAAA"] = ["::1"]
    async with aclosing(found.sets()) as sets:
        first = (await anext(sets)).instances
        assert [each.url for each in first] == [
            "http://127.0.0.2:8000",
            "http://127.0.0.3:8000",
            "http://[::1]:8000",
        ]
        assert (first[0].events_url, first[2].events_replay_url) == ("tcp://127.0.0.2:5557", "tcp://[::1]:5558")
        server.records["engines.test.", "A"] = ["127.0.0.4"]
        server.records["engines.test.", "AAAA"] = []
        assert [each.url for each in (await anext(sets)).instances] == ["http://127.0.0.4:8000"]


async def test_srv_records_give_hosts_and_ports(server: StubDns) -> None:
    found = source(server, srv=True, name="_http._tcp.engines.test.")
    server.records["_http._tcp.engines.test.", "SRV"] = [
        "0 50 8001 engine-1.engines.test.",
        "0 50 8000 engine-0.engines.test.",
    ]
    assert await urls(found) == ["http://engine-0.engines.test:8000", "http://engine-1.engines.test:8001"]
    server.records["_http._tcp.engines.test.", "SRV"] = ["0 0 0 ."]
    assert await urls(found) == []


async def test_a_name_without_records_is_an_empty_set_and_a_failing_server_an_error(server: StubDns) -> None:
    found = source(server)
    assert await urls(found) == []
    server.records["engines.test.", "TXT"] = ["x"]
    assert await urls(found) == []
    server.rcode = dns.rcode.SERVFAIL
    with pytest.raises(DiscoveryError, match="cannot be looked up"):
        await urls(found)


@pytest.mark.parametrize("srv", [False, True])
async def test_an_error_has_the_name_once_with_its_origin(server: StubDns, srv: bool) -> None:
    found = source(server, srv=srv)
    server.rcode = dns.rcode.SERVFAIL
    with pytest.raises(DiscoveryError) as refused:
        await urls(found)
    text = f"{found.origin}: {refused.value}"
    assert text.count("engines.test.") == 1, text
    assert "answered SERVFAIL; check the name servers" in text


async def test_a_silent_server_is_an_error_after_the_bound(server: StubDns) -> None:
    server.silent = True
    with pytest.raises(DiscoveryError, match=r"discovery.timeout_s|cannot be looked up"):
        await urls(source(server, timeout_s=0.3))


def test_an_endpoint_is_gone_once_it_was_missing_for_long_enough() -> None:
    a, b = DnsRecord("127.0.0.2", None), DnsRecord("127.0.0.3", None)
    seen = remembered({}, [a, b], 0.0, 10.0)
    seen = remembered(seen, [a], 9.0, 10.0)
    assert set(seen) == {a, b}
    assert set(remembered(seen, [a], 10.0, 10.0)) == {a}
    assert set(remembered({a: 0.0}, [b], 0.0, 0.0)) == {b}


def test_an_address_that_no_engine_has_is_left_out_with_the_reason(server: StubDns) -> None:
    from proxy.discovery.template import instance_at

    with pytest.raises(ValueError, match="link-local"):
        instance_at(source(server)._settings.engine, "169.254.169.254", None)


@pytest.mark.parametrize("wrong", ["name.server", "127.0.0.1:x", "[::1"])
def test_a_name_server_is_given_by_address(wrong: str) -> None:
    settings = {"source": "dns", "dns": {"name": "x", "servers": [wrong]}, "engine": {"port": 1}}
    with pytest.raises(SettingsError, match=r"discovery\.dns\.servers"):
        DnsInstances(DiscoverySettings.model_validate(settings))


def test_name_servers_may_have_ports() -> None:
    given = ("127.0.0.1", "127.0.0.1:5353", "::1", "[::1]:5353")
    settings = {"source": "dns", "dns": {"name": "x", "servers": given}, "engine": {"port": 1}}
    servers = DnsInstances(DiscoverySettings.model_validate(settings))._resolver.nameservers
    assert [(each.address, each.port) for each in servers] == [  # type: ignore[union-attr]
        ("127.0.0.1", 53),
        ("127.0.0.1", 5353),
        ("::1", 53),
        ("::1", 5353),
    ]
