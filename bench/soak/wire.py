"""One connection of a hostile client: bytes as they are given, bounded in time, and the way it ended."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct

from bench.soak.plan import POLITE_KEY, TENANT_KEY

PATIENCE_S = 15.0
"""Longer than the proxy may take for anything that these clients do."""
QUIET_S = 1.0
"""Time without a byte after which a client that reads a part of an answer has read the whole of it."""
_PIECE = 256 * 1024


class AnsweredError(Exception):
    """The proxy has answered or closed the connection before everything was sent."""


class Wire:
    """A connection to the proxy, which takes bodies up to ``body_bytes``. Use it as an asynchronous context."""

    def __init__(self, port: int, body_bytes: int) -> None:
        self._port = port
        self.body_bytes = body_bytes

    async def __aenter__(self) -> Wire:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._line = asyncio.create_task(self._reader.readline(), name="status-line")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()
        self._line.cancel()
        await asyncio.gather(self._line, return_exceptions=True)

    async def send(self, data: bytes) -> None:
        """Send bytes in pieces while the proxy neither answers nor closes.

        Raises:
            AnsweredError, ConnectionError: it did.
        """
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            self._writer.write(view[start : start + _PIECE])
            await self._writer.drain()
            if self._line.done():
                raise AnsweredError

    async def trickle(self, data: bytes, every_s: float) -> None:
        """Send byte by byte. Raises as ``send``."""
        for number in range(len(data)):
            await self.send(data[number : number + 1])
            await asyncio.sleep(every_s)

    def half_close(self) -> None:
        """Send no more; the answer can still be read."""
        self._writer.write_eof()

    def leave(self, draw: random.Random) -> None:
        """Close with FIN or RST."""
        if draw.random() < 0.5:
            sock: socket.socket = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        else:
            self._writer.close()

    async def receive(self, count: int) -> None:
        """Read up to ``count`` bytes after the status line, or until none comes for ``QUIET_S``."""
        await self._line
        with contextlib.suppress(TimeoutError):
            while count > 0 and (part := await asyncio.wait_for(self._reader.read(count), QUIET_S)):
                count -= len(part)

    async def status(self) -> str:
        """Status of the answer, or ``closed``."""
        fields = (await self._line).split(b" ", 2)
        return fields[1].decode("latin-1") if len(fields) == 3 and fields[1].isdigit() else "closed"


def head(method: str, path: str, *lines: str, key: str | None = TENANT_KEY) -> bytes:
    """Request line, Host, key and further header lines."""
    keys = [] if key is None else [f"authorization: Bearer {key}"]
    text = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *keys, *lines, "", ""]
    return "\r\n".join(text).encode("latin-1")


def post(body: bytes, *lines: str, key: str | None = TENANT_KEY) -> bytes:
    """A whole completion request."""
    return head("POST", "/v1/completions", f"content-length: {len(body)}", *lines, key=key) + body


def wrong_key(draw: random.Random) -> str | None:
    """No key, a wrong one, a good one with another end, or a very long one."""
    return draw.choice((None, "wr-wrong", POLITE_KEY[:-1] + "1", "k" * draw.randint(1_000, 20_000)))
