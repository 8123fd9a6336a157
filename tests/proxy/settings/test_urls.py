"""Rejected engine addresses: in every notation, and by resolved names for instances added at run time."""

from __future__ import annotations

import socket
from ipaddress import ip_network

import pytest

from proxy import resolver
from proxy.settings import AdminSettings, SettingsError, load_settings
from proxy.settings.urls import EngineUrlError, ListenAddress, admit, checked_endpoint, checked_url, is_loopback

LOCAL = AdminSettings().allowed_networks


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("https://Engine-1.Example.COM/", "https://engine-1.example.com"),
        ("http://engine_1:8000", "http://engine_1:8000"),
        ("http://10.1.2.3:8000/engine-1/", "http://10.1.2.3:8000/engine-1"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://[0:0:0:0:0:0:0:1]:8000", "http://[::1]:8000"),
        ("http://2130706433:8000", "http://127.0.0.1:8000"),
        ("http://0x7f.1:8000", "http://127.0.0.1:8000"),
        ("http://0177.0.0.01:8000", "http://127.0.0.1:8000"),
        ("http://127.1", "http://127.0.0.1"),
        ("http://a.:80", "http://a:80"),
    ],
)
def test_a_good_url_has_one_spelling(given: str, kept: str) -> None:
    assert checked_url(given) == kept


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("127.0.0.1:8000", "http://"),
        ("ftp://127.0.0.1", "http://"),
        ("file:///etc/passwd", "http://"),
        ("gopher://127.0.0.1:70", "http://"),
        ("http://", "http://"),
        ("http:///v1", "http://"),
        ("http://user@127.0.0.1", "user or password"),
        ("http://user:secret@127.0.0.1", "user or password"),
        ("http://127.0.0.1@169.254.169.254", "user or password"),
        ("http://user:secret@[bad", "user or password"),
        ("http://127.0.0.1:8000?x=1", "query"),
        ("http://127.0.0.1:8000?", "query"),
        ("http://127.0.0.1:8000#f", "query"),
        ("http://127.0.0.1:8000/a/../b", "plain prefix"),
        ("http://127.0.0.1:8000//b", "plain prefix"),
        ("http://127.0.0.1:8000/%2e%2e", "plain prefix"),
        ("http://127.0.0.1:8000/a;b", "plain prefix"),
        ("http://127.0.0.1:0", "port"),
        ("http://127.0.0.1:", "port"),
        ("http://127.0.0.1:65536", "ort"),
        ("http://127.0.0.1:8x", "ort"),
        ("http://127.0.0.1 :80", "spaces"),
        ("http://127.0.0.1\r\nx-evil: 1", "control"),
        ("http://127.0.0.1\t:80", "control"),
        ("http://169.254.169.254\\.example", "backslash"),
        ("http://127。0。0。1", "non-ASCII"),
        ("http://①27.0.0.1", "non-ASCII"),
        ("http://%31%36%39.254.169.254", "IPv4"),
        ("http://%6d.example", "host name"),
        ("http://-a.example", "host name"),
        ("http://a..b", "host name"),
        ("http://1.2.3.4.5", "IPv4"),
        ("http://256.1.1.1", "IPv4"),
        ("http://example.0x7f", "IPv4"),
        ("http://[::1", ""),
        ("http://[fe80::1%25eth0]", ""),
    ],
)
def test_a_url_that_could_be_read_in_two_ways_is_refused(url: str, says: str) -> None:
    with pytest.raises(EngineUrlError) as caught:
        checked_url(url)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


NOBODYS = [
    "169.254.169.254",
    "169.254.0.1",
    "2852039166",  # 169.254.169.254 as one number
    "0xa9fea9fe",
    "0251.0376.0251.0376",
    "0xa9.254.0251.0xfe",
    "169.254.43518",
    "169.254.169.254.",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "metadata.google.internal",
    "METADATA.google.internal.",
    "0.0.0.0",
    "0",
    "0x0",
    "0.1.2.3",
    "224.0.0.1",
    "239.255.255.250",
    "255.255.255.255",
    "[fe80::1]",
    "[febf::1]",
    "[fd00:ec2::254]",
    "[fd00:0ec2:0:0:0:0:0:254]",
    "[fd20:ce::254]",
    "[::]",
    "[ff02::1]",
    "[::ffff:169.254.169.254]",
    "[::ffff:a9fe:a9fe]",
    "[64:ff9b::169.254.169.254]",
    "[2002:a9fe:a9fe::]",
    "[::ffff:0.0.0.0]",
]


@pytest.mark.parametrize("host", NOBODYS)
def test_no_engine_has_such_an_address(host: str) -> None:
    for url in (f"http://{host}", f"https://{host}:8000/prefix"):
        with pytest.raises(EngineUrlError):
            checked_url(url)
    with pytest.raises(EngineUrlError):
        checked_endpoint(f"tcp://{host}:5557")
    with pytest.raises(SettingsError, match=r"instances\.0\.url"):
        load_settings(None, instances=[{"url": f"http://{host}"}])


@pytest.mark.parametrize("key", ["bootstrap_url", "events_url", "events_replay_url"])
def test_every_address_of_an_instance_is_looked_at(key: str) -> None:
    scheme = "http" if key == "bootstrap_url" else "tcp"
    instance = {"url": "http://127.0.0.1:8000", "events_url": "tcp://127.0.0.1:5557"}
    with pytest.raises(SettingsError, match=key):
        load_settings(None, instances=[{**instance, key: f"{scheme}://169.254.169.254:80"}])


