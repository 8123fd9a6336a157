"""Operations on the engines and the proxy in front of them, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from launch.fleet.file import FleetFile
from launch.run.state import ProcessState, read_state

REAL_ENGINES = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),  # the first test's includes the start of the engines
]
"""``pytestmark`` of a module that needs the engines."""

QUICK_START = {"PYTHONPATH": str(Path(__file__).parent / "quick_start")}
"""Variable of processes that import vLLM, which then takes them less time."""
QUICK_ENGINES = f"env.PYTHONPATH={QUICK_START['PYTHONPATH']}"
"""The same, as an override of a fleet file."""

BLOCK = 16
"""Tokens of the engines' KV blocks."""


RUN_VARIABLE = "WARMROUTE_ENGINES_RUN"
"""Run directory of a running fleet, to be used while writing tests (docs/engines.md)."""

_draw = random.Random()


def begin_prompts(test: str) -> None:
    """Draw the same prompts for a test in each run of the suite.

    Engines compute the two likeliest tokens of some prompts as equal but for rounding, which depends on the batch: then
    two right answers differ, and other prompts in each run would meet such a pair now and then. Engines that were
    running before have these prompts in their caches, so theirs are drawn differently each time.
    """
    _draw.seed(None if os.environ.get(RUN_VARIABLE) else test)


def fresh_prompt(tokens: int) -> list[int]:
    """Token ids of ordinary vocabulary entries that no engine has seen."""
    return [_draw.randrange(10, 2000) for _ in range(tokens)]


