"""KV transfers between engine processes: D calls P's bootstrap server, waits for the transfer time, updates its
engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from sim.core.handoff import Pull, PullAnswer, PullFailure, failure_delay_s
from sim.server.faults import Faults

if TYPE_CHECKING:
    from sim.server.driver import Driver

_GRACE_S = 30.0
"""Wall seconds that a pull may take beyond the time P itself may wait."""


class PullQuestion(msgspec.Struct):
    """Body of POST /sim/pull on P's bootstrap port."""

    transfer_id: str
    engine_id: str
    blocks: int
    streams: int = 0
    transfers: int = 0


class PullReply(msgspec.Struct):
    """The answer to a pull: engine seconds that the transfer takes, or the reason for which there is none."""

    seconds: float = 0.0
    failure: PullFailure | None = None


async def serve_pull(driver: Driver, question: PullQuestion) -> PullReply:
    """Serve a pull on P's side. P waits for a transfer id that it does not hold yet, up to its abort timeout."""
    answer = _serve_now(driver, question)
    if answer.failure is PullFailure.UNKNOWN_TRANSFER:
        await driver.wait_until_held(question.transfer_id, driver.engine.config.abort_timeout_s)
        answer = _serve_now(driver, question)
    return PullReply(answer.seconds, answer.failure)


def _serve_now(driver: Driver, question: PullQuestion) -> PullAnswer:
    return driver.engine.serve_pull(
        question.transfer_id,
        question.engine_id,
        question.blocks,
        question.streams,
        question.transfers,
        driver.clock.now(),
    )


class Puller:
    """Pulls on D's side. Owns the tasks of pulls in flight, which own their connections."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Give up all pulls in flight."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self, driver: Driver, pull: Pull) -> None:
        """Begin a pull; its outcome goes to ``driver.end_pull``."""
        task = asyncio.get_running_loop().create_task(self._pull(driver, pull), name=f"pull {pull.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pull(self, driver: Driver, pull: Pull) -> None:
        fault = self._faults.for_pull()
        if fault is not None and fault.mode == "kv_pull_hang":
            return
        if fault is not None:
            driver.end_pull(pull.request_id, arrived=False)
            return
        timeout_s = driver.engine.config.abort_timeout_s
        reply = await self._request_pull(pull, timeout_s / driver.clock.time_scale + _GRACE_S)
        # P has itself waited for a transfer id that it does not hold.
        if reply.failure is None:
            wait_s = reply.seconds
        elif reply.failure is PullFailure.UNKNOWN_TRANSFER:
            wait_s = 0.0
        else:
            wait_s = failure_delay_s(reply.failure, timeout_s)
        await asyncio.sleep(wait_s / driver.clock.time_scale)
        driver.end_pull(pull.request_id, arrived=reply.failure is None)

    async def _request_pull(self, pull: Pull, timeout_s: float) -> PullReply:
        params = pull.params
        if not (params.transfer_id and params.remote_engine_id and params.remote_bootstrap_addr):
            return PullReply(failure=PullFailure.INVALID_PARAMS)
        question = PullQuestion(params.transfer_id, params.remote_engine_id, pull.blocks, pull.streams, pull.transfers)
        url = params.remote_bootstrap_addr.rstrip("/") + "/sim/pull"
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await _post(url, msgspec.json.encode(question))
            if status != 200:
                return PullReply(failure=PullFailure.UNREACHABLE)
            return msgspec.json.decode(body, type=PullReply)
        except (OSError, TimeoutError, ValueError, msgspec.MsgspecError):
            return PullReply(failure=PullFailure.UNREACHABLE)


async def _post(url: str, body: bytes) -> tuple[int, bytes]:
    """Status and content of the answer of another engine, on a connection of its own.

    An HTTP client library would take a third of the time in which an engine starts.

    Raises:
        OSError: nothing listens there, or the connection broke.
        ValueError: the URL or the answer is not HTTP.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ValueError(f"not the URL of a bootstrap server: {url!r}")
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\ncontent-length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        answer = await reader.read()
    finally:
        writer.close()
    start, _, content = answer.partition(b"\r\n\r\n")
    version, _, rest = start.partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise ValueError("not an HTTP answer")
    return int(rest[:3]), content
