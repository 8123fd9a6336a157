"""`warmroute serve --workers 2` as a process in front of scripted engines."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count as counter
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from tests.proxy.serve_process import ServeProcess, serve_process, until
from tests.proxy.stub_engine import StubEngine

KEY = "an-admin-key-of-these-tests-0001"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}


class Workers:
    """Running workers, their engines, and their parent."""

    def __init__(self, served: ServeProcess, engines: list[StubEngine], folder: Path, admin_port: int | None) -> None:
        self.served = served
        self.admin = served.url if admin_port is None else f"http://127.0.0.1:{admin_port}"
        self.engines = engines
        self.folder = folder
        self._numbers = counter()

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON of an admin endpoint."""
        answer = await self.served.client.get(self.admin + path, headers=AUTHORIZED)
        found: dict[str, Any] = answer.json()
        return found

    async def stats(self) -> list[dict[str, Any]]:
        """The workers' rows."""
        rows: list[dict[str, Any]] = (await self.get("/stats"))["workers"]
        return rows

    async def ready(self) -> bool:
        """True if all workers serve."""
        answer = await self.served.client.get("/ready?verbose")
        workers = [each for each in answer.json()["conditions"] if each["name"] == "workers"]
        return answer.status_code == 200 and workers[0]["ok"]

    async def completed(self, count: int, **body: Any) -> list[str]:
        """Send requests, each with a new prompt on a connection of its own; returns the instances that answered.

        All are counted when it returns, except streams: a worker counts a request after its client has the answer.
        """
        instances = []
        for number in islice(self._numbers, count):
            async with self.new_client() as client:
                wanted = {"model": "stub", "prompt": [number, *range(64)], "max_tokens": 4, **body}
                answer = await client.post("/v1/completions", json=wanted)
                assert answer.status_code == 200, answer.text
                instances.append(answer.headers["x-warmroute-instance"])
        if not body.get("stream"):
            await until(self._idle)
        return instances

    async def kill(self, pid: int) -> None:
        """Kill a worker and wait for its end: before that a connection to it looks usable, and breaks when used."""
        os.kill(pid, signal.SIGKILL)

        async def gone() -> bool:
            return not psutil.pid_exists(pid)

        await until(gone)

    async def _idle(self) -> bool:
        return not any(row["in_flight"] for row in await self.stats())

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels."""
        text = (await self.served.client.get("/metrics", headers=AUTHORIZED)).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def new_client(self) -> httpx.AsyncClient:
        """A client with connections of its own, whose worker the kernel chooses."""
        return httpx.AsyncClient(base_url=self.served.url, timeout=30, trust_env=False, headers=AUTHORIZED)


async def _ended(served: ServeProcess) -> None:
    """End the parent without waiting for requests, so that it removes its folder."""
    with contextlib.suppress(ProcessLookupError):
        served.send(signal.SIGTERM)
        served.send(signal.SIGTERM)
    await served.ended()


@contextlib.asynccontextmanager
async def running(
    folder: Path, count: int = 2, engines: Sequence[StubEngine] | int = 2, **settings: Any
) -> AsyncIterator[Workers]:
    """A proxy of ``count`` workers in front of ``engines``; all of them serve."""
    async with contextlib.AsyncExitStack() as stack:
        fleet = [StubEngine() for _ in range(engines)] if isinstance(engines, int) else list(engines)
        for engine in fleet:
            await engine.start()
            stack.push_async_callback(engine.stop)
        known = [{"name": f"inst-{number}", "url": each.url} for number, each in enumerate(fleet)]
        given = {
            "workers": count,
            "instances": known,
            "health": {"interval_s": 0.2},
            "keys": {"admin": [{"name": "op", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]},
            **settings,
        }
        served = await stack.enter_async_context(serve_process(folder / "proxy.yaml", given))
        stack.push_async_callback(_ended, served)
        workers = Workers(served, fleet, folder, settings.get("admin", {}).get("port"))
        await until(workers.ready)
        yield workers


StartWorkers = Callable[..., Awaitable[Workers]]


@pytest.fixture
async def start_workers(tmp_path: Path) -> AsyncIterator[StartWorkers]:
    """``await start_workers(2, engines=2, **settings)``: all workers serve when it returns."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*arguments: Any, **settings: Any) -> Workers:
            return await stack.enter_async_context(running(tmp_path, *arguments, **settings))

        yield start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    """Two workers and two engines of a module: a start takes three seconds of the processor.

    Their rows go to ``rows.worker-N.jsonl``, requests to ``access.jsonl``, both in ``folder``. A test leaves them as it
    found them, but for requests that it has sent.
    """
    folder = tmp_path_factory.mktemp("workers")
    async with running(folder, **files_in(folder)) as workers:
        yield workers


def files_in(folder: Path) -> dict[str, Any]:
    """Settings of the files of ``two_workers``."""
    return {
        "breakdown": {"jsonl_path": str(folder / "rows.jsonl")},
        "logs": {"access": str(folder / "access.jsonl")},
    }
