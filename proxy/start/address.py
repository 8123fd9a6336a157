"""Check that an address can be listened on, before the engines are probed and snapshots are read."""

from __future__ import annotations

import errno
import os
import socket

from proxy.settings import Settings


class ListenError(RuntimeError):
    """An address that cannot be listened on; the message has the cause and the remedy."""


def check_addresses(settings: Settings) -> None:
    """Bind the addresses of both listeners and release them again.

    Raises:
        ListenError: one is in use, not permitted, or not of this machine.
    """
    _check(settings.host, settings.port, "host", "port", "--port")
    if settings.admin.port is not None:
        _check(settings.admin.host, settings.admin.port, "admin.host", "admin.port", "--admin-port")


def _check(host: str, port: int, host_key: str, port_key: str, flag: str) -> None:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ListenError(f"{host_key} {host!r} is no address of this machine: {error.strerror}") from error
    failures = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as listener:
                # As the listener does: connections of a process that has just ended do not count.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
        except OSError as error:
            failures.append(error)
    # A machine without IPv6 still resolves localhost to ::1: one address that works is enough, unless another is taken.
    decisive = [error for error in failures if error.errno in {errno.EADDRINUSE, errno.EACCES}]
    if decisive or len(failures) == len(found):
        first = (decisive or failures)[0]
        raise ListenError(_text(first, host, port, host_key, port_key, flag)) from first


def _text(error: OSError, host: str, port: int, host_key: str, port_key: str, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use by another process (`ss -ltnp 'sport = :{port}'` shows it): stop that "
            f"one, or give another {port_key} ({flag})"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs the capability CAP_NET_BIND_SERVICE: give a {port_key} ({flag}) of 1024 or more"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host_key} {host!r} is no address of this machine: give one, or 0.0.0.0 for all of them"
    return f"{host_key} {host!r}, {port_key} {port}: {os.strerror(error.errno or 0)}"
