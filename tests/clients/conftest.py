"""Clients' own libraries in front of the proxy: over simulated engines in processes, or scripted ones in the test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from proxy.settings import load_settings
from tests.integration.fleet import start_engines
from tests.proxy.conftest import serving, start_proxy

__all__ = ["start_proxy"]  # a fixture of these tests as well


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """URL of a proxy over two simulated engines."""
    folder = tmp_path_factory.mktemp("fleet")
    async with contextlib.AsyncExitStack() as stack:
        engines = await start_engines(2, folder, "--engine-speed", "50")
        for engine in engines:
            stack.callback(engine.kill)
        instances = [{"name": f"inst-{number}", "url": engine.url} for number, engine in enumerate(engines)]
        settings = load_settings(None, port=0, instances=instances, health={"interval_s": 0.25}, log_level="error")
        _, url = await stack.enter_async_context(serving(settings))
        yield url
