"""Instances from DNS: one address, or one SRV record, for each engine.

An answer without records means that there are no engines; a name server that fails or does not answer is an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING, NamedTuple

from proxy.discovery.source import DiscoveryError, Wanted, distinct, polled
from proxy.discovery.template import instance_at
from proxy.settings import DiscoverySettings, SettingsError

if TYPE_CHECKING:
    import dns.asyncresolver

_NAME_SERVER_S = 2.0
"""Time after which the next name server is asked."""


class DnsRecord(NamedTuple):
    """One record: an address or, for SRV, a host name; port None: the template's."""

    address: str
    port: int | None


class DnsInstances:
    """The instances that a name has records for."""

    def __init__(self, settings: DiscoverySettings) -> None:
        assert settings.dns.name is not None
        self._settings = settings
        self._name = settings.dns.name
        self._resolver = _resolver(settings)
        self._seen: dict[DnsRecord, float] = {}

    @property
    def origin(self) -> str:
        """The name."""
        return f"DNS {'SRV ' if self._settings.dns.srv else ''}{self._name}"

    def sets(self) -> AsyncGenerator[Wanted, None]:
        """Look the name up every ``interval_s`` seconds. Raises DiscoveryError: no name server answers."""
        return polled(self._read, self._settings.interval_s, self._settings.timeout_s)

    async def _read(self) -> Wanted:
        if self._settings.dns.srv:
            found = await self._records("SRV")
        else:
            both = await asyncio.gather(self._records("A"), self._records("AAAA"))
            found = [endpoint for records in both for endpoint in records]
        self._seen = remembered(self._seen, found, time.monotonic(), self._settings.dns.absent_s)
        instances, problems = [], []
        for endpoint in sorted(self._seen, key=lambda each: (each.address, each.port or 0)):
            try:
                instances.append(instance_at(self._settings.engine, endpoint.address, endpoint.port))
            except ValueError as error:
                problems.append(f"{endpoint.address}: {error}")
        return distinct(instances, problems)

    async def _records(self, kind: str) -> list[DnsRecord]:
        import dns.exception
        import dns.resolver

        try:
            answer = await self._resolver.resolve(
                self._name, kind, raise_on_no_answer=False, lifetime=self._settings.timeout_s, search=True
            )
        except dns.resolver.NXDOMAIN:
            return []
        except (dns.exception.DNSException, OSError) as error:
            # Without the query: readers put the origin first, which has the name.
            reason = str(error).rpartition(f" IN {kind}: ")[2]
            raise DiscoveryError(
                f"{kind} records cannot be looked up: {reason}; check the name servers, discovery.dns.servers or this "
                "machine's"
            ) from error
        if kind == "SRV":
            # A lone dot is a service that its domain does not offer (RFC 2782).
            targets = [(record.target.to_text(omit_final_dot=True), record.port) for record in answer]
            return [DnsRecord(target, port) for target, port in targets if target not in {"", "."}]
        return [DnsRecord(record.address, None) for record in answer]


def remembered(
    seen: dict[DnsRecord, float], found: Iterable[DnsRecord], now_s: float, absent_s: float
) -> dict[DnsRecord, float]:
    """Endpoints with the times at which they were last found; those not found for ``absent_s`` seconds are gone."""
    kept = {endpoint: last_s for endpoint, last_s in seen.items() if now_s - last_s < absent_s}
    return {**kept, **dict.fromkeys(found, now_s)}


def _resolver(settings: DiscoverySettings) -> dns.asyncresolver.Resolver:
    """Raises SettingsError: dnspython is missing, a server is no address, or this machine has no name server."""
    try:
        import dns.asyncresolver
        import dns.nameserver
        import dns.resolver
    except ImportError as error:
        raise SettingsError("discovery.source dns needs the extra dns: pip install 'warmroute[dns]'") from error
    try:
        resolver = dns.asyncresolver.Resolver(configure=not settings.dns.servers)
        if settings.dns.servers:
            resolver.nameservers = [dns.nameserver.Do53Nameserver(*_server(each)) for each in settings.dns.servers]
    except (dns.resolver.NoResolverConfiguration, ValueError) as error:
        raise SettingsError(f"discovery.dns.servers: {error}") from error
    resolver.timeout = min(_NAME_SERVER_S, settings.timeout_s)
    resolver.cache = None
    return resolver


def _server(text: str) -> tuple[str, int]:
    """Address and port of ``ADDRESS``, ``ADDRESS:PORT`` or ``[ADDRESS]:PORT``."""
    import ipaddress

    host, found, port = text.rpartition(":")
    if found and port.isdigit() and (":" not in host or host.startswith("[")):
        address = host.removeprefix("[").removesuffix("]")
    else:
        address, port = text.removeprefix("[").removesuffix("]"), "53"
    ipaddress.ip_address(address)  # raises ValueError
    return address, int(port)
