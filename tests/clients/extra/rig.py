"""Running a client's program in front of the proxy, and reading what the proxy recorded of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.clients.table import TRAFFIC

EXTRA = [
    pytest.mark.clients_extra,
    pytest.mark.fleet,
    pytest.mark.timeout(300),
]
"""``pytestmark`` of a module whose client has an environment of its own."""

PROGRAMS = Path(__file__).parent / "programs"
MODEL = "warm-sim"
RUN_S = 120.0
"""Bound of one run of a client; the longest takes 20 s."""


class Platform(NamedTuple):
    """Names of this platform in packages of npm and in Rust's triples."""

    npm: str
    triple: str

    @classmethod
    def here(cls) -> Platform | None:
        """This platform; None if the locked packages have no program for it."""
        if sys.platform != "linux":
            return None
        return {
            "x86_64": cls("linux-x64", "x86_64-unknown-linux-musl"),
            "aarch64": cls("linux-arm64", "aarch64-unknown-linux-musl"),
        }.get(platform.machine())


class Outcome(NamedTuple):
    """Exit status and output of a client's run."""

    code: int
    out: str
    err: str

    @property
    def checked(self) -> str:
        """Standard output of a run that succeeded."""
        assert self.code == 0, f"exit status {self.code}\n{self.out[-4000:]}\n{self.err[-4000:]}"
        return self.out


@dataclass
class Client:
    """A client's environment, the empty folder that is its home, and its folder for temporary files."""

    environment: Path
    folder: Path
    temporary: Path
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of all its runs, besides those of `_environment`."""

    @property
    def work(self) -> Path:
        """Folder that it runs in."""
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        return work

    async def run(self, program: str, *arguments: str, bound_s: float = RUN_S) -> Outcome:
        """Run a program to its end; a path is relative to the environment, ``NAME.py`` one of `PROGRAMS`.

        Raises:
            TimeoutError: it was killed after ``bound_s``.
        """
        async with self.running(program, *arguments) as process:
            out, err = await asyncio.wait_for(process.communicate(), bound_s)
        assert process.returncode is not None
        return Outcome(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))

    @contextlib.asynccontextmanager
    async def running(
        self, program: str, *arguments: str, log: Path | None = None
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """A program meanwhile, with its output in ``log`` or in pipes; killed with its children in the end."""
        if program.endswith(".py"):
            arguments = (str(PROGRAMS / program), *arguments)
            program = "bin/python"
        with contextlib.ExitStack() as files:
            output = files.enter_context(log.open("wb")) if log else asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                str(self.environment / program),
                *arguments,
                cwd=self.work,
                env=self._environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def _environment(self) -> dict[str, str]:
        """Nothing of this process's own variables, and no way to any other machine."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        nowhere = "http://127.0.0.1:9"
        return {
            "PATH": f"{self.environment / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "TMPDIR": str(self.temporary),
            "LANG": "C.UTF-8",
            "HTTP_PROXY": nowhere,
            "HTTPS_PROXY": nowhere,
            "NO_PROXY": "127.0.0.1,localhost",
            **self.variables,
        }


@dataclass
class Recorded:
    """Breakdown rows of a proxy that were not seen yet."""

    url: str
    seen: set[str] = field(default_factory=set)

    async def new(self, count: int) -> list[dict[str, Any]]:
        """Exactly this many new rows, oldest first. A row is written shortly after its answer has been read."""
        for _ in range(600):
            fresh = await self._fresh()
            if len(fresh) >= count:
                break
            await asyncio.sleep(0.05)
        self.seen |= {row["request_id"] for row in fresh}
        assert len(fresh) == count, [(row["endpoint"], row["outcome"]) for row in fresh]
        assert {row["outcome"] for row in fresh} <= {"ok"}, [row["outcome"] for row in fresh]
        return fresh

    async def skip(self) -> None:
        """Count the present rows as seen."""
        self.seen |= {row["request_id"] for row in await self._fresh()}

    async def _fresh(self) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=self.url, timeout=20, trust_env=False) as client:
            rows = (await client.get("/breakdown", params={"limit": 1000})).json()["rows"]
        return [row for row in rows if row["request_id"] not in self.seen]


def check_traffic(client: str, rows: list[dict[str, Any]]) -> None:
    """Compare what the proxy recorded with the client's line in docs/clients.md."""
    assert {row["endpoint"] for row in rows} <= set(TRAFFIC[client].endpoints)
    assert {row["session_source"] for row in rows} <= set(TRAFFIC[client].sources)
