"""Operating-system processes: start one in its own group, know it again, end its whole group.

A process is identified by pid *and* creation time: a pid alone may have been given to somebody else since.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from launch import guard
from launch.engines import ProcessSpec

_SAME_PROCESS_S = 0.5
"""Creation times of one process read twice agree to well within this."""
_POLL_S = 0.05


class StartError(RuntimeError):
    """A process that did not start or become ready; the message names it, its log file and the log's last lines."""


class ManagedProcess:
    """A child process in its own session and process group, with its output in one log file.

    Start it from the main thread: on Linux it dies with the *thread* that started it (see `launch.guard`).
    """

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.created_unix_s = 0.0
        self.exit_code: int | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group; 0 before the start."""
        return self._child.pid if self._child else 0

    def start(self) -> None:
        """Start the process.

        Raises:
            StartError: the operating system refused.
        """
        environment = {
            name: value
            for name, value in os.environ.items()
            if not (self.spec.drop_environment_prefix and name.startswith(self.spec.drop_environment_prefix))
        }
        environment.update(self.spec.environment)
        command = [sys.executable, "-I", "-S", str(guard.__file__), str(os.getpid()), *self.spec.command]
        self.exit_code = None
        try:
            with self.log_path.open("ab") as log:
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
        """Whether the process has ended. Its pid stays reserved until `reap`, so its group can be ended safely."""
        if self._child is None or self.exit_code is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def signal_group(self, signum: int) -> None:
        """Signal the process and everything it started in its group."""
        if self._child is not None and self.exit_code is None:
            try:
                os.killpg(self._child.pid, signum)
            except (ProcessLookupError, PermissionError):
                # macOS answers EPERM for a group of zombies; either way nothing is left to signal.
                return

    def reap(self) -> int:
        """End what is left of the group and collect the exit code; the process must have ended."""
        if self._child is None:
            return 0
        self.signal_group(signal.SIGKILL)
        self.exit_code = self._child.wait(timeout=10)
        return self.exit_code

    def environment_missing(self) -> list[str]:
        """Variables of the spec that the running process did not receive as given (Linux and macOS)."""
        try:
            received = psutil.Process(self.pid).environ()
        except psutil.Error:
            return []
        return [name for name, value in self.spec.environment.items() if received.get(name) != value]

    def log_tail(self, lines: int = 8) -> str:
        """The last lines of the log file."""
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])


async def stop_processes(processes: Sequence[ManagedProcess], grace_s: float) -> None:
    """End processes by group: SIGTERM, then SIGKILL after ``grace_s``; returns when all are collected."""
    running = [process for process in processes if process.pid and process.exit_code is None]
    for process in running:
        process.signal_group(signal.SIGTERM)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_s
    while loop.time() < deadline:
        if all(process.exited() for process in running):
            break
        await asyncio.sleep(_POLL_S)
    for process in running:
        process.signal_group(signal.SIGKILL)
        process.reap()


def creation_time(pid: int) -> float | None:
    """When the process with this pid was created; None when there is none (or only its zombie)."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def same_process(pid: int, created_unix_s: float) -> bool:
    """Whether the pid still belongs to the process that was created then."""
    created = creation_time(pid) if pid > 0 else None
    return created is not None and abs(created - created_unix_s) < _SAME_PROCESS_S


def end_recorded_group(pid: int, created_unix_s: float, signum: int) -> bool:
    """Signal the group of a process known from a state file, only if it is still that process; whether it was."""
    if not same_process(pid, created_unix_s):
        return False
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        return False
    return True
