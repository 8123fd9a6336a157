"""The real proxy in front of simulated engines in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.core import Core
from proxy.settings import load_settings
from tests.integration.fleet import SimEngine, free_port, start_engines
from tests.proxy.conftest import serving


@dataclass
class Cluster:
    core: Core
    url: str
    engines: list[SimEngine]
    client: httpx.AsyncClient


StartCluster = Callable[..., Awaitable[Cluster]]


@pytest.fixture
async def start_cluster(tmp_path: Path) -> AsyncIterator[StartCluster]:
    """``await start_cluster(count, *engine_flags, every={}, models=(), **proxy_settings)``.

    ``every`` applies to all instances; ``models`` has one of each engine.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def start(count: int, *flags: str, **overrides: Any) -> Cluster:
            engines = await start_engines(count, tmp_path, *flags, models=overrides.pop("models", ()))
            for engine in engines:
                stack.callback(engine.kill)
            every = overrides.pop("every", {})
            settings = load_settings(
                None,
                **{
                    "port": 0,
                    "instances": [
                        {
                            "name": f"inst-{number}",
                            "url": engine.url,
                            "bootstrap_url": engine.bootstrap_url,
                            "role": "kv_both",
                            **every,
                        }
                        for number, engine in enumerate(engines)
                    ],
                    "health": {"interval_s": 0.25},
                    "log_level": "error",
                    **overrides,
                },
            )
            app, url = await stack.enter_async_context(serving(settings))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60, trust_env=False))
            return Cluster(app.core, url, engines, client)

        yield start


StartListening = Callable[..., Awaitable[Cluster]]


@pytest.fixture
async def start_listening(tmp_path: Path) -> AsyncIterator[StartListening]:
    """``await start_listening(count, *engine_flags, replay=True, **proxy_settings)``.

    Without ``replay``, an engine whose first event precedes the subscription is never trusted.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def start(count: int, *flags: str, replay: bool = True, **overrides: Any) -> Cluster:
            engines, instances = [], []
            for number in range(count):
                events, again = free_port(), free_port()
                publishing = ("--kv-events-port", str(events), "--kv-events-replay-port", str(again))
                engine = SimEngine(tmp_path / f"engine-{number}.log", (*flags, *publishing))
                stack.callback(engine.kill)
                engine.start()
                engines.append(engine)
                instances.append(
                    {
                        "name": f"inst-{number}",
                        "url": engine.url,
                        "bootstrap_url": engine.bootstrap_url,
                        "role": "kv_both",
                        "events_url": f"tcp://127.0.0.1:{events}",
                        "events_replay_url": f"tcp://127.0.0.1:{again}" if replay else None,
                    }
                )
            async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
                await asyncio.gather(*(engine.healthy(client) for engine in engines))
            given = {
                "port": 0,
                "instances": instances,
                "health": {"interval_s": 0.25},
                "events": {"join_interval_s": 0.1},
                "log_level": "error",
            }
            app, url = await stack.enter_async_context(serving(load_settings(None, **{**given, **overrides})))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60, trust_env=False))
            return Cluster(app.core, url, engines, client)

        yield start
