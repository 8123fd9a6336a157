"""Data-parallel ranks of one engine process: each an engine with its own KV pool, clock and events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.core.engine import Engine
from sim.server.asgi import Scope
from sim.server.driver import Driver, EngineClock
from sim.server.faults import Faults
from sim.server.metrics import EngineMetrics
from sim.server.parsing import ApiError
from sim.server.pulls import Puller
from sim.server.settings import ServerSettings

if TYPE_CHECKING:
    from sim.server.kvevents import KvEventPublisher

_HEADER = b"x-data-parallel-rank"


@dataclass(frozen=True, slots=True, eq=False)
class EngineRank:
    """One rank: its engine's driver and the publisher of its events."""

    number: int
    driver: Driver
    publisher: KvEventPublisher | None

    @property
    def engine(self) -> Engine:
        """Its engine."""
        return self.driver.engine


class EngineRanks:
    """All ranks of one process, and the choice among them. Owns their drivers, publishers and replays."""

    def __init__(
        self,
        settings: ServerSettings,
        engines: Sequence[Engine],
        metrics: EngineMetrics,
        puller: Puller,
        faults: Faults,
        on_dead: Callable[[], None],
    ) -> None:
        """Raise OSError: a port for KV events is taken."""
        self._clock = EngineClock(settings.time_scale)
        self._replaying: list[asyncio.Task[None]] = []
        self.all: list[EngineRank] = []
        try:
            for number, engine in enumerate(engines):
                self.all.append(self._made(number, engine, settings, metrics, puller, faults, on_dead))
        except OSError:
            self._close_publishers()
            raise

    def _made(
        self,
        number: int,
        engine: Engine,
        settings: ServerSettings,
        metrics: EngineMetrics,
        puller: Puller,
        faults: Faults,
        on_dead: Callable[[], None],
    ) -> EngineRank:
        publisher = _publisher(settings, number)
        if publisher is not None:
            engine.report_kv_events()
            publisher.open()

        def publish() -> None:
            if publisher is not None:
                publisher.publish(engine.take_kv_events(), muted=faults.mutes_events)

        driver = Driver(
            engine,
            self._clock,
            flush_s=settings.flush_s,
            stream_interval=settings.stream_interval,
            on_pull=lambda pull: puller.start(driver, pull),
            on_first_token=lambda seconds: metrics.first_token(seconds, number),
            on_dead=on_dead,
            on_step=publish,
        )
        return EngineRank(number, driver, publisher)

    def start(self) -> None:
        """Begin to answer replay requests."""
        self._replaying = [
            asyncio.create_task(rank.publisher.run(), name=f"kv-events {rank.number}")
            for rank in self.all
            if rank.publisher is not None
        ]

    def cut(self) -> None:
        """Stop the engines and cut every request off."""
        for rank in self.all:
            rank.driver.close()

    async def stop(self) -> None:
        """End the replays and close the sockets."""
        for task in self._replaying:
            task.cancel()
        await asyncio.gather(*self._replaying, return_exceptions=True)
        self._close_publishers()

    def _close_publishers(self) -> None:
        for rank in self.all:
            if rank.publisher is not None:
                rank.publisher.close()

    def chosen(self, scope: Scope) -> EngineRank:
        """The rank that a request's header names, else the least loaded one, as vLLM's own balancer chooses it.

        Raises:
            ApiError: 400 for a rank that there is not.
        """
        for name, value in scope["headers"]:
            if name == _HEADER and value.strip().lstrip(b"-").isdigit():
                number = int(value)
                if not 0 <= number < len(self.all):
                    raise ApiError(400, f"data_parallel_rank {number} is out of range [0, {len(self.all)}).")
                return self.all[number]
        return self.least_loaded()

    def least_loaded(self) -> EngineRank:
        """The rank with the fewest requests, of which a waiting one counts four times (vLLM 0.18.1)."""
        return min(self.all, key=lambda rank: 4 * rank.engine.waiting + len(rank.engine.scheduler.running))


def _publisher(settings: ServerSettings, rank: int) -> KvEventPublisher | None:
    """The publisher of one rank; its ports are those of rank 0 plus the rank, as vLLM counts them."""
    port, replay_port = settings.kv_events_port, settings.kv_events_replay_port
    if port is None:
        return None
    from sim.server.kvevents import KvEventPublisher  # with zmq, which other engines do not need

    return KvEventPublisher(
        settings.host,
        port + rank,
        None if replay_port is None else replay_port + rank,
        settings.config.block_tokens,
        settings.hash_seed,
        rank,
    )
