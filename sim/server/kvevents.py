"""Publishes KV events as vLLM does: a ZMQ PUB socket with numbered batches, and a ROUTER that replays them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio

from sim.core.content import token_ids
from sim.core.kvevents import BlockRemoved, BlocksStored, KvEvent
from sim.server.settings import bracketed

TOPIC = b"kv-events"
_END = (-1).to_bytes(8, "big", signed=True)
_HIGH_WATER_MARK = 100_000
_KEPT_BATCHES = 10_000
_GOLDEN, _MASK = 0x9E3779B97F4A7C15, 2**63 - 1


class KvEventPublisher:
    """One engine's stream of events. ``open`` binds, ``run`` answers replays, ``close`` ends both."""

    def __init__(
        self, host: str, port: int, replay_port: int | None, block_tokens: int, hash_seed: int = 0, rank: int = 0
    ) -> None:
        """``hash_seed``: engines of different seeds give equal blocks different hashes; ``rank``: named in batches."""
        self._host = host
        self._port = port
        self._replay_port = replay_port
        self._block_tokens = block_tokens
        self._rank = rank
        self._hash_mask = hash_seed * _GOLDEN & _MASK
        self._sequence = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=_KEPT_BATCHES)
        self._context = zmq.asyncio.Context()
        self._publisher: zmq.Socket[bytes] | None = None
        self._replay: zmq.asyncio.Socket | None = None

    def open(self) -> None:
        """Bind the sockets.

        Raises:
            OSError: a port is taken.
        """
        try:
            self._publisher = zmq.Context(self._context).socket(zmq.PUB)
            self._publisher.set_hwm(_HIGH_WATER_MARK)
            self._publisher.setsockopt(zmq.IPV6, ":" in self._host)
            self._publisher.bind(f"tcp://{bracketed(self._host)}:{self._port}")
            if self._replay_port is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.IPV6, ":" in self._host)
                self._replay.bind(f"tcp://{bracketed(self._host)}:{self._replay_port}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(f"cannot publish KV events on {bracketed(self._host)}:{self._port}: {error}") from error

    def publish(self, events: Sequence[KvEvent], *, muted: bool = False) -> None:
        """Send one batch; nothing for no events. ``muted``: it is numbered and kept for replays only."""
        if not events or self._publisher is None:
            return
        payload = msgspec.msgpack.encode([time.time(), [self._wire(event) for event in events], self._rank])
        number = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._kept.append((number, payload))
        if not muted:
            self._publisher.send_multipart([TOPIC, number, payload], zmq.NOBLOCK)

    async def run(self) -> None:
        """Answer replay requests until cancelled."""
        if self._replay is None:
            return
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3:
                continue
            client, empty, start = frames
            for number, payload in [batch for batch in self._kept if batch[0] >= start]:
                await self._replay.send_multipart([client, empty, number, payload])
                await asyncio.sleep(0)
            await self._replay.send_multipart([client, empty, _END, b""])

    def close(self) -> None:
        """Close the sockets; what is not sent yet is lost."""
        for socket in (self._publisher, self._replay):
            if socket is not None:
                socket.close(linger=0)
        self._publisher = self._replay = None
        self._context.destroy(linger=0)

    def _wire(self, event: KvEvent) -> list[object]:
        if isinstance(event, BlocksStored):
            ids = token_ids(event.tokens)
            keys = [key ^ self._hash_mask for key in event.keys]
            parent = None if event.parent is None else event.parent ^ self._hash_mask
            return ["BlockStored", keys, parent, ids, self._block_tokens, None, "GPU", None, None]
        if isinstance(event, BlockRemoved):
            return ["BlockRemoved", [event.key ^ self._hash_mask], "GPU"]
        return ["AllBlocksCleared"]
