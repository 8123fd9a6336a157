"""An engine at socket level that can break every rule of HTTP; its probes succeed by default."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.chaos.rig.wire import MODEL, Answer, Request, head, read_body, read_head, reset, whole
from tests.integration.fleet import free_port


class Talk:
    """One request on one connection of an engine, and the means to answer it."""

    def __init__(
        self, engine: ChaosEngine, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.engine = engine
        self.request = request
        self.reader = reader
        self.writer = writer
        self.open = True

    def answer(self, framing: str = "") -> Answer:
        """The good answer to the request."""
        return Answer.to(self.request, framing)

    async def send(self, data: bytes) -> None:
        """Send at once, as one segment if it is small."""
        self.writer.write(data)
        await self.writer.drain()
        await asyncio.sleep(0)

    async def hang(self) -> None:
        """Send nothing more until the peer gives up."""
        while await self.reader.read(65536):
            pass
        self.engine.cut += 1
        self.open = False

    async def close(self) -> None:
        """Close the connection in order (FIN)."""
        self.writer.close()
        self.open = False

    async def reset(self) -> None:
        """Close the connection with RST after the sent bytes have arrived (a reset overtakes unread data)."""
        await asyncio.sleep(0.03)
        reset(self.writer)
        self.open = False


Fault = Callable[[Talk], Awaitable[None]]


async def good(talk: Talk) -> None:
    """No fault."""
    answer = talk.answer()
    for part in (answer.head, *answer.parts, answer.end):
        if part:
            await talk.send(part)


@dataclass
class ChaosEngine:
    """One engine on a free loopback port. ``fault`` answers POSTs, ``probe_fault`` GETs; set them at any time."""

    fault: Fault = good
    probe_fault: Fault | None = None
    accept_fault: Callable[[asyncio.StreamWriter], None] | None = None
    """Called on a new connection instead of serving it."""
    head_fault: Fault | None = None
    """Called once the head of a POST was read and nothing of its body."""
    idle_fault: Fault | None = None
    """Called once a POST was answered and its connection is idle."""
    engine_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started_unix_s: float = field(default_factory=time.time)
    port: int = 0
    posts: list[Request] = field(default_factory=list)
    connections: int = 0
    """Open connections."""
    accepted: int = 0
    """Connections that carried a POST."""
    busy: int = 0
    """POSTs being answered."""
    probes: int = 0
    """Successful probes that reached their last request."""
    idled: int = 0
    """Times that ``idle_fault`` has run."""
    cut: int = 0
    """Answers that the peer did not wait for."""
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self) -> ChaosEngine:
        """Listen, on the same port as before if there was one.

        A port of the system's choice could be taken by an outgoing connection while this engine is dead.
        """
        self.port = self.port or free_port()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=2**26)
        return self

    def die(self) -> None:
        """End like a killed process: nothing listens, and every connection is reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            reset(writer)

    async def stop(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def restart(self) -> None:
        """Restart on the same port, indistinguishable from another process."""
        await self.stop()
        self.engine_id = uuid.uuid4().hex
        self.started_unix_s += 1
        await self.start()

    @property
    def dead(self) -> bool:
        """True if nothing listens."""
        return self._server is None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        try:
            if self.accept_fault is not None:
                self.accept_fault(writer)
                return
            # Cancelled by ``stop`` only; asyncio's streams log a cancelled handler as an error.
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self.connections -= 1
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        posts = 0
        while (request := await read_head(reader)) is not None:
            talk = Talk(self, request, reader, writer)
            if self.head_fault is not None and request.method == "POST":
                await self._answer(talk, self.head_fault)
            if not talk.open or not await read_body(reader, request):
                return
            if request.method == "POST":
                posts += 1
                self.accepted += posts == 1
                self.posts.append(request)
                await self._answer(talk, self.fault)
                if talk.open and self.idle_fault is not None:
                    await self.idle_fault(talk)
                    self.idled += 1
            elif self.probe_fault is not None:
                await self.probe_fault(talk)
            else:
                await talk.send(self._probed(request.path))
                self.probes += request.path == "/query"
            if not talk.open:
                return

    async def _answer(self, talk: Talk, fault: Fault) -> None:
        self.busy += 1
        try:
            await fault(talk)
        except ConnectionError:
            self.cut += 1
            raise
        finally:
            self.busy -= 1

    def _probed(self, path: str) -> bytes:
        if path == "/health":
            return whole("200 OK", b"")
        if path == "/v1/models":
            return whole("200 OK", json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode())
        if path == "/query":
            return whole("200 OK", json.dumps({"0": {"engine_id": self.engine_id, "worker_addr": {}}}).encode())
        if path == "/metrics":
            labels = f'{{engine="0",model_name="{MODEL}"}}'
            text = (
                f"vllm:num_requests_running{labels} {self.busy}\nvllm:num_requests_waiting{labels} 0\n"
                f"vllm:kv_cache_usage_perc{labels} 0.1\n"
                'vllm:cache_config_info{block_size="16",num_gpu_blocks="10000"} 1.0\n'
                f"process_start_time_seconds {self.started_unix_s}\n"
            ).encode()
            return head("200 OK", "content-type: text/plain", f"content-length: {len(text)}") + text
        return whole("404 Not Found", b"{}")
