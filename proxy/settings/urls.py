"""Validation of engine addresses: unambiguous spelling, no cloud metadata, no disallowed networks.

``checked_url`` and ``checked_endpoint`` check the text alone and apply to every instance, including those of a file.
``admit`` is for instances added at run time: names are resolved, and the result is the address to connect to.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import psutil

from proxy.resolver import Resolver

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address

# Instance metadata outside of the link-local ranges: AWS and GCP over IPv6, Azure, Alibaba and Oracle.
_METADATA = frozenset(
    ipaddress.ip_address(address)
    for address in ("fd00:ec2::254", "fd20:ce::254", "168.63.129.16", "100.100.100.200", "192.0.0.192")
)
_METADATA_NAMES = frozenset({"metadata", "metadata.google.internal", "metadata.goog", "instance-data"})
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

_PRINTABLE = re.compile(r"[\x21-\x7e]+")
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")
_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+")
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_RESOLVE_TIMEOUT_S = 5.0


class EngineUrlError(ValueError):
    """An address the proxy will not call; the message gives the reason and the remedy."""


class ListenAddress(NamedTuple):
    """An address the proxy itself listens on."""

    host: str
    port: int


def checked_url(value: str) -> str:
    """An engine's base URL in canonical form: lower case, usual address notation, no trailing slash.

    Raises:
        EngineUrlError: not http(s), or with credentials, a query, a fragment, a bad port or path, or an address that no
            engine has (link-local, metadata, unspecified, multicast).
    """
    parts, host, port = _split(value)
    if parts.query or parts.fragment or value.endswith(("?", "#")):
        raise EngineUrlError(f"{value!r} has a query or a fragment: give the base URL only")
    path = parts.path.rstrip("/")
    if not _PREFIX.fullmatch(path) or any(segment in {".", ".."} for segment in path.split("/")):
        raise EngineUrlError(f"{value!r}: the path may be a plain prefix such as /engine-1 only")
    return f"{parts.scheme}://{_authority(host, port)}{path}"


def checked_endpoint(value: str) -> str:
    """A ZMQ endpoint to connect to, in canonical form.

    Raises:
        EngineUrlError: neither ``tcp://HOST:PORT`` nor ``ipc://PATH``, or an address that no engine has.
    """
    scheme, _, rest = value.partition("://")
    if scheme not in {"tcp", "ipc"} or not rest or not _PRINTABLE.fullmatch(value):
        raise EngineUrlError(f"{value!r} is not a ZMQ endpoint: give tcp://HOST:PORT or ipc://PATH")
    if "*" in rest:
        raise EngineUrlError(f"{value!r} is an address to bind: give the host to connect to in place of '*'")
    if scheme == "ipc":
        return value
    host_text, _, port_text = rest.rpartition(":")
    if not port_text.isdigit() or not 0 < int(port_text) < 65536 or not host_text or "@" in rest or "/" in rest:
        raise EngineUrlError(f"{value!r} is not a ZMQ endpoint: give tcp://HOST:PORT or ipc://PATH")
    return f"tcp://{_authority(_host(host_text.removeprefix('[').removesuffix(']'), value), int(port_text))}"


async def admit(value: str, allowed: Sequence[Network], own: Collection[ListenAddress] = ()) -> str:
    """The URL or ZMQ endpoint to use for an instance that is added at run time.

    A name is resolved, every address of it must be allowed, and for http and tcp the first one replaces the name, so
    that later DNS changes have no effect. An https URL keeps its name, which the engine's certificate proves.

    Args:
        value: an http(s) URL or a tcp endpoint; an ipc path is rejected, since a caller must not name local files.
        allowed: networks the addresses must lie in (``admin.allowed_networks``).
        own: the proxy's own listen addresses, which are rejected.

    Raises:
        EngineUrlError: the address is rejected, or the name cannot be resolved.
    """
    if value.startswith("ipc://"):
        raise EngineUrlError("ipc endpoints are accepted from the settings file only: give tcp://HOST:PORT")
    value = checked_endpoint(value) if value.startswith("tcp://") else checked_url(value)
    parts = urlsplit(value)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    addresses = await _resolve(host)
    for address in addresses:
        shown = str(address) if str(address) == host else f"{host} ({address})"
        _refuse_special(address, shown)
        if not any(address in network for network in allowed):
            raise EngineUrlError(
                f"{shown} is outside of admin.allowed_networks ({', '.join(str(network) for network in allowed)})"
            )
        if any(port == listener.port and _reaches(address, listener.host) for listener in own):
            raise EngineUrlError(f"{shown} port {port} is the proxy itself: give the engine's address")
    if parts.scheme == "https":
        return value
    return f"{parts.scheme}://{_authority(addresses[0], parts.port)}{parts.path}"


def is_loopback(host: str) -> bool:
    """True if a listen address can be reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return _unwrapped(ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))).is_loopback
    except ValueError:
        return False


