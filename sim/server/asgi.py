"""ASGI functions that both servers use: bodies, answers, and breaking a connection on purpose."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGone(Exception):
    """The client left before its request was complete."""


async def read_body(receive: Receive) -> bytes:
    """The whole request body.

    Raises:
        ClientGone: the connection closed first.
    """
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def answer(send: Send, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
    """Send a whole response."""
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def until_disconnect(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def break_connection(send: Send, receive: Receive, *, reset: bool) -> None:
    """Close the TCP connection under a request, without an answer or in the middle of one; ``reset``: by RST.

    ASGI has no message for this, so it uses the server's transport behind ``send``. Raises RuntimeError if the server
    does not expose it.
    """
    cycle = getattr(send, "__self__", None)
    transport = getattr(cycle, "transport", None)
    if transport is None:
        raise RuntimeError("this ASGI server does not expose its transport")
    if reset:
        raw = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.close()
    await until_disconnect(receive)
