"""Place of one worker among the others: its number, its parent, and the sockets on which workers ask each other."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from proxy.errors import RequestError
from proxy.sharing.frames import Question, WorkerStanding
from proxy.sharing.line import ParentLine, WorkerIdentity

_LOCK_S = 30.0
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One worker, and the folder of all workers' sockets."""

    identity: WorkerIdentity
    folder: Path
    """Belongs to the user that runs the proxy alone."""

    @property
    def number(self) -> int:
        """Number of this worker."""
        return self.identity.number

    @property
    def line(self) -> ParentLine:
        """The line to the parent."""
        return self.identity.line

    @property
    def clock_s(self) -> float:
        """Time by which rows are numbered: Unix seconds, without later steps of the clock."""
        return time.monotonic() + self.identity.clock_offset_s

    def socket(self, worker: int) -> Path:
        """The Unix socket of a worker."""
        return self.folder / f"worker-{worker}.sock"

    async def roster(self) -> tuple[WorkerStanding, ...]:
        """Every worker as the parent knows it now. Raises LineError."""
        return (await self.line.ask(Question.ROSTER)).roster

    def changing(self) -> contextlib.AbstractAsyncContextManager[None]:
        """The right to change all workers, as ``changing``."""
        return changing(self.folder)


@contextlib.asynccontextmanager
async def changing(folder: Path) -> AsyncIterator[None]:
    """The right to change all workers, which one process has at a time, and which its end gives back.

    Args:
        folder: that of the workers' sockets.

    Raises:
        RequestError: 503, another change takes too long.
    """
    held = os.open(folder / "changes.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await _lock(held)
        yield
    finally:
        os.close(held)


async def _lock(descriptor: int) -> None:
    try:
        async with asyncio.timeout(_LOCK_S):
            while not _locked(descriptor):  # noqa: ASYNC110 - of other processes
                await asyncio.sleep(_LOOK_S)
    except TimeoutError as error:
        raise RequestError(
            503,
            "another change of the workers is in progress: try again",
            kind="service_unavailable",
            code="change_in_progress",
            retry_after_s=5,
        ) from error


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
