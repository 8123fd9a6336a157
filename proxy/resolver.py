"""Addresses of host names, looked up without blocking the event loop, other names, or the end of the process.

The loop's own lookups share a few threads: with a name server that does not answer, a handful of names occupies all of
them, and the process cannot end before they return. Here every name has a daemon thread of its own, at most one at a
time, and addresses found earlier are used while its name server is slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from dataclasses import dataclass
from functools import lru_cache

_FRESH_S = 2.0
"""Time for which addresses are used without another lookup: DNS changes must be noticed."""
_PATIENCE_S = 0.5
"""Wait for a lookup where addresses are known from before."""


def look_up(host: str) -> tuple[str, ...]:
    """Addresses of a name, IPv4 first, since engines listen there by default. Blocks. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in ordered))


@dataclass(slots=True)
class _Name:
    """A host name: its addresses, when they were found, and the lookup in progress."""

    addresses: tuple[str, ...] = ()
    found_s: float = 0.0
    lookup: asyncio.Future[tuple[str, ...]] | None = None


class Resolver:
    """Resolves the names of one event loop."""

    def __init__(self) -> None:
        self._names: dict[str, _Name] = {}

    async def addresses(self, host: str) -> tuple[str, ...]:
        """Addresses of a host, IPv4 first; an address is returned as it is.

        The caller bounds the wait for a name's first lookup.

        Raises:
            OSError: the name does not exist, or is not known and its name server fails.
        """
        if _is_address(host):
            return (host,)
        name = self._names.setdefault(host, _Name())
        loop = asyncio.get_running_loop()
        if name.addresses and loop.time() - name.found_s < _FRESH_S:
            return name.addresses
        if name.lookup is None:
            self._start(host, name, loop)
        assert name.lookup is not None
        try:
            async with asyncio.timeout(_PATIENCE_S if name.addresses else None):
                return await asyncio.shield(name.lookup)
        except TimeoutError:
            if not name.addresses:
                raise
            return name.addresses
        except socket.gaierror as error:
            if name.addresses and error.errno == socket.EAI_AGAIN:
                return name.addresses
            raise

    def forget(self, host: str) -> None:
        """Forget a name that is no longer used."""
        self._names.pop(host, None)

    def _start(self, host: str, name: _Name, loop: asyncio.AbstractEventLoop) -> None:
        lookup: asyncio.Future[tuple[str, ...]] = loop.create_future()
        name.lookup = lookup

        def done(addresses: tuple[str, ...], error: OSError | None) -> None:
            name.lookup = None
            if error is not None:
                lookup.set_exception(error)
                lookup.exception()  # nobody may be waiting any more
            else:
                name.addresses, name.found_s = addresses, loop.time()
                lookup.set_result(addresses)

        def run() -> None:
            addresses: tuple[str, ...] = ()
            error: OSError | None = None
            try:
                addresses = look_up(host)
            except OSError as failed:
                error = failed
            except UnicodeError as failed:  # a name that has no encoding
                error = OSError(str(failed))
            with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(done, addresses, error)

        threading.Thread(target=run, name=f"lookup {host}", daemon=True).start()


@lru_cache(maxsize=1024)
def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
