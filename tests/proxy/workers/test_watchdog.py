"""Silences as the parent measures them, and the order in which workers are killed; times are given, nothing waits."""

from __future__ import annotations

import pytest

from proxy.settings import SettingsError, load_settings
from proxy.sharing.frames import WorkerStanding
from proxy.workers.watchdog import Silences, Watchdog

LIMIT_S = 60.0
LOOK_S = Silences(LIMIT_S).look_s


@pytest.mark.parametrize("given_s", [0.5, -1.0, float("nan")])
def test_a_limit_that_would_end_busy_workers_is_refused(given_s: float) -> None:
    with pytest.raises(SettingsError, match="worker_silence_s"):
        load_settings(None, instances=[{"url": "http://127.0.0.1:9"}], worker_silence_s=given_s)


class Process:
    """A worker's process; ``alive`` ones answer before the next look."""

    def __init__(self, parent: Parent, worker: int, pid: int, *, alive: bool = True, serves: bool = True) -> None:
        self.worker, self.pid, self.serves, self.alive = worker, pid, serves, alive
        self.heard_s = parent.now_s
        self.asked = 0
        self.wakes = False
        """It recovers while its stacks are written."""
        self._parent = parent

    def ask_for_life(self) -> None:
        self.asked += 1
        if self.alive:
            self.heard_s = self._parent.now_s

    async def stacks(self) -> str:
        if self.wakes:
            self.heard_s = self._parent.now_s
        return "Thread 0x1: in choose"

    def kill_hung(self, silent_s: float) -> None:
        self._parent.killed.append((self.worker, silent_s))
        del self._parent.processes[self.worker]
        self._parent.restart(self.worker)


class Parent:
    """Workers of a parent whose clock moves when it looks."""

    def __init__(self, count: int) -> None:
        self.now_s = 1000.0
        self.killed: list[tuple[int, float]] = []
        self.processes = {number: Process(self, number, 10 + number) for number in range(count)}
        self.restarts = dict.fromkeys(self.processes, 0)
        self.watchdog = Watchdog(LIMIT_S, self.processes.values, self.standing, lambda: self.now_s)

    def standing(self, worker: int) -> WorkerStanding:
        process = self.processes.get(worker)
        serving = process is not None and process.serves
        return WorkerStanding(worker, None, serving, serving, self.restarts[worker], 0.0, None)

    def restart(self, worker: int) -> None:
        self.restarts[worker] += 1

    def start(self, worker: int, *, serves: bool = True) -> None:
        pid = 100 * (1 + self.restarts[worker]) + worker
        self.processes[worker] = Process(self, worker, pid, serves=serves)

    async def looks(self, seconds: float, each_s: float = LOOK_S) -> None:
        for _ in range(round(seconds / each_s)):
            self.now_s += each_s
            await self.watchdog.look()


async def test_a_silent_worker_is_killed_after_the_limit_and_the_others_stay() -> None:
    parent = Parent(3)
    await parent.looks(300)
    assert parent.killed == []
    parent.processes[1].alive = False
    await parent.looks(LIMIT_S - LOOK_S)
    assert parent.killed == []
    await parent.looks(3 * LOOK_S)
    assert [worker for worker, _ in parent.killed] == [1]
    assert parent.killed[0][1] >= LIMIT_S


async def test_a_worker_that_reports_by_itself_is_not_asked() -> None:
    parent = Parent(1)
    process = parent.processes[0]
    for _ in range(100):
        process.heard_s = parent.now_s
        await parent.looks(LOOK_S)
    assert process.asked == 0


@pytest.mark.parametrize("stopped_s", [LIMIT_S, 3600.0, 1e6])
async def test_time_in_which_the_parent_was_stopped_too_is_no_silence(stopped_s: float) -> None:
    parent = Parent(2)
    await parent.looks(30)
    for process in parent.processes.values():
        process.alive = False
    for _ in range(4):  # as a machine does that is suspended again and again
        parent.now_s += stopped_s
        await parent.watchdog.look()
    for process in parent.processes.values():
        process.alive = True
    await parent.looks(300)
    assert parent.killed == []


async def test_a_slow_parent_measures_time_up_to_twice_its_interval() -> None:
    parent = Parent(1)
    await parent.looks(30)
    parent.processes[0].alive = False
    await parent.looks(2 * LIMIT_S, each_s=2 * LOOK_S)
    assert len(parent.killed) == 1


async def test_workers_that_are_all_silent_are_killed_one_after_the_other_as_replacements_serve() -> None:
    parent = Parent(3)
    await parent.looks(30)
    for process in parent.processes.values():
        process.alive = False
    await parent.looks(600)
    assert len(parent.killed) == 1
    first = parent.killed[0][0]
    parent.start(first, serves=False)
    await parent.looks(600)
    assert len(parent.killed) == 1, "nothing shows that the machine can run a worker"
    parent.processes[first].serves = True
    await parent.looks(600)
    assert len(parent.killed) == 2
    second = parent.killed[1][0]
    parent.restart(second)  # its replacement ended before it served: that cannot be what the third one waits for
    await parent.looks(LOOK_S)
    assert len({worker for worker, _ in parent.killed}) == 3


async def test_the_longest_silent_worker_is_killed_first() -> None:
    parent = Parent(2)
    await parent.looks(30)
    parent.processes[1].alive = False
    await parent.looks(2 * LOOK_S)
    parent.processes[0].alive = False
    await parent.looks(600)
    assert [worker for worker, _ in parent.killed] == [1]


async def test_a_worker_that_wakes_at_the_last_moment_is_not_killed() -> None:
    parent = Parent(2)
    await parent.looks(30)
    process = parent.processes[0]
    process.alive, process.wakes = False, True
    await parent.looks(300)
    assert parent.killed == []


async def test_a_worker_that_starts_is_not_watched_and_begins_without_silence() -> None:
    parent = Parent(2)
    parent.start(0, serves=False)
    process = parent.processes[0]
    process.alive = False
    await parent.looks(900)
    process.serves = True
    await parent.looks(LIMIT_S - LOOK_S)
    assert parent.killed == []
    await parent.looks(2 * LOOK_S)
    assert len(parent.killed) == 1