@pytest.mark.parametrize(
    ("endpoint", "kept"),
    [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("tcp://[::1]:5557", "tcp://[::1]:5557"),
        ("tcp://Engine:5557", "tcp://engine:5557"),
        ("ipc:///tmp/kv", "ipc:///tmp/kv"),
    ],
)
def test_good_endpoints(endpoint: str, kept: str) -> None:
    assert checked_endpoint(endpoint) == kept


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://*:5557", "tcp://127.0.0.1", "tcp://:5557", "tcp://a:0", "tcp://a:70000", "udp://a:1", "tcp://u@a:1",
     "tcp://a/b:1", "pgm://a:1", "inproc://x", "ipc://", "tcp://eth0;127.0.0.1:5557", "tcp://a b:1"],
)  # fmt: skip
def test_bad_endpoints(endpoint: str) -> None:
    with pytest.raises(EngineUrlError):
        checked_endpoint(endpoint)


def names(monkeypatch: pytest.MonkeyPatch, **known: list[str]) -> None:
    """Names that resolve on this machine during the test; the resolver is the one part that cannot be real here."""

    def look_up(host: str) -> tuple[str, ...]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return tuple(known[host])

    monkeypatch.setattr(resolver, "look_up", look_up)


async def test_a_name_becomes_the_address_it_was_checked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, engine=["fd12::7", "10.0.0.7"], six=["fd12::7"])
    assert await admit("http://engine:8000/one", LOCAL) == "http://10.0.0.7:8000/one"
    assert await admit("tcp://engine:5557", LOCAL) == "tcp://10.0.0.7:5557"
    assert await admit("http://six:8000", LOCAL) == "http://[fd12::7]:8000"
    # The certificate is for the name.
    assert await admit("https://engine:8000", LOCAL) == "https://engine:8000"


@pytest.mark.parametrize(
    ("addresses", "says"),
    [
        (["8.8.8.8"], "allowed_networks"),
        (["10.0.0.7", "8.8.8.8"], "allowed_networks"),
        (["169.254.169.254"], "metadata"),
        (["10.0.0.7", "169.254.169.254"], "metadata"),
        (["::ffff:169.254.169.254"], "metadata"),
        (["::ffff:8.8.8.8"], "allowed_networks"),
        (["0.0.0.0"], "engine binds"),
        (["2001:db8::1"], "allowed_networks"),
    ],
)
async def test_every_address_a_name_stands_for_must_be_allowed(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], says: str
) -> None:
    names(monkeypatch, engine=addresses)
    for url in ("http://engine:8000", "https://engine", "tcp://engine:5557"):
        with pytest.raises(EngineUrlError, match=says):
            await admit(url, LOCAL)


async def test_unresolvable_names_and_local_files_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch)
    with pytest.raises(EngineUrlError, match="cannot be resolved"):
        await admit("http://nobody:8000", LOCAL)
    with pytest.raises(EngineUrlError, match="settings file only"):
        await admit("ipc:///var/run/docker.sock", LOCAL)


async def test_allowed_networks_are_what_is_allowed() -> None:
    only = (ip_network("10.1.0.0/16"),)
    assert await admit("http://10.1.2.3:8000", only) == "http://10.1.2.3:8000"
    for other in ("http://127.0.0.1:8000", "http://10.2.0.1:8000", "http://[::1]:8000"):
        with pytest.raises(EngineUrlError, match=r"10\.1\.0\.0/16"):
            await admit(other, only)
    everything = (ip_network("0.0.0.0/0"), ip_network("::/0"))
    with pytest.raises(EngineUrlError, match="metadata"):
        await admit("http://169.254.169.254", everything)
    assert await admit("http://1.1.1.1", everything) == "http://1.1.1.1"


@pytest.mark.parametrize(
    ("url", "bound", "itself"),
    [
        ("http://127.0.0.1:9090", "127.0.0.1", True),
        ("http://2130706433:9090", "127.0.0.1", True),
        ("http://localhost:9090", "127.0.0.1", True),
        ("http://127.0.0.1:9090", "0.0.0.0", True),
        ("http://127.0.0.1:9090", "localhost", True),
        ("tcp://127.0.0.1:9090", "127.0.0.1", True),
        ("http://10.9.9.9:9090", "10.9.9.9", True),
        ("http://127.0.0.1:9091", "127.0.0.1", False),
        ("http://10.9.9.8:9090", "10.9.9.9", False),
        ("http://10.9.9.9:9090", "0.0.0.0", False),
    ],
)
async def test_the_proxy_is_no_engine_of_its_own(url: str, bound: str, itself: bool) -> None:
    own = [ListenAddress(bound, 9090)]
    if itself:
        with pytest.raises(EngineUrlError, match="the proxy itself"):
            await admit(url, LOCAL, own)
    else:
        assert await admit(url, LOCAL, own) == url


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("localhost", True), ("::1", True), ("[::1]", True),
     ("::ffff:127.0.0.1", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("", False),
     ("localhost.example.com", False), ("127.0.0.1.example.com", False), ("example.com", False)],
)  # fmt: skip
def test_what_counts_as_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) is local
