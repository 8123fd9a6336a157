"""Listener over TLS that reports the handshakes it refuses; those of the event loops do so in debug mode only."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from proxy.logs import LimitedLog

log = logging.getLogger("warmroute.tls")

_AT_ONCE = 100
"""Connections accepted in one turn of the event loop."""
_PAUSE_S = 1.0
"""Seconds without accepting where descriptors or memory are short, as of asyncio."""
_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Refusal(StrEnum):
    """Reason of a refused handshake, a code of ``warmroute_client_errors_total``."""

    PLAIN_HTTP = "tls_plain_http"
    NO_CERTIFICATE = "tls_no_client_certificate"
    CERTIFICATE = "tls_client_certificate"
    """The client's certificate has expired, or is of another authority."""
    BY_CLIENT = "tls_refused_by_client"
    """Mostly a client that does not trust the proxy's certificate."""
    TIMEOUT = "tls_timeout"
    OTHER = "tls_handshake"


OnRefused = Callable[[Refusal, str, str], None]
"""Called with the reason, the peer's address without its port, and a text for the log."""


def refusal_of(error: OSError) -> tuple[Refusal, str] | None:
    """Reason and text of a failed handshake; None for a client that left, as checks of an open port do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Refusal.CERTIFICATE, f"the client's certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).replace("_", " ").lower()
        if reason == "http request":
            return Refusal.PLAIN_HTTP, "plain HTTP on a port with TLS, use https://"
        if reason == "peer did not return a certificate":
            return Refusal.NO_CERTIFICATE, "the client has no certificate, which tls.client_ca requires"
        if "alert" in reason.split():
            return Refusal.BY_CLIENT, f"the client ended it, does it trust the proxy's certificate? ({reason})"
        return Refusal.OTHER, reason
    if isinstance(error, ConnectionAbortedError):
        return Refusal.TIMEOUT, "not complete within tls.handshake_s"
    return None


class TlsListener:
    """Accepts connections, and hands those whose handshake succeeds to a protocol each.

    uvicorn closes it as it closes an ``asyncio.Server``. Owns the handshakes in progress, which ``end`` waits for.

    Args:
        sockets: bound and listening; closed with this object.
        protocol: makes the protocol of a connection.
        tls: the event loop's options for TLS.
        on_refused: called for each refused handshake.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        protocol: Callable[[], asyncio.BaseProtocol],
        tls: dict[str, Any],
        on_refused: OnRefused,
    ) -> None:
        self.sockets: tuple[socket.socket, ...] = tuple(sockets)
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._tls = tls
        self._on_refused = on_refused
        self._handshakes: set[asyncio.Task[None]] = set()
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._shortages = LimitedLog(log, 60.0)
        for each in self.sockets:
            each.setblocking(False)
            self._loop.add_reader(each, self._accept, each)

    def close(self) -> None:
        """Accept no more connections; handshakes in progress continue."""
        for timer in self._paused.values():
            timer.cancel()
        self._paused.clear()
        for each in self.sockets:
            self._loop.remove_reader(each)
            each.close()
        self.sockets = ()

    async def wait_closed(self) -> None:
        """Return at once (uvicorn awaits it): ``close`` leaves nothing but the handshakes."""

    async def end(self, timeout_s: float) -> None:
        """Wait for the handshakes in progress, and cancel those that take longer."""
        if self._handshakes:
            tasks = set(self._handshakes)
            try:
                await asyncio.wait(tasks, timeout=timeout_s)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def take(self, accepted: socket.socket, address: Any) -> None:
        """Begin the handshake of an accepted connection."""
        task = self._loop.create_task(self._shake_hands(accepted, address))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                self._shortages.warning("shortage", "connections wait: %s", error.strerror)
                self._loop.remove_reader(listening)
                self._paused[listening] = self._loop.call_later(_PAUSE_S, self._resume, listening)
                return
            self.take(accepted, address)

    def _resume(self, listening: socket.socket) -> None:
        del self._paused[listening]
        self._loop.add_reader(listening, self._accept, listening)

    async def _shake_hands(self, accepted: socket.socket, address: Any) -> None:
        accepted.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._protocol, accepted, **self._tls)
        except OSError as error:
            refusal = refusal_of(error)
            if refusal is not None:
                reason, text = refusal
                self._on_refused(reason, str(address[0]) if address else "?", text)
