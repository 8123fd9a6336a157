"""A low-cost engine stub in Python: several engines in one process, raw protocols on uvloop.

``python -m bench.data_plane.stub.server`` prints one JSON line with its ports and serves until standard input closes.
Every engine answers the management requests of the routers under test, and generation requests with a stream of events,
as a burst or paced. Paced streams of one engine advance together, at one tick, as in an engine's step. The control port
has ``POST /stub/settings``, ``GET /stub/records`` (counts since the last reset) and ``POST /stub/reset``.

A connection that ends before its answer is complete is an abort; its time is ``CLOCK_MONOTONIC``, which all processes
of a host share.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from time import monotonic
from typing import cast

import httptools
import msgspec
import uvloop

from bench.data_plane.stub.answers import STREAM_HEAD, completion, whole
from bench.data_plane.stub.state import Stub, StubRecord, StubSettings, Ticker

GENERATION = {b"/v1/completions": False, b"/v1/chat/completions": True}
RENDER = frozenset(path + b"/render" for path in GENERATION)


class RouterConnection(asyncio.Protocol):
    """One connection of a router to one engine; one request at a time."""

    transport: asyncio.Transport

    def __init__(self, stub: Stub, ticker: Ticker) -> None:
        self._stub = stub
        self._ticker = ticker
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._parts: list[bytes] = []
        self._body_bytes = 0
        self._busy = False
        self._chat = False
        self._usage = False
        self._tag = ""
        self._arrived_s = 0.0
        self._timer: asyncio.Handle | None = None
        self.idle_since_s = monotonic()

    # asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one, but does not inherit from it
        self._stub.connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.write(whole(b'{"error":"not HTTP"}', b"400 Bad Request"))
            self.transport.close()

    def eof_received(self) -> None:
        self._cut()

    def connection_lost(self, error: Exception | None) -> None:
        self._cut()
        self._stub.connections.discard(self)

    # parser callbacks

    def on_message_begin(self) -> None:
        self._parts = []
        self.idle_since_s = float("inf")

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        if self._busy:
            # No router under test pipelines; if one starts to, its run must fail.
            self._stub.pipelined += 1
            self.transport.close()
            return
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        path = self._url.partition(b"?")[0]
        self._stub.paths[path.decode("latin-1")] += 1
        if path in GENERATION:
            self._generate(path, body)
        else:
            self._write_whole(self._other(path, body))

    # answers

    def _other(self, path: bytes, body: bytes) -> bytes:
        page = self._stub.pages.get(path)
        if page is not None:
            return page
        if path in RENDER:
            try:
                return self._stub.renders.answer(path, body)
            except msgspec.MsgspecError as error:
                return self._refusal(path, b"400 Bad Request", str(error))
        if path == b"/stub/records":
            return whole(json.dumps(self._stub.report()).encode())
        if path == b"/stub/reset":
            self._stub.reset()
            return whole(b"{}")
        if path == b"/stub/settings":
            try:
                self._stub.apply(msgspec.json.decode(body, type=StubSettings))
            except msgspec.MsgspecError as error:
                return self._refusal(path, b"400 Bad Request", str(error))
            return whole(b"{}")
        return self._refusal(path, b"404 Not Found", "no such path")

    def _refusal(self, path: bytes, status: bytes, why: str) -> bytes:
        self._stub.refused[f"{path.decode('latin-1')}: {why}"[:200]] += 1
        return whole(json.dumps({"error": why}).encode(), status)

    def _generate(self, path: bytes, body: bytes) -> None:
        settings = self._stub.settings
        self._busy = True
        self._chat = GENERATION[path]
        self._body_bytes = len(body)
        # Serializers put the options before or after the prompt: searching all of a long one would be too slow.
        ends = body[:512] + body[-1024:]
        options = ends if b'"stream"' in ends else body
        self._usage = is_true(options, b'"include_usage"')
        if settings.records:
            self._arrived_s = monotonic()
            self._tag = tag_of(body)
        if not is_true(options, b'"stream"'):
            self._later(settings.first_event_delay_s, self._answer_whole)
        elif settings.first_event_delay_s:
            self.transport.write(STREAM_HEAD)
            self._later(settings.first_event_delay_s, self._start)
        else:
            self._start(STREAM_HEAD)

    def _later(self, delay_s: float, call: object) -> None:
        assert callable(call)
        if delay_s:
            self._timer = asyncio.get_running_loop().call_later(delay_s, call)
        else:
            call()

    def _answer_whole(self) -> None:
        self._end(completion(self._chat, self._body_bytes, self._stub.settings.events))

    def _start(self, head: bytes = b"") -> None:
        settings, events = self._stub.settings, self._stub.events[self._chat]
        if settings.events_per_s and settings.events > 1:
            self.transport.write(head + events.each)
            self._ticker.add(self, settings.events - 1)
        elif settings.events_per_write:
            self._write_group(head, settings.events)
        else:
            end = events.end(self._body_bytes, settings.events, self._usage)
            self._end(head + self._stub.bursts[self._chat] + end)

    def _write_group(self, head: bytes, remaining: int) -> None:
        events, now = self._stub.events[self._chat], self._stub.settings.events_per_write
        if remaining <= now:
            end = events.end(self._body_bytes, self._stub.settings.events, self._usage)
            self._end(head + events.burst(remaining) + end)
        else:
            self.transport.write(head + events.each * now)
            self._timer = asyncio.get_running_loop().call_soon(self._write_group, b"", remaining - now)

    def close_idle(self) -> None:
        """Close the connection after it was idle for too long."""
        self.transport.close()

    def write_event(self) -> None:
        """Write the next event of a paced stream."""
        self.transport.write(self._stub.events[self._chat].each)

    def finish(self) -> None:
        """Write the last event of a paced stream and the end of the answer."""
        events = self._stub.events[self._chat]
        self._end(events.last + events.end(self._body_bytes, self._stub.settings.events, self._usage))

    def _end(self, data: bytes) -> None:
        """Write the last bytes of a generation request's answer."""
        self._stub.completed += 1
        self._note(aborted=False)
        self._busy = False
        self._timer = None
        self._write_whole(data)

    def _write_whole(self, data: bytes) -> None:
        self.transport.write(data)
        if self._parser.should_keep_alive():
            self.idle_since_s = monotonic()
        else:
            self.transport.close()

    def _note(self, aborted: bool) -> None:
        if self._stub.settings.records:
            self._stub.records.append(StubRecord(self._tag, self._arrived_s, self._body_bytes, monotonic(), aborted))

    def _cut(self) -> None:
        """Record that the router closed the connection."""
        if not self._busy:
            return
        self._busy = False
        self._stub.aborted += 1
        self._note(aborted=True)
        self._ticker.streams.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()


