"""Operating-system processes: start one under a guard, identify it later, end its whole tree.

A process is identified by pid *and* creation time, since a pid alone may have been reused. The pid is its guard's
(`launch.run.guard`), and all processes it starts stay below the guard. As a second safeguard, every tree carries a
random mark in its environment, by which the processes of a killed guard are found.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

import psutil

from launch.engines.commands import ProcessSpec
from launch.run import guard

MARK_VARIABLE = "FLEET_PROCESS_MARK"
"""Environment variable that carries the mark of a tree."""
_SAME_PROCESS_S = 0.5
"""Creation times of one process read twice agree to well within this."""
_POLL_S = 0.05
_END_S = 10.0
"""Time a guard gets to kill its tree."""
_HURRY_S = 2.0
"""Time a process gets to end once the user does not want to wait."""
_GUARDED = sys.platform == "linux"


class StartError(RuntimeError):
    """A process that did not start or become ready; the message names it, its log file and the log's last lines."""


class ManagedProcess:
    """A child process and everything below it, in their own session, with their output in one log file.

    Start it from the main thread: on Linux it dies with the *thread* that started it (see `launch.run.guard`).
    """

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.log_offset = 0
        """Offset of the present start in the log file, in bytes."""
        self.created_unix_s = 0.0
        self.mark = ""
        self.exit_code: int | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the guard; 0 before the start."""
        return self._child.pid if self._child else 0

    def start(self) -> None:
        """Start the process.

        Raises:
            StartError: the operating system refused.
        """
        self.mark = uuid.uuid4().hex
        environment = {**self.spec.complete_environment(os.environ), MARK_VARIABLE: self.mark}
        command = [sys.executable, "-I", "-S", str(guard.__file__), str(os.getpid()), *self.spec.command]
        self.exit_code = None
        try:
            with self.log_path.open("ab") as log:
                self.log_offset = log.tell()
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            self.created_unix_s = psutil.Process(self._child.pid).create_time()
        except (OSError, psutil.Error) as error:
            raise StartError(f"{self.spec.name}: cannot be started ({error})") from error

    def exited(self) -> bool:
        """True once the process has ended. Its pid stays reserved until `reap`, so its tree can be ended safely."""
        if self._child is None or self.exit_code is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def signal(self, signum: int) -> None:
        """Signal the process; SIGKILL means its whole tree."""
        if self._child is not None and self.exit_code is None:
            _signal(self._child.pid, signum)

    def kill_hard(self) -> None:
        """Kill guard and tree from here, for a guard that does not do it itself."""
        if self._child is None or self.exit_code is not None:
            return
        for process in [*self.tree(), *_guards(self._child.pid)]:
            try:
                process.kill()
            except psutil.Error:
                continue

    def reap(self) -> int:
        """Collect the exit code and end the processes of a killed guard; the process must have ended."""
        if self._child is None:
            return 0
        if not _GUARDED:
            _signal(self._child.pid, signal.SIGKILL)
        kill_marked([self.mark])
        try:
            self.exit_code = self._child.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            # Killed, but a driver call holds it in the kernel; the others must not wait for it.
            self.exit_code = -signal.SIGKILL
        return self.exit_code

    def tree(self) -> list[psutil.Process]:
        """The command's processes, the command first; the guard is not among them."""
        try:
            root = psutil.Process(self.pid)
            below = root.children(recursive=True)
        except (psutil.Error, ValueError):
            return []
        if not _GUARDED:
            return [root, *below]
        return sorted(below, key=_created)

    def log_text(self) -> str:
        """The log since the present start."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(self.log_offset)
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def log_tail(self, lines: int = 8) -> str:
        """The last lines of the log since the present start."""
        return "\n".join(f"    {line}" for line in self.log_text().splitlines()[-lines:])


async def stop_processes(
    processes: Sequence[ManagedProcess], grace_s: float, hurry: asyncio.Event | None = None
) -> None:
    """End processes and their trees: SIGTERM, then SIGKILL after ``grace_s``; returns when all are collected.

    Once ``hurry`` is set they get a second SIGTERM, on which the proxy drains no longer, and at most `_HURRY_S`.
    """
    running = [process for process in processes if process.pid and process.exit_code is None]
    for process in running:
        process.signal(signal.SIGTERM)
    await _until_exited(running, grace_s, hurry)
    if hurry is not None and hurry.is_set():
        for process in running:
            process.signal(signal.SIGTERM)
        await _until_exited(running, min(grace_s, _HURRY_S))
    for process in running:
        if not process.exited():
            process.signal(signal.SIGKILL)
    await _until_exited(running, _END_S)
    for process in running:
        if not process.exited():
            process.kill_hard()
        process.reap()


async def finish_despite_cancellation(work: Coroutine[Any, Any, None], *, name: str) -> None:
    """Run clean-up to its end even when cancelled meanwhile.

    Args:
        work: the clean-up; it must end by itself.
        name: of its task.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile; raised after the end of ``work``.
    """
    task = asyncio.create_task(work, name=name)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


async def _until_exited(
    processes: Sequence[ManagedProcess], limit_s: float, hurry: asyncio.Event | None = None
) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while loop.time() < deadline:
        if all(process.exited() for process in processes) or (hurry is not None and hurry.is_set()):
            break
        await asyncio.sleep(_POLL_S)


def creation_time(pid: int) -> float | None:
    """Creation time of the process with this pid in Unix seconds; None when there is none (or only its zombie)."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def same_process(pid: int, created_unix_s: float) -> bool:
    """True if the pid still belongs to the process that was created then."""
    created = creation_time(pid) if pid > 0 else None
    return created is not None and abs(created - created_unix_s) < _SAME_PROCESS_S


def end_recorded(pid: int, created_unix_s: float, signum: int) -> bool:
    """Signal a process recorded in a state file if it is still the same one; returns whether it was."""
    if not same_process(pid, created_unix_s):
        return False
    _signal(pid, signum)
    return True


def marked(marks: Collection[str]) -> list[int]:
    """Processes that carry one of the marks in their environment (Linux only)."""
    wanted = [f"{MARK_VARIABLE}={mark}".encode() for mark in marks if mark]
    if not wanted or not _GUARDED:
        return []
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            variables = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(mark in variables for mark in wanted):
            found.append(int(name))
    return found


def kill_marked(marks: Collection[str]) -> int:
    """Kill all processes that carry one of the marks; their number."""
    pids = marked(marks)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    return len(pids)


def _signal(pid: int, signum: int) -> None:
    try:
        if _GUARDED:
            os.kill(pid, guard.END_SIGNAL if signum == signal.SIGKILL else signum)
        else:
            os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        # macOS answers EPERM for a group of zombies; either way nothing is left to signal.
        return


def _guards(pid: int) -> list[psutil.Process]:
    try:
        return [psutil.Process(pid)] if _GUARDED else []
    except psutil.Error:
        return []


def _created(process: psutil.Process) -> float:
    try:
        return process.create_time()
    except psutil.Error:
        return float("inf")
