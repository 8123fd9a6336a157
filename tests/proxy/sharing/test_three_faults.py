"""Eight replicas as processes, 2,000 requests, and three faults: the store, a replica and an engine are killed.

Every answer that is complete is the right one; only streams on what was killed break; nothing stays counted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bench.replicas.processes import ReplicaProcess, replica_processes
from tests.proxy.sharing.store_server import StoreServer, needs_store
from tests.proxy.stub_engine import StubEngine

pytestmark = [needs_store, pytest.mark.fleet]

REPLICAS = 8
REQUESTS = 2_000
STREAMS = 32
TOKENS = 4
TTL_S = 2.0
STOP_AT = 1_500
"""Requests after which an engine is killed."""
VICTIM = 3
"""The replica that is killed."""


class EchoEngine(StubEngine):
    """Answers with the first token id of the prompt, so that an answer to another request is recognised."""

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(TOKENS):
            choice = {"index": 0, "text": f"{body['prompt'][0]}.{number} ", "finish_reason": None}
            chunk = {"id": "x", "object": "text_completion", "model": self.model, "choices": [choice]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(0.005)
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(b"data: " + json.dumps(self.usage_event(body)).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


class Outcome:
    """Result of one request: the text so far, and if its stream was complete."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.replica = -1
        self.instance = ""
        self.text = ""
        self.complete = False
        self.failure = ""

    @property
    def expected(self) -> str:
        return "".join(f"{self.number}.{token} " for token in range(TOKENS))


class Balancer:
    """Round robin over the replicas that accept connections, as a load balancer with connection retries."""

    def __init__(self, replicas: list[ReplicaProcess], session: aiohttp.ClientSession) -> None:
        self._replicas = replicas
        self._session = session
        self._turn = itertools.count()

    async def ask(self, number: int) -> Outcome:
        outcome = Outcome(number)
        body = {"model": "stub", "prompt": [number, *range(320)], "max_tokens": TOKENS, "stream": True}
        first = next(self._turn)
        for attempt in range(REPLICAS):
            outcome.replica = (first + attempt) % REPLICAS
            url = f"{self._replicas[outcome.replica].url}/v1/completions"
            try:
                async with self._session.post(
                    url, json=body, headers={"x-session-id": f"session-{number % 200}"}
                ) as response:
                    outcome.instance = response.headers.get("x-warmroute-instance", "")
                    if response.status != 200:
                        outcome.failure = f"{response.status} {await response.text()}"
                        return outcome
                    async for line in response.content:
                        _read(line, outcome)
            except aiohttp.ClientConnectorError:
                continue  # nothing was sent
            except aiohttp.ClientError as error:
                outcome.failure = repr(error)
            return outcome
        raise AssertionError("no replica accepts connections")


def _read(line: bytes, outcome: Outcome) -> None:
    if not line.startswith(b"data: "):
        return
    if line.strip() == b"data: [DONE]":
        outcome.complete = True
        return
    event = json.loads(line[6:])
    if "error" in event:
        outcome.failure = json.dumps(event["error"])
    outcome.text += "".join(choice["text"] for choice in event.get("choices", []))


class Watch:
    """Reads the replicas' own figures."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def read(self, replica: ReplicaProcess, path: str) -> dict[str, Any]:
        """Answer of a path; empty while the replica does not answer."""
        assert replica.alive
        try:
            async with self._session.get(replica.url + path) as response:
                answer: dict[str, Any] = await response.json()
        except aiohttp.ClientConnectorError:
            return {}
        return answer

    async def all_know(self, replicas: list[ReplicaProcess], others: int) -> bool:
        return all([len((await self.read(each, "/replicas")).get("others", ())) == others for each in replicas])

    async def all_count(self, replicas: list[ReplicaProcess], requests: int) -> bool:
        return all([counted(await self.read(each, "/replicas")) == requests for each in replicas])


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition of other processes."""
    for _ in range(600):
        if await holds():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("condition did not come true in a minute")


