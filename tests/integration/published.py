"""Comparison of a proxy's place in an engine's KV events with what the engine has published, by its replay socket."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

_END = (-1).to_bytes(8, "big", signed=True)
_ANSWER_S = 20.0


async def nothing_from(replay_url: str, number: int) -> bool:
    """True if the engine has published no batch from this number on: a proxy that expects it next knows all of them.

    Asked twice: vLLM may answer a replay before it publishes what it has queued, but not two.
    """
    return await _ends_at_once(replay_url, number) and await _ends_at_once(replay_url, number)


async def _ends_at_once(replay_url: str, number: int) -> bool:
    context = zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.REQ)  # which takes the first message of the answer
        socket.connect(replay_url)
        async with asyncio.timeout(_ANSWER_S):
            await socket.send(number.to_bytes(8, "big"))
            first, *_ = await socket.recv_multipart()
    finally:
        context.destroy(linger=0)
    return first == _END