def _split(value: str) -> tuple[SplitResult, Address | str, int | None]:
    if "@" in value:  # the message omits the value: it may hold a password
        raise EngineUrlError("an engine's URL has no user or password: give the engine's key as api_key_env")
    # urlsplit silently drops tabs and line ends, and some parsers treat a backslash as a slash.
    if not _PRINTABLE.fullmatch(value) or "\\" in value:
        raise EngineUrlError(
            f"{value!r}: a URL has neither spaces, control characters, backslashes nor non-ASCII letters"
        )
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise EngineUrlError(f"{value!r}: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise EngineUrlError(f"{value!r} is not an http:// or https:// URL")
    if port == 0 or parts.netloc.endswith(":"):
        raise EngineUrlError(f"{value!r}: the port must be 1 to 65535")
    return parts, _host(parts.hostname or "", value), port


def _host(text: str, value: str) -> Address | str:
    """An address in any notation as an address object, a name in lower case. Raises EngineUrlError."""
    text = text.lower().removesuffix(".")
    if ":" in text:
        try:
            address: Address = ipaddress.IPv6Address(text)
        except ValueError as error:
            raise EngineUrlError(f"{value!r}: {text} is not an IPv6 address: {error}") from error
        if address.scope_id is not None:  # type: ignore[union-attr]
            raise EngineUrlError(f"{value!r}: scoped (link-local) addresses are refused")
    elif _NUMBER.fullmatch(text.rpartition(".")[2]):
        # 2130706433, 0177.1 and 0x7f.0.0.1 all connect to 127.0.0.1, so the checks must treat them as that.
        try:
            address = IPv4Address(socket.inet_aton(text))
        except OSError as error:
            raise EngineUrlError(f"{value!r}: {text} is not an IPv4 address") from error
    elif not _NAME.fullmatch(text):
        raise EngineUrlError(f"{value!r}: {text!r} is not a host name")
    elif text in _METADATA_NAMES:
        raise EngineUrlError(f"{value!r}: {text} is a cloud's metadata service, not an engine")
    else:
        return text
    _refuse_special(address, repr(value))
    return address


def _refuse_special(address: Address, shown: str) -> None:
    meant = _unwrapped(address)
    if meant.is_link_local or meant in _METADATA:
        raise EngineUrlError(f"{shown}: link-local and cloud metadata addresses are refused")
    if meant.is_unspecified or (isinstance(meant, IPv4Address) and meant in IPv4Network("0.0.0.0/8")):
        raise EngineUrlError(f"{shown}: give the address to connect to, not the one an engine binds")
    if meant.is_multicast or meant == IPv4Address("255.255.255.255"):
        raise EngineUrlError(f"{shown}: multicast and broadcast addresses are refused")


def _unwrapped(address: Address) -> Address:
    """The IPv4 address embedded in an IPv6 one (mapped, 6to4, NAT64), else the address itself."""
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return IPv4Address(address.packed[-4:])
        return address.ipv4_mapped or address.sixtofour or address
    return address


def _authority(host: Address | str, port: int | None) -> str:
    text = f"[{host}]" if isinstance(host, IPv6Address) else str(host)
    return text if port is None else f"{text}:{port}"


def host_and_port(host: str, port: int) -> str:
    """A place as URLs have it: IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _resolve(host: str) -> list[Address]:
    try:
        return [_unwrapped(ipaddress.ip_address(host))]
    except ValueError:
        pass
    try:
        async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
            found = await Resolver().addresses(host)
    except (OSError, TimeoutError) as error:
        raise EngineUrlError(f"{host} cannot be resolved: {error or 'no answer in time'}") from error
    # Again IPv4 first, since IPv6 may embed an IPv4 address.
    addresses = dict.fromkeys(_unwrapped(ipaddress.ip_address(address)) for address in found)
    return sorted(addresses, key=lambda address: address.version)


def _reaches(address: Address, bound: str) -> bool:
    """True if connecting to ``address`` may reach a listener on ``bound``."""
    if bound in {"", "0.0.0.0", "::", "*"}:
        return address.is_loopback or address in _own_addresses()
    if is_loopback(bound):
        return address.is_loopback
    try:
        return address == _unwrapped(ipaddress.ip_address(bound))
    except ValueError:
        return address in _own_addresses()


def _own_addresses() -> set[Address]:
    texts = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    own: set[Address] = set()
    for text in texts:
        try:
            own.add(_unwrapped(ipaddress.ip_address(text.partition("%")[0])))
        except ValueError:
            continue  # a link-layer address
    return own