def is_true(body: bytes, key: bytes) -> bool:
    """True if ``key`` (with its quotes) is followed by ``true``; prompts of the load generator never contain a key."""
    at = body.find(key)
    return at >= 0 and body[at + len(key) : at + len(key) + 8].lstrip(b" :").startswith(b"true")


def tag_of(body: bytes) -> str:
    """The text between the first ``[[`` and ``]]``, or an empty string."""
    start = body.find(b"[[")
    end = body.find(b"]]", start)
    return body[start + 2 : end].decode("latin-1") if 0 <= start < end else ""


async def serve(engines: int, settings: StubSettings) -> None:
    """Serve on free ports until standard input closes."""
    loop = asyncio.get_running_loop()
    stub = Stub(settings)
    tickers = [Ticker(stub, i / (engines + 1)) for i in range(engines + 1)]
    servers = [
        await loop.create_server(partial(RouterConnection, stub, ticker), "127.0.0.1", 0, backlog=4096)
        for ticker in tickers
    ]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    idle = asyncio.create_task(stub.close_idle())
    ended = asyncio.Event()
    loop.add_reader(sys.stdin, lambda: ended.set() if not sys.stdin.read(1) else None)
    try:
        print(json.dumps({"ports": ports[:-1], "control_port": ports[-1]}), flush=True)
        await ended.wait()
    finally:
        loop.remove_reader(sys.stdin)
        idle.cancel()
        for server in servers:
            server.close()


def main() -> None:
    """Entry point: one optional argument, the number of engines."""
    engines = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    uvloop.run(serve(engines, StubSettings()))


if __name__ == "__main__":
    main()
