"""Replacement of workers that hang: silence by the parent's own progress, and the end of the longest silent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from proxy.sharing.frames import WorkerStanding

log = logging.getLogger("warmroute.workers")

_LOOKS = 20
"""Looks within the limit: a worker leaves at least half as many questions unanswered before it is killed."""
_LONGEST_LOOK_S = 5.0


class Watched(Protocol):
    """Process of a worker, as far as the watchdog uses it."""

    worker: int
    pid: int
    serves: bool
    heard_s: float
    """Time of its last frame."""

    def ask_for_life(self) -> None:
        """Have it send a frame from its event loop."""
        ...

    async def stacks(self) -> str:
        """Stacks of its threads, as far as it can be made to write them; waits for them."""
        ...

    def kill_hung(self, silent_s: float) -> None:
        """End it after a silence of so many seconds."""
        ...


class Silences:
    """Silence of each process in seconds. No I/O and no clock.

    It grows with the looks, by twice their interval at most: time in which the parent did not run, such as that of a
    suspended machine, is no silence of a worker, which may not have run either.

    Args:
        limit_s: silence that is to be found.
    """

    def __init__(self, limit_s: float) -> None:
        self.look_s = min(limit_s / _LOOKS, _LONGEST_LOOK_S)
        """Interval of the looks."""
        self._looked_s: float | None = None
        self._known: dict[int, tuple[float, float]] = {}

    def look(self, now_s: float, heard: Mapping[int, float]) -> dict[int, float]:
        """Silences by process id.

        Args:
            now_s: the moment, monotonic.
            heard: time of each process's last frame, by process id.
        """
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, 2 * self.look_s)
        self._looked_s = now_s
        known = {}
        for pid, heard_s in heard.items():
            before_s, silent_s = self._known.get(pid, (None, 0.0))
            known[pid] = (heard_s, silent_s + passed_s if before_s == heard_s else 0.0)
        self._known = known
        return {pid: silent_s for pid, (_, silent_s) in known.items()}


class _Killed(NamedTuple):
    worker: int
    restarts: int
    """Restarts before."""


class Watchdog:
    """Kills a worker that shows no life, one at a time; whoever keeps the worker starts it again.

    The next one is killed when the replacement serves, which proves that it is not the machine that stands still, or
    when it could not be started.

    Args:
        limit_s: silence after which a worker is killed.
        processes: reads those that run now.
        standing: reads a worker's standing.
        clock_s: monotonic time.
    """

    def __init__(
        self,
        limit_s: float,
        processes: Callable[[], Iterable[Watched]],
        standing: Callable[[int], WorkerStanding],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._silences = Silences(limit_s)
        self.look_s = self._silences.look_s
        """Interval at which ``look`` is to be called."""
        self._processes = processes
        self._standing = standing
        self._clock_s = clock_s
        self._killed: _Killed | None = None

    async def look(self) -> None:
        """Ask the silent workers for a sign of life, and kill the one whose silence is longest if that is too long."""
        serving = {each.pid: each for each in self._processes() if each.serves}
        silences = self._silences.look(self._clock_s(), {pid: each.heard_s for pid, each in serving.items()})
        for pid, silent_s in silences.items():
            if silent_s:
                serving[pid].ask_for_life()
        pid, silent_s = max(silences.items(), key=lambda each: each[1], default=(0, 0.0))
        if silent_s >= self._limit_s and self._settled():
            await self._replace(serving[pid], silent_s)

    def _settled(self) -> bool:
        """True if no replacement is in progress."""
        if self._killed is None:
            return True
        now = self._standing(self._killed.worker)
        return now.restarts > self._killed.restarts + (0 if now.serving else 1)

    async def _replace(self, process: Watched, silent_s: float) -> None:
        named = f"worker {process.worker} (process {process.pid}{_state(process.pid)})"
        heard_s = process.heard_s
        stacks = await process.stacks()
        if process.heard_s != heard_s:
            log.warning("%s showed no life for %.0f s, but now does: it is not killed", named, silent_s)
            return
        log.error(
            "%s has shown no life for %.0f s (worker_silence_s: %g) and is killed; its threads: %s",
            *(named, silent_s, self._limit_s, stacks or "it did not write them"),
        )
        self._killed = _Killed(process.worker, self._standing(process.worker).restarts)
        process.kill_hung(silent_s)


def _state(pid: int) -> str:
    """The kernel's state of a process, as a remark; empty if it is not known."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            code = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    names = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "stopped by a debugger"}
    return f", {names.get(code, code)}"
