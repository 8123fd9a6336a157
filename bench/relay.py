"""Python's part of relaying an event: microseconds from the engine's socket callback to the client's write.

``python -m bench.relay`` feeds one connection the same event again and again, with caches warm and without sockets: by
the short way of a whole chunk (`proxy.exchange.passage`), and by parser and filter, which everything else takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench.data_plane.stub.answers import Events
from bench.figures.machine import machine
from proxy.clients.inbound import Inbound
from proxy.engines.connection import EngineConnection
from proxy.exchange.relay import StreamRelay
from proxy.request.usage import UsageFilter

EVENT_BYTES = 250
_CALLS = 2_000
_ROUNDS = 100
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class _Socket(asyncio.Transport):
    """A connection to which nothing is sent."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self

    def write(self, data: Any) -> None:
        """Do nothing."""

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        """Do nothing."""


def _written(data: bytes) -> None:
    """Take the place of the client's socket."""


async def us_per_event(*, drop: bool, short: bool) -> float:
    """Time of one event, the fastest of the rounds.

    Args:
        drop: the client did not ask for usage, so each event's is removed.
        short: by the short way.
    """
    loop = asyncio.get_running_loop()
    link: Any = SimpleNamespace(writer=lambda: _written, default_headers=lambda _: [], loop=loop, cut=lambda: None)
    handler: Any = SimpleNamespace(bounds=SimpleNamespace(release=lambda _: None), opened=lambda _: None)
    inbound = Inbound(link, handler, "/", {}, http_10=False, keep_alive=True, before=None)
    connection = EngineConnection(lambda _: None, lambda _: None)
    connection.connection_made(_Socket())
    answer = connection.send(b"", b"")
    event = Events(False, EVENT_BYTES).each
    connection.data_received(_HEAD + event)
    inbound.start(200, [], None)
    relay = StreamRelay(answer, inbound, UsageFilter(drop=drop), 60.0, 60.0, 600.0)
    running = asyncio.create_task(relay.run(await answer.chunk()))
    await asyncio.sleep(0)
    if not short:
        answer.passage = None
    try:
        return min([_round(connection.data_received, event) for _ in range(_ROUNDS)])
    finally:
        running.cancel()


def _round(received: Callable[[bytes], None], event: bytes) -> float:
    began_s = time.perf_counter()
    for _ in range(_CALLS):
        received(event)
    return (time.perf_counter() - began_s) / _CALLS * 1e6


def main() -> None:
    """Measure both ways."""
    table = Table(title=f"Python's part of relaying an event of {EVENT_BYTES} bytes, µs (fastest of {_ROUNDS} rounds)")
    for head in ("usage of the events", "parser and filter", "short way"):
        table.add_column(head, justify="left" if head.startswith("usage") else "right")
    for label, drop in (("removed", True), ("kept", False)):
        costs = [uvloop.run(us_per_event(drop=drop, short=short)) for short in (False, True)]
        table.add_row(label, *(f"{cost:.2f}" for cost in costs))
    Console().print(table)
    Console().print(", ".join(f"{key} {value}" for key, value in machine().items()))


if __name__ == "__main__":
    typer.run(main)
