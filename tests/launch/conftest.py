"""Free port ranges, fleets of stubs, and a check that nothing is left running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.engines.commands import KINDS
from launch.fleet.file import FleetFile, parse_fleet
from tests.launch.stub_launch import StubEngine

REPOSITORY = Path(__file__).resolve().parents[2]
STUB_LAUNCH = [sys.executable, "-m", "tests.launch.stub_launch"]
_SPAN = 40


def _worker() -> int:
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


_next_base = 21000 + 2000 * _worker() + (os.getpid() % 40) * _SPAN


def free_base() -> int:
    """First port of a range of `_SPAN` free ones; below the range the kernel hands out itself."""
    global _next_base
    while True:
        base, _next_base = _next_base, _next_base + _SPAN
        with contextlib.ExitStack() as held:
            try:
                for port in range(base, base + _SPAN):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        return base


def fleet_values(count: int = 2, **values: Any) -> dict[str, Any]:
    """A small fleet on free ports, as the contents of a fleet file."""
    base = free_base()
    return {
        "kind": "sim",
        "count": count,
        "base_port": base,
        "base_bootstrap_port": base + 10,
        "ready_timeout_s": 90,
        "stop_grace_s": 3,
        "proxy": {"port": base + 20},
        **values,
    }


@pytest.fixture
def small_fleet() -> Callable[..., FleetFile]:
    """Makes a checked small fleet."""
    return lambda **values: parse_fleet(fleet_values(**values))


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the simulated engine by the stub, with the given arguments."""

    def use(*arguments: str) -> None:
        monkeypatch.setitem(KINDS, "sim", StubEngine(*arguments))

    use()
    return use


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Fail when the test leaves a child process of this one running."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not left, left


def until(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """Wait for a condition to hold and return its value; fails after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition was never true"
        time.sleep(0.05)
    return value


async def soon(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Wait on the event loop for a condition to hold; TimeoutError after ``limit_s``."""
    async with asyncio.timeout(limit_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)
