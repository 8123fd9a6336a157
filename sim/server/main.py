"""Runs one engine process: two ports, one event loop; it ends promptly on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import uvicorn
import uvloop

from sim.server.app import BootstrapApp, EngineApp, EngineRoutes
from sim.server.faults import Faults
from sim.server.metrics import EngineMetrics
from sim.server.pulls import Puller
from sim.server.ranks import EngineRanks
from sim.server.settings import ServerSettings, bracketed

log = logging.getLogger("sim")


class _Server(uvicorn.Server):
    """A server that does not handle the process's signals: two of them share one process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Stop:
    """The request to end the process, with its exit code."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.exit_code = 0

    def now(self, exit_code: int = 0) -> None:
        """End the process."""
        self.exit_code = max(self.exit_code, exit_code)
        self.event.set()

    def soon(self) -> None:
        """End the process for a dead engine, after the answer that reports it had time to be sent."""
        asyncio.get_running_loop().call_later(0.2, self.now, 1)


def run(settings: ServerSettings) -> int:
    """Serve until a signal arrives or the engine dies; returns the exit code."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(log_format())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    ports = [settings.port] if settings.bootstrap_port is None else [settings.port, settings.bootstrap_port]
    sockets: list[socket.socket] = []
    try:
        for port in ports:
            try:
                family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
                sockets.append(socket.create_server((settings.host, port), family=family, backlog=2048))
            except (OSError, OverflowError) as error:
                print(f"engine: cannot listen on {bracketed(settings.host)}:{port}: {error}", file=sys.stderr)
                return 1
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, sockets))
    finally:
        for each in sockets:
            each.close()


def log_format() -> logging.Formatter:
    """Lines with the time in UTC and its offset, as the proxy's: both logs are read side by side."""
    form = logging.Formatter(
        "%(asctime)s.%(msecs)03d+00:00 %(levelname)s %(name)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    form.converter = time.gmtime
    return form


async def _serve(settings: ServerSettings, sockets: list[socket.socket]) -> int:
    loop = asyncio.get_running_loop()
    stop = _Stop()
    loop.set_exception_handler(lambda _, context: _fatal(context, stop))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.now)
    settings = replace(settings, port=sockets[0].getsockname()[1])
    engines = settings.engines()
    faults = Faults()
    metrics = EngineMetrics(engines, settings)
    puller = Puller(faults)
    try:
        ranks = EngineRanks(settings, engines, metrics, puller, faults, stop.soon)
    except OSError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 1
    applications = [EngineApp(settings, ranks, metrics, faults).routes()]
    if len(sockets) > 1:
        applications.append(BootstrapApp(settings, ranks).routes())
    servers = [_server(application, settings) for application in applications]
    tasks = [
        asyncio.create_task(server.serve(sockets=[each]), name="http")
        for server, each in zip(servers, sockets, strict=True)
    ]
    ranks.start()
    try:
        _announce(settings, sockets)
        stopping = asyncio.create_task(stop.event.wait(), name="stop")
        await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
    finally:
        ranks.cut()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)
        await puller.close()
        await ranks.stop()
    return stop.exit_code


def _server(application: EngineRoutes, settings: ServerSettings) -> _Server:
    return _Server(
        uvicorn.Config(
            application,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=settings.access_log,
            log_level="info" if settings.access_log else "warning",
            timeout_graceful_shutdown=1,
            server_header=False,
            date_header=False,
            proxy_headers=False,
        )
    )


def _announce(settings: ServerSettings, sockets: list[socket.socket]) -> None:
    config = settings.config
    ports = [each.getsockname()[1] for each in sockets]
    bootstrap = f", bootstrap {ports[1]}" if len(ports) > 1 else ""
    log.info(
        "%s on http://%s:%d%s%s: profile %s, %d blocks of %d tokens, role %s, engine speed %g, engine id %s",
        settings.model,
        bracketed(settings.host),
        ports[0],
        bootstrap,
        f", {settings.data_parallel_size} ranks" if settings.data_parallel_size > 1 else "",
        settings.profile.name,
        config.num_blocks,
        config.block_tokens,
        config.role,
        settings.time_scale,
        config.engine_id,
    )


def _fatal(context: dict[str, Any], stop: _Stop) -> None:
    """Log an uncaught error and end the process: the engine's timing can no longer be relied on."""
    log.error("%s", context.get("message"), exc_info=context.get("exception"))
    stop.now(1)
