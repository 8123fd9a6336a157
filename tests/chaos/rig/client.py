"""A client that writes its requests byte by byte and reads the answers strictly (h11)."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

import h11


@dataclass
class Got:
    """One answer of the proxy."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    interim: list[int] = field(default_factory=list)
    """Statuses of 1xx answers before it."""

    @property
    def error(self) -> dict[str, Any]:
        """The error object in OpenAI's shape."""
        content: dict[str, Any] = json.loads(self.body)["error"]
        return content


class RawClient:
    """One connection to the proxy. Close it in ``finally`` (or use it as an asynchronous context)."""

    def __init__(self, port: int, limit: int = 2**16) -> None:
        self._port = port
        self._limit = limit

    async def __aenter__(self) -> RawClient:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port, limit=self._limit)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def send(self, data: bytes) -> None:
        """Send bytes unchanged."""
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Close the connection with RST."""
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def answer(self, *, method: str = "POST", version: str = "1.1", within_s: float = 30.0) -> Got:
        """The next answer; raises h11.RemoteProtocolError if it is not valid HTTP."""
        parser = h11.Connection(h11.CLIENT)
        request = h11.Request(method=method, target="/", headers=[("host", "x")], http_version=version)
        parser.send(request)
        parser.send(h11.EndOfMessage())
        got: Got | None = None
        interim: list[int] = []
        async with asyncio.timeout(within_s):
            while True:
                match event := parser.next_event():
                    case h11.NEED_DATA:
                        # One byte at a time, so that nothing of a following answer is consumed.
                        parser.receive_data(await self.reader.read(1))
                    case h11.InformationalResponse():
                        interim.append(event.status_code)
                    case h11.Response():
                        headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                        got = Got(event.status_code, headers, interim=interim)
                    case h11.Data():
                        assert got is not None
                        got.body += event.data
                    case h11.EndOfMessage():
                        assert got is not None
                        return got
                    case h11.ConnectionClosed():
                        raise ConnectionResetError("closed without an answer")

    async def at_end(self, within_s: float = 30.0) -> bool:
        """True if the proxy closes the connection without another byte."""
        async with asyncio.timeout(within_s):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True


def post(body: bytes, *lines: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    """A request with its length; ``lines`` are additional headers."""
    return head(f"content-length: {len(body)}", *lines, path=path, version=version) + body


def head(*lines: str, path: str = "/v1/completions", version: str = "1.1", method: str = "POST") -> bytes:
    """Request line, Host and the given header lines."""
    first = f"{method} {path} HTTP/{version}"
    return "\r\n".join([first, "host: 127.0.0.1", "content-type: application/json", *lines, "", ""]).encode("latin-1")
