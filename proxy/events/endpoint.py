"""The IP version of ZMQ endpoints: a socket connects over IPv4 alone unless ``zmq.IPV6`` is set before."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit

_RESOLVE_AGAIN_S = 1.0


async def needs_ipv6(endpoint: str) -> bool:
    """True for an endpoint that IPv4 does not reach; waits until its name can be resolved.

    Not set for every endpoint: ZMQ then takes the first address of a name alone, so that an engine that listens on
    IPv4 is not reached by a name that also has an IPv6 address.
    """
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or parts.hostname is None:
        return False
    while True:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, None, type=socket.SOCK_STREAM)
        except OSError:
            await asyncio.sleep(_RESOLVE_AGAIN_S)
        else:
            return all(family == socket.AF_INET6 for family, *_ in found)