def fresh_text(length: int) -> str:
    """Text of about this many bytes that no engine has seen."""
    words = ["import", "return", "value", "class", "self", "none", "path", "error", "list", "for", "while", "str"]
    return " ".join(f"{_draw.choice(words)}{_draw.randrange(100)}" for _ in range(length // 7))


ABORT_S = 12
"""Time after which P drops a transfer that is not pulled: short, so that a test can wait for it, and longer than a
request waits in D's queue on two busy processors.
"""


POLL_S = 0.03
"""Tests wait for hundreds of conditions, most of which are true within milliseconds."""


async def until(holds: Callable[[], Awaitable[bool]], what: str, bound_s: float = 60.0) -> None:
    """Wait until a condition is true."""
    deadline = asyncio.get_running_loop().time() + bound_s
    while True:
        if await holds():
            return
        assert asyncio.get_running_loop().time() < deadline, f"not within {bound_s:g} s: {what}"
        await asyncio.sleep(POLL_S)


@dataclass
class Engines:
    """The fleet of real engines, by number."""

    file: FleetFile
    run_dir: Path
    client: httpx.AsyncClient
    killed: dict[int, int] = field(default_factory=dict)
    """Restarts of an engine before it was killed: it is back only after one more."""

    def state(self, number: int) -> ProcessState:
        """Its current record in the supervisor's state file."""
        name = self.file.name(number)
        return next(found for found in read_state(self.run_dir).processes if found.name == name)

    def name(self, number: int) -> str:
        return self.file.name(number)

    def number(self, name: str) -> int:
        return next(number for number in range(self.file.instances) if self.file.name(number) == name)

    def log(self, number: int) -> str:
        """All that it has printed, over its restarts."""
        return Path(self.state(number).log).read_text(errors="replace")

    def signal(self, number: int, signum: int) -> None:
        """Signal the engine's whole tree (API server, engine core, their children) except its guard, the root."""
        for process in psutil.Process(self.state(number).pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)

    def kill(self, number: int) -> None:
        self.killed[number] = self.state(number).restarts
        self.signal(number, signal.SIGKILL)

    def resume_all(self) -> None:
        for number in range(self.file.instances):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.signal(number, signal.SIGCONT)

    async def metrics(self, number: int) -> dict[str, float]:
        """Samples by name, summed over labels."""
        answer = await self.client.get(f"{self.file.url(number)}/metrics")
        found: dict[str, float] = defaultdict(float)
        for line in answer.text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name.split("{")[0]] += float(value)
        return found

    async def total(self, metric: str, *which: int) -> float:
        return sum([(await self.metrics(number))[metric] for number in which])

    async def post(self, number: int, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
        """Send a request directly to one engine; a whole answer of 2,000 tokens takes a minute on a busy machine."""
        answer = await self.client.post(f"{self.file.url(number)}{path}", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def until_idle(self, *which: int, bound_s: float = 30.0) -> None:
        """All of them answer; no request is running or waiting."""

        async def idle() -> bool:
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            try:
                for number in which:  # an engine whose core is dead still shows its metrics for a moment
                    if (await self.client.get(f"{self.file.url(number)}/health")).status_code != 200:
                        return False
                return not any([await self.total(name, *which) for name in names])
            except httpx.TransportError:
                return False

        await until(idle, f"engines {which} idle", bound_s)

    async def until_all_ready(self) -> None:
        """Wait until every engine is up, restarted ones included."""

        async def ready() -> bool:
            for number in range(self.file.instances):
                state = self.state(number)
                assert state.status != "exited", f"{state.name} is gone for good; log: {state.log}"
                if state.status != "ready" or state.restarts <= self.killed.get(number, -1):
                    return False
            return True

        await until(ready, "all engines ready", 240)


@dataclass
class Said:
    """One answer, streamed or not."""

    status: int
    request_id: str
    instance: str = ""
    """The decoding instance, by the header that comes before the first token."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False

    @property
    def answer(self) -> tuple[str, tuple[int, ...], str | None]:
        """The fields that are equal in two equal answers."""
        assert self.status == 200, self.error
        assert self.error is None, self.error
        assert self.token_ids
        return self.text, tuple(self.token_ids), self.finish_reason

    def take(self, part: dict[str, Any]) -> None:
        """Add an answer, or one event of a stream."""
        self.error = part.get("error") or self.error
        self.usage = part.get("usage") or self.usage
        for choice in part.get("choices", []):
            message = choice.get("message") or choice.get("delta") or {}
            self.text += choice.get("text") or message.get("content") or ""
            self.token_ids += choice.get("token_ids") or []
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


async def sse_data(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Data of each event. Split at line feeds only: texts of a random model contain all other line separators."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line[6:]


@dataclass
class Proxy:
    """A running proxy and a client for it."""

    url: str
    client: httpx.AsyncClient
    model: str

    def body(self, prompt: list[int] | str, **more: Any) -> dict[str, Any]:
        """A request body; text for chat is put into a message. Token ids are returned, to compare them."""
        chat = more.pop("chat", False)
        what = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        return {"model": self.model, "max_tokens": 16, "temperature": 0, "return_token_ids": True, **what, **more}

    async def say(
        self, body: dict[str, Any], *, bound_s: float = 90.0, on_event: Callable[[Said], None] | None = None
    ) -> Said:
        """Send a request and read the whole answer; an answer that does not end fails the test."""
        request_id = f"t-{uuid.uuid4().hex}"
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        said = Said(0, request_id)
        try:
            async with (
                asyncio.timeout(bound_s),
                self.client.stream("POST", path, json=body, headers={"x-request-id": request_id}) as answer,
            ):
                said.status = answer.status_code
                said.instance = answer.headers.get("x-warmroute-instance", "")
                if not body.get("stream") or answer.status_code != 200:
                    said.take(json.loads(await answer.aread()))
                    said.done = True
                    return said
                async for event in sse_data(answer):
                    if event == b"[DONE]":
                        said.done = True
                        continue
                    said.take(json.loads(event))
                    if on_event is not None:
                        on_event(said)
        except TimeoutError:
            raise AssertionError(f"no end of the answer within {bound_s:g} s: {await self.row(request_id)}") from None
        return said

    async def row(self, request_id: str) -> dict[str, Any] | None:
        """The breakdown row of one request, once it ended."""
        for _ in range(round(5.0 / POLL_S)):
            found = await self.rows(request_id=request_id)
            if found:
                return found[0]
            await asyncio.sleep(POLL_S)
        return None

    async def rows(self, **query: Any) -> list[dict[str, Any]]:
        answer = await self.client.get("/breakdown", params={"limit": 10_000, **query})
        return list(answer.json()["rows"])

    async def instance(self, name: str) -> dict[str, Any]:
        rows = (await self.client.get("/instances")).json()["instances"]
        return next(row for row in rows if row["name"] == name)

    async def until_healthy(self, *names: str, bound_s: float = 60.0) -> None:
        async def healthy() -> bool:
            return all([(await self.instance(name))["healthy"] for name in names])

        await until(healthy, f"the proxy reports {', '.join(names)} healthy", bound_s)

    async def settled(self) -> dict[str, Any]:
        """Statistics once nothing is in flight and the ledger is zero."""

        async def quiet() -> bool:
            requests = (await self.client.get("/stats")).json()["requests"]
            return not requests["in_flight"] and not requests["abandoned_pulls"]

        await until(quiet, "no request in flight in the proxy, no abandoned pull still open", 60)
        stats = dict((await self.client.get("/stats")).json())
        assert not any(stats["ledger"].values()), stats["ledger"]
        return stats


async def until_trusted(proxy: Proxy, *names: str) -> None:
    """Wait until the exact index of these instances is trusted."""

    async def trusted() -> bool:
        return all([(await proxy.instance(name))["kv_events"]["trusted"] for name in names])

    await until(trusted, f"the exact index of {', '.join(names)} is trusted", 30)


@contextlib.asynccontextmanager
async def many(coroutines: list[Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Tasks that are cancelled at the end of the block."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
