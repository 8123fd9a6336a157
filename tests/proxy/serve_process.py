"""`warmroute serve` as a process, for tests of signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

_RUNNING = re.compile(r"running on https?://[^:]+:(\d+)")


def write_settings(config: Path, settings: dict[str, Any]) -> None:
    """Write a settings file for a proxy on a free port."""
    config.write_text(yaml.safe_dump({"port": 0, **settings}), encoding="utf-8")


class ServeProcess:
    """A proxy process, its log so far, and a client for it."""

    client: httpx.AsyncClient

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._more = asyncio.Event()
        self.lines: list[str] = []
        self.url = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    async def follow(self) -> None:
        """Read the log up to its end."""
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self.lines.append(line.decode())
            self._more.set()
        self._more.set()

    async def logged(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the log, including those already there."""
        expression, seen = re.compile(pattern), 0
        async with asyncio.timeout(90):
            while True:
                for line in self.lines[seen:]:
                    seen += 1
                    found = expression.search(line)
                    if found:
                        return found
                self._more.clear()
                if self._process.returncode is not None:
                    raise AssertionError(f"the proxy ended without saying {pattern!r}:\n{''.join(self.lines)}")
                await self._more.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Exit code, once the process has ended."""
        async with asyncio.timeout(60):
            return await self._process.wait()


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait for an external condition."""
    for _ in range(3000):
        if await holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("condition did not come true in 60 s")


@contextlib.asynccontextmanager
async def serve_process(
    config: Path, settings: dict[str, Any], *flags: str, program: tuple[str, str] = ("-m", "proxy"), **env: str
) -> AsyncIterator[ServeProcess]:
    """Serve with ``settings``, written to ``config``, on a free port; ``program``: Python's arguments."""
    write_settings(config, settings)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *program, "--config", str(config), *flags),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **env},
    )
    served = ServeProcess(process)
    following = asyncio.create_task(served.follow())
    try:
        served.url = f"http://127.0.0.1:{(await served.logged(_RUNNING.pattern)).group(1)}"
        async with httpx.AsyncClient(base_url=served.url, timeout=30, trust_env=False) as served.client:
            yield served
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await following
