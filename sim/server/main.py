"""Runs one engine process: two ports, one event loop; it ends promptly on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import uvicorn
import uvloop

from sim.server.app import BootstrapApp, EngineApp, EngineRoutes
from sim.server.driver import Driver, EngineClock
from sim.server.faults import Faults
from sim.server.kvevents import KvEventPublisher
from sim.server.metrics import EngineMetrics
from sim.server.pulls import Puller
from sim.server.settings import ServerSettings

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
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    ports = [settings.port] if settings.bootstrap_port is None else [settings.port, settings.bootstrap_port]
    sockets: list[socket.socket] = []
    try:
        for port in ports:
            try:
                sockets.append(socket.create_server((settings.host, port), backlog=2048))
            except (OSError, OverflowError) as error:
                print(f"engine: cannot listen on {settings.host}:{port}: {error}", file=sys.stderr)
                return 1
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, sockets))
    finally:
        for each in sockets:
            each.close()


async def _serve(settings: ServerSettings, sockets: list[socket.socket]) -> int:
    loop = asyncio.get_running_loop()
    stop = _Stop()
    loop.set_exception_handler(lambda _, context: _fatal(context, stop))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.now)
    settings = replace(settings, port=sockets[0].getsockname()[1])
    engine = settings.engine()
    faults = Faults()
    metrics = EngineMetrics(engine, settings)
    puller = Puller(faults)
    publisher = _publisher(settings)
    if publisher is not None:
        engine.report_kv_events()
        try:
            publisher.open()
        except OSError as error:
            print(f"engine: {error}", file=sys.stderr)
            return 1
    driver = Driver(
        engine,
        EngineClock(settings.time_scale),
        flush_s=settings.flush_s,
        stream_interval=settings.stream_interval,
        on_pull=lambda pull: puller.start(driver, pull),
        on_first_token=metrics.first_token,
        on_dead=stop.soon,
        on_step=lambda: (
            publisher.publish(engine.take_kv_events(), muted=faults.mutes_events) if publisher is not None else None
        ),
    )
    applications = [EngineApp(settings, driver, metrics, faults).routes()]
    if len(sockets) > 1:
        await puller.open()
        applications.append(BootstrapApp(settings, driver).routes())
    servers = [_server(application, settings) for application in applications]
    tasks = [
        asyncio.create_task(server.serve(sockets=[each]), name="http")
        for server, each in zip(servers, sockets, strict=True)
    ]
    replaying = asyncio.create_task(publisher.run(), name="kv-events") if publisher is not None else None
    try:
        _announce(settings, sockets)
        stopping = asyncio.create_task(stop.event.wait(), name="stop")
        await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
    finally:
        driver.close()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)
        await puller.close()
        if replaying is not None:
            replaying.cancel()
            await asyncio.gather(replaying, return_exceptions=True)
        if publisher is not None:
            publisher.close()
    return stop.exit_code


def _publisher(settings: ServerSettings) -> KvEventPublisher | None:
    port = settings.kv_events_port
    if port is None:
        return None
    return KvEventPublisher(
        settings.host, port, settings.kv_events_replay_port, settings.config.block_tokens, settings.hash_seed
    )


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
        "%s on http://%s:%d%s: profile %s, %d blocks of %d tokens, role %s, time scale %g, engine id %s",
        settings.model,
        settings.host,
        ports[0],
        bootstrap,
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
