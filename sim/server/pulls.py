"""KV transfers between engine processes: D calls P's bootstrap server, waits for the transfer time, updates its
engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from sim.core.handoff import Pull, PullAnswer, PullFailure, failure_delay_s
from sim.server.faults import Faults

if TYPE_CHECKING:
    import aiohttp

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
    """Pulls on D's side. Owns the tasks of pulls in flight and, unless the role is ``none``, their HTTP connections."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._tasks: set[asyncio.Task[None]] = set()
        self._client: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the HTTP client."""
        import aiohttp

        self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        """Give up all pulls in flight."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

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
        import aiohttp

        params = pull.params
        if not (params.transfer_id and params.remote_engine_id and params.remote_bootstrap_addr):
            return PullReply(failure=PullFailure.INVALID_PARAMS)
        if self._client is None:
            return PullReply(failure=PullFailure.UNREACHABLE)
        question = PullQuestion(params.transfer_id, params.remote_engine_id, pull.blocks, pull.streams, pull.transfers)
        url = params.remote_bootstrap_addr.rstrip("/") + "/sim/pull"
        try:
            async with self._client.post(
                url, data=msgspec.json.encode(question), timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                body = await response.read()
                if response.status != 200:
                    return PullReply(failure=PullFailure.UNREACHABLE)
                return msgspec.json.decode(body, type=PullReply)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return PullReply(failure=PullFailure.UNREACHABLE)