def counted(table: dict[str, Any]) -> int:
    """Requests in flight on all replicas, as one of them knows them; -1 while it does not answer."""
    if not table:
        return -1
    return sum(row["requests"] for row in table["load"].values()) + sum(other["requests"] for other in table["others"])


@pytest.mark.timeout(180)
async def test_three_faults_give_no_wrong_answer_no_leak_and_counts_that_agree(tmp_path: Path) -> None:
    store = StoreServer(tmp_path)
    engines = [await EchoEngine().start() for _ in range(4)]
    instances = [{"name": f"inst-{i}", "url": engine.url} for i, engine in enumerate(engines)]

    def settings(number: int) -> dict[str, Any]:
        return {
            "instances": instances,
            "health": {"interval_s": 0.5, "timeout_s": 10.0},
            "log_level": "error",
            "sharing": {"url": store.url, "replica": f"replica-{number}", "ttl_s": TTL_S},
        }

    store.start()
    try:
        with replica_processes(REPLICAS, tmp_path, settings) as replicas:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
                watch = Watch(session)
                await until(lambda: watch.all_know(replicas, REPLICAS - 1))
                _judge(await _drive(Balancer(replicas, session), replicas, engines, store))
                survivors = [each for number, each in enumerate(replicas) if number != VICTIM]
                await until(lambda: watch.all_know(survivors, REPLICAS - 2))
                await until(lambda: watch.all_count(survivors, 0))
                for each in survivors:
                    stats = await watch.read(each, "/stats")
                    assert not any(stats["ledger"].values()), stats["ledger"]
                    assert stats["requests"]["in_flight"] == 0
                await _counts_agree_under_load(watch, survivors, engines, session)
    finally:
        store.kill()
        for engine in engines:
            await engine.stop()


async def _drive(
    balancer: Balancer, replicas: list[ReplicaProcess], engines: Sequence[StubEngine], store: StoreServer
) -> list[Outcome]:
    """Send all requests, and cause each fault when so many have been sent."""
    numbers = iter(range(REQUESTS))
    outcomes: list[Outcome] = []
    faults: dict[int, Callable[[], object]] = {
        500: store.kill,
        900: store.start,
        1_200: replicas[VICTIM].kill,
        STOP_AT: lambda: stopping.append(asyncio.create_task(engines[0].stop())),
    }
    stopping: list[asyncio.Task[None]] = []

    async def stream() -> None:
        for number in numbers:
            if number in faults:
                faults[number]()
            outcomes.append(await balancer.ask(number))

    await asyncio.gather(*(stream() for _ in range(STREAMS)), *stopping)
    await asyncio.gather(*stopping)
    return outcomes


def _judge(outcomes: list[Outcome]) -> None:
    assert sorted(outcome.number for outcome in outcomes) == list(range(REQUESTS))
    broken = [outcome for outcome in outcomes if not outcome.complete]
    for outcome in outcomes:
        right = outcome.text == outcome.expected if outcome.complete else outcome.expected.startswith(outcome.text)
        assert right, (outcome.number, outcome.text)
    assert len(broken) <= 2 * STREAMS, Counter(outcome.failure for outcome in broken)
    for outcome in broken:
        killed = outcome.replica == VICTIM or (outcome.instance == "inst-0" and outcome.number >= STOP_AT - STREAMS)
        assert killed, (outcome.number, outcome.replica, outcome.instance, outcome.failure)


async def _counts_agree_under_load(
    watch: Watch, replicas: list[ReplicaProcess], engines: Sequence[StubEngine], session: aiohttp.ClientSession
) -> None:
    for engine in engines:
        engine.mode = "hang"
    body = {"model": "stub", "prompt": [1] * 64, "max_tokens": TOKENS}

    async def hang(replica: ReplicaProcess) -> None:
        async with session.post(f"{replica.url}/v1/completions", json=body) as response:
            await response.read()

    hanging = [asyncio.create_task(hang(replica)) for replica in replicas for _ in range(3)]
    try:
        await until(lambda: watch.all_count(replicas, len(hanging)))
    finally:
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
    await until(lambda: watch.all_count(replicas, 0))
