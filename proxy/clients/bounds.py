"""Bounds on clients: their settings, and what all connections together hold."""

from __future__ import annotations

import logging
import resource
from collections import Counter

from proxy.clients.handshakes import Refusal
from proxy.errors import RequestError
from proxy.logs import LimitedLog
from proxy.settings import Settings

SPARE_CONNECTIONS = 64
"""Connections that each listener accepts above ``limits.connections``; they are served anything but generation."""
_CLIENT_SHARE = 0.75
"""Part of the process's file descriptors for clients unless ``limits.connections`` is set; the rest is for engines."""
_LARGE_SHARE = 0.75
"""Part of ``limits.buffered_bytes`` that large bodies may use, so that a few of them do not refuse all small ones."""
_LARGE_BYTES = 1024 * 1024


class ClientBounds:
    """Limits and time bounds of client connections, and the two accounts they share: connections and body bytes."""

    header_bytes: int
    header_s: float
    body_bytes: int
    body_s: float
    admin_body_bytes: int
    client_stall_s: float
    connections: int
    """Maximum number of client connections without the spare ones."""
    _buffered_bytes: int

    def __init__(self, settings: Settings) -> None:
        self.open = 0
        """Number of client connections."""
        self.held_bytes = 0
        """Size of all request bodies in memory, complete or not."""
        self.refused_connections = 0
        self.refused_bodies = 0
        self.turned_away: Counter[str] = Counter()
        """Refusals that have no row in the records, by error code."""
        self.refusals = LimitedLog(logging.getLogger("warmroute.clients"))
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Apply other settings to everything that arrives from now on."""
        limits, timeouts = settings.limits, settings.timeouts
        self.header_bytes, self.header_s = limits.header_bytes, timeouts.header_s
        self.body_bytes, self.body_s = limits.body_bytes, timeouts.body_s
        self.admin_body_bytes = limits.admin_body_bytes
        self.client_stall_s = timeouts.client_stall_s
        self.connections = limits.connections or default_connections()
        self._buffered_bytes = limits.buffered_bytes

    def hold(self, size: int, body_bytes: int) -> bool:
        """Account for ``size`` more bytes of a body that then has ``body_bytes``; False if there is no room for them.

        They are on the account in both cases, and leave it by ``release``.
        """
        self.held_bytes += size
        share = _LARGE_SHARE if body_bytes > _LARGE_BYTES else 1.0
        return self.held_bytes <= self._buffered_bytes * share

    def release(self, size: int) -> None:
        """Take ``size`` bytes off the account."""
        self.held_bytes -= size

    def refused(self, error: RequestError, peer: str) -> None:
        """Count and log a refusal without a row: of data that is no request, or of one that is not for generation."""
        code = error.code or str(error.status)
        self.turned_away[code] += 1
        self.refusals.warning(code, "refused data from %s: %d %s", peer, error.status, error.message)

    def refused_handshake(self, reason: Refusal, peer: str, text: str) -> None:
        """Count and log a refused TLS handshake."""
        self.turned_away[reason.value] += 1
        self.refusals.warning(reason.value, "refused the TLS handshake of %s: %s", peer, text)

    def no_room(self) -> RequestError:
        """Error for a body that all others leave no room for; counted."""
        self.refused_bodies += 1
        return RequestError(
            503,
            "the proxy holds as many bytes of request bodies as it may (limits.buffered_bytes)",
            kind="service_unavailable",
            code="buffers_full",
            retry_after_s=1,
        )

    def too_many(self) -> RequestError:
        """Error for a client above the limit on connections; counted."""
        self.refused_connections += 1
        return RequestError(
            503,
            f"the proxy has {self.connections} client connections, its limit (limits.connections)",
            kind="service_unavailable",
            code="too_many_connections",
            retry_after_s=1,
        )

    @property
    def crowded(self) -> bool:
        """True if the number of connections is above its limit, so that only the spare ones are left."""
        return self.open > self.connections

    def full(self, spare: int) -> bool:
        """True if ``spare`` connections above the limit are used up too."""
        return self.open > self.connections + spare


def late_body() -> RequestError:
    """Error for a body that was not received within its bound."""
    return RequestError(408, "the body did not arrive in time (timeouts.body_s)", code="body_timeout")


def large_trailers(limit: int) -> RequestError:
    """Error for a body with more than ``limit`` bytes of trailers or chunk extensions in a row."""
    message = f"trailers or chunk extensions are larger than {limit} bytes (limits.header_bytes)"
    return RequestError(431, message, code="trailers_too_large")


def default_connections() -> int:
    """Connections that the process's file descriptors allow, engines' connections and a spare left aside."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        descriptors = 1_048_576
    return max(16, int(descriptors * _CLIENT_SHARE) - SPARE_CONNECTIONS)


def few_descriptors(settings: Settings) -> str | None:
    """One sentence with the remedy if ``limits.connections`` is more than the file descriptors allow, else None."""
    wanted, possible = settings.limits.connections, default_connections()
    if wanted is None or wanted <= possible:
        return None
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"limits.connections is {wanted}, but this process may have {descriptors} open files, enough for {possible} "
        "clients beside the connections to engines: raise the limit (ulimit -n, LimitNOFILE= of a systemd unit) "
        "or lower limits.connections"
    )


def raise_descriptor_limit() -> None:
    """Raise the limit on open files to the hard one: the usual soft limit, 1024, is kept for programs that use select.

    No effect where that is not allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return
