"""Python's part of one request: microseconds by stage, with caches as a request meets them and with warm ones.

``python -m bench.data_plane.request`` serves streams of 80 events without sockets. Between two stages of a request
other memory is read (``--junk-mb``), as other streams and processes do, so that code and objects come from main memory;
``--warm`` leaves that out. To measure another source tree: ``PYTHONPATH=TREE python -P bench/data_plane/request.py``.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import uvloop
from rich.console import Console
from rich.table import Table
from uvicorn.server import ServerState

from bench.data_plane.load.prompts import text_body
from bench.data_plane.quantities import SIZES
from bench.data_plane.stub.answers import DONE, LAST_CHUNK, STREAM_HEAD, chunk, event
from bench.figures.machine import machine
from proxy import memory
from proxy.app import ProxyApp
from proxy.clients.protocol import ProxyProtocol
from proxy.engines.connection import EngineConnection
from proxy.server import server_config
from proxy.settings import Settings

STAGES = ("read and parse the head", "parse, route, send", "first event", "an event", "last event and records")
EVENT_BYTES = 250
_INSTANCES = 8
_POOL_TOKENS = 1_000_000
_WARMUP = 30
_USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":500,"total_tokens":580,"completion_tokens":80,'
    b'"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
)


_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


class _Socket(asyncio.Transport):
    """A connection whose output is kept until it is taken."""

    family = 0

    def __init__(self, protocol: asyncio.Protocol | None = None) -> None:
        """``protocol`` is called when the connection is cut."""
        self.written: list[Any] = []
        self._protocol = protocol
        self._descriptor = os.eventfd(0)

    def write(self, data: Any) -> None:
        self.written.append(data)

    def writelines(self, list_of_data: Any) -> None:
        self.written.extend(list_of_data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def fileno(self) -> int:
        return self._descriptor

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    getpeername = getsockname

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Stay open, until ``release``."""

    def release(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)

    def abort(self) -> None:
        if self._protocol is not None:
            self._protocol.connection_lost(None)

    def get_write_buffer_size(self) -> int:
        return 0


class _Engines:
    """Connections to engines that answer when they are made to."""

    def __init__(self, client: Any) -> None:
        """``client``: the proxy's ``EngineClient``, which connects to these from now on."""
        self.sockets: list[_Socket] = []
        self._connections: list[EngineConnection] = []
        self._client = client
        client._connect_to_any = self._connect

    @property
    def busy(self) -> EngineConnection:
        """The connection that has a request."""
        return next(connection for connection in self._connections if not connection.usable)

    async def _connect(self, _: Any) -> EngineConnection:
        connection = EngineConnection(self._client._released, self._client._gone)
        socket = _Socket(connection)
        connection.connection_made(socket)
        self.sockets.append(socket)
        self._connections.append(connection)
        return connection

    def release(self) -> None:
        """Release the connections, which FastAPI's cache of what routes depend on would keep with the proxy."""
        for socket in self.sockets:
            socket.release()
        self.sockets.clear()
        self._connections.clear()


async def stages_us(
    size_bytes: int, requests: int, junk_bytes: int, folder: Path, tune: Callable[[], None] = memory.tune
) -> list[float]:
    """Means of ``STAGES`` in microseconds, without the slowest hundredth.

    Args:
        size_bytes: of each prompt.
        requests: counted ones.
        junk_bytes: read between two stages.
        folder: gets the breakdown file.
        tune: prepares the process, as at the start of a proxy.
    """
    settings = {
        "instances": [{"name": f"inst-{i}", "url": f"http://127.0.0.1:{i + 2}"} for i in range(_INSTANCES)],
        "policy": {"name": "linear"},
        "breakdown": {"jsonl_path": str(folder / "breakdown.jsonl")},
    }
    config = server_config(Settings.model_validate(settings))
    config.load()
    app = config.app
    assert isinstance(app, ProxyApp)
    core = app.core
    tune()
    core.open()
    engines = _Engines(core.upstream)
    for instance in core.instances:
        instance.healthy = True
        core.router.state.set_capacity(instance.name, _POOL_TOKENS, 16.0)
    client, protocol = _Socket(), ProxyProtocol(app.generation, config, ServerState(), {})
    protocol.connection_made(client)
    junk = np.ones(max(1, junk_bytes // 8))
    times: list[list[float]] = [[] for _ in STAGES]

    async def timed(received: Callable[[bytes], None] | None, data: bytes, turns: int) -> float:
        """Microseconds of ``received``, if any, and as many turns of the event loop."""
        if junk_bytes:
            junk.sum()
        began_s = time.perf_counter()
        if received is not None:
            received(data)
        for _ in range(turns):
            await asyncio.sleep(0)
        return (time.perf_counter() - began_s) * 1e6

    try:
        one = chunk(event(False, EVENT_BYTES))
        for number in range(_WARMUP + requests):
            body = text_body(1, number, size_bytes, 80)
            request = b"%bcontent-length: %d\r\n\r\n%b" % (_HEAD, len(body), body)
            took = [await timed(protocol.data_received, request, 0), await timed(None, b"", 1)]
            engine = engines.busy
            took += [
                await timed(engine.data_received, STREAM_HEAD + one, 2),
                await timed(engine.data_received, one, 0),
                await timed(engine.data_received, chunk(_USAGE + DONE) + LAST_CHUNK, 1),
            ]
            if not client.written[-1].endswith(LAST_CHUNK):
                raise RuntimeError(f"the answer is incomplete: {client.written[-1]!r}")
            client.written.clear()
            for socket in engines.sockets:
                socket.written.clear()
            if number >= _WARMUP:
                for stage, us in zip(times, took, strict=True):
                    stage.append(us)
    finally:
        await core.close()
        engines.release()
        client.release()
    return [float(np.mean(sorted(stage)[: len(stage) * 99 // 100])) for stage in times]


def main(
    size: Annotated[str, typer.Option(help=f"Size of the prompts: {', '.join(SIZES)}.")] = "2k",
    requests: Annotated[int, typer.Option(min=1, help="Counted requests of each run.")] = 300,
    junk_mb: Annotated[int, typer.Option(min=1, help="Megabytes that are read between two stages.")] = 24,
    warm: Annotated[bool, typer.Option("--warm", help="Read nothing in between: caches stay warm.")] = False,
) -> None:
    """Measure one request's stages in this process."""
    if size not in SIZES:
        raise typer.BadParameter(f"unknown: {size}; known: {', '.join(SIZES)}", param_hint="--size")
    with tempfile.TemporaryDirectory() as folder:
        means = uvloop.run(stages_us(SIZES[size], requests, 0 if warm else junk_mb * 1_000_000, Path(folder)))
    table = Table(title=f"Python's part of one request of {size}, µs, caches {'warm' if warm else 'cold'}")
    table.add_column("stage")
    table.add_column("µs", justify="right")
    for stage, us in zip(STAGES, means, strict=True):
        table.add_row(stage, f"{us:.1f}")
    table.add_row("all, with 79 events", f"{sum(means) + 78 * means[3]:.0f}")
    table.add_row("all but the events", f"{sum(means) - means[3]:.0f}")
    Console().print(table)
    Console().print(", ".join(f"{key} {value}" for key, value in machine().items()))


if __name__ == "__main__":
    typer.run(main)
