"""Ports that the workers share, reserved by their parent for the time between two workers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from proxy.start.address import ListenError


@contextlib.contextmanager
def reserved(host: str, port: int) -> Iterator[int]:
    """Keep a port bound in the context, without listening; yields it, a free one for port 0.

    A socket that does not listen receives no connection, but with it no other user's process can take the port.

    Raises:
        ListenError: it cannot be bound.
    """
    held: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        failure: OSError | None = None
        for family, kind, protocol, _, address in found:
            try:
                each = _bound(family, kind, protocol, (address[0], port, *address[2:]))
            except OSError as error:
                failure = error
                continue
            held.append(each)
            port = each.getsockname()[1]
        if not held:
            raise ListenError(f"{host}, port {port}: {failure}") from failure
        yield port
    finally:
        for each in held:
            each.close()


def _bound(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
