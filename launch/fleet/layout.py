"""Layout of a fleet: its members, and the addresses and ports that its keys work out to."""

from __future__ import annotations

import ipaddress
from functools import cached_property

from launch.fleet.keys import FleetKeys
from launch.fleet.members import Member, expand
from policies.types import Role
from proxy.settings import AdminSettings, KeySettings, OffloadSettings, Settings, TlsSettings

ANY_HOST = "0.0.0.0"
_PROXY_END_S = 10.0
"""Time the proxy needs, after its grace period, to end cut requests and close its listeners."""


class FleetLayout(FleetKeys):
    """A fleet's instances with their names, URLs and ports."""

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """The instances the launcher starts."""
        return expand(self)

    @property
    def instances(self) -> int:
        """Number of instances the launcher starts."""
        return len(self.members)

    @property
    def has_bootstrap(self) -> bool:
        """True if any engine answers on a bootstrap port."""
        return any(member.bootstrap_port is not None for member in self.members)

    @property
    def reached_as(self) -> str:
        """Host part of the engines' URLs."""
        return self.advertise_host or self.host

    @property
    def request_model(self) -> str:
        """Model name to put into requests."""
        return self.served_model_name or self.model

    @property
    def proxy_port(self) -> int:
        """Port of the proxy."""
        port = self.proxy.get("port", Settings.model_fields["port"].default)
        return port if isinstance(port, int) else 0

    def name(self, index: int) -> str:
        """Name of instance ``index``."""
        return self.members[index].name

    def url(self, index: int) -> str:
        """Base URL of instance ``index``."""
        return f"http://{_bracketed(self.reached_as)}:{self.members[index].port}"

    def bootstrap_url(self, index: int) -> str | None:
        """Bootstrap URL of instance ``index``; None without a bootstrap server."""
        port = self.members[index].bootstrap_port
        return None if port is None else f"http://{_bracketed(self.reached_as)}:{port}"

    def events_url(self, index: int) -> str | None:
        """Address of the KV events of instance ``index``; None when it publishes none."""
        port = self.members[index].events_port
        return None if port is None else f"tcp://{_bracketed(self.reached_as)}:{port}"

    def events_replay_url(self, index: int) -> str | None:
        """Replay address of the KV events of instance ``index``; None when it has none."""
        port = self.members[index].replay_port
        return None if port is None else f"tcp://{_bracketed(self.reached_as)}:{port}"

    def proxy_url(self) -> str:
        """Base URL of the proxy."""
        return f"{self._scheme}://{_reachable(str(self.proxy.get('host', self.host)))}:{self.proxy_port}"

    @property
    def admin_port(self) -> int | None:
        """Port of the proxy's admin listener; None where the admin endpoints are on its main one.

        If the proxy listens beyond loopback and its settings do not mention the admin side, the admin listener is on
        loopback, one port up: beyond loopback the admin endpoints need keys.
        """
        admin = self.proxy.get("admin")
        if isinstance(admin, dict) and isinstance(admin.get("port"), int):
            return int(admin["port"])
        exposed = not is_loopback(str(self.proxy.get("host", self.host)))
        return self.proxy_port + 1 if exposed and not self.proxy.get("keys") else None

    def admin_url(self) -> str:
        """Base URL of the proxy's admin endpoints."""
        if self.admin_port is None:
            return self.proxy_url()
        return f"{self._scheme}://{_reachable(self._admin_host)}:{self.admin_port}"

    def proxy_tls(self) -> TlsSettings | None:
        """TLS of the proxy's listeners; None for plain HTTP."""
        tls = TlsSettings.model_validate(self.proxy.get("tls") or {})
        return None if tls.certificate is None else tls

    def admin_needs_key(self) -> bool:
        """True if the proxy's admin endpoints are closed to everyone without an admin key."""
        keys = KeySettings.model_validate(self.proxy.get("keys") or {})
        return bool(keys.lists().admin) or not is_loopback(self._admin_host)

    @property
    def proxy_stop_s(self) -> float:
        """Seconds from SIGTERM to SIGKILL for the proxy: as long as it may drain, and then needs to end."""
        drain_s = sum(
            float(self.proxy.get(name, Settings.model_fields[name].default)) for name in ("drain_delay_s", "grace_s")
        )
        return max(self.stop_grace_s, drain_s + _PROXY_END_S)

    @property
    def _scheme(self) -> str:
        tls = self.proxy.get("tls")
        return "https" if isinstance(tls, dict) and tls.get("certificate") else "http"

    @property
    def _admin_host(self) -> str:
        """Address of the listener with the admin endpoints."""
        if self.admin_port is None:
            return str(self.proxy.get("host", self.host))
        return str((self.proxy.get("admin") or {}).get("host", AdminSettings.model_fields["host"].default))

    @property
    def hold_s(self) -> float | None:
        """Seconds of the proxy's clock for which a P of this fleet holds KV nobody pulls; None without a P.

        The longest of all, where groups differ: room counted as taken for too long is safe.
        """
        senders = [member for member in self.members if member.role in {Role.KV_BOTH, Role.KV_PRODUCER}]
        if not senders:
            return None
        if self.kind == "vllm":
            return float(max(member.vllm.transfer.abort_timeout_s for member in senders))
        return (self.sim.abort_timeout_s or OffloadSettings().hold_s) / self.sim.time_scale

    def ports(self) -> list[tuple[int, str]]:
        """Every port the fleet listens on, with its owner: all instances' ports of one kind, then the next kind."""
        by_kind = zip(*(member.ports() for member in self.members), strict=True)
        wanted = [entry for kind in by_kind for entries in kind for entry in entries]
        admin = [] if self.admin_port is None else [(self.admin_port, "the proxy's admin listener")]
        return [*wanted, (self.proxy_port, "the proxy"), *admin]


def _reachable(host: str) -> str:
    """Host part of a URL by which this machine reaches a listener on ``host``."""
    return _bracketed({ANY_HOST: "127.0.0.1", "::": "::1"}.get(host, host))


def _bracketed(host: str) -> str:
    """A host as URLs have it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """True for a loopback address or host name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() in {"localhost", "localhost.localdomain"}
