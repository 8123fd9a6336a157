"""Run a command whose whole process tree dies with its launcher: ``python guard.py LAUNCHER_PID COMMAND [ARG ...]``.

On Linux this process remains as a small parent of the command. It is the tree's *child subreaper* (``prctl(2)``): any
process of the tree that loses its parent, also in a session of its own, becomes a child of this process and can still
be found. The kernel signals it when its launcher dies, which covers a launcher killed by SIGKILL. On that signal, on
`END_SIGNAL`, or when the command has ended, it kills the whole tree and exits as the command did. If this process
itself is killed, the command gets SIGKILL from the kernel.

SIGTERM, SIGINT and SIGHUP are passed on to the command's process group. On other systems the command replaces this
process, and only an orderly stop ends its tree.

This file is started by its path with ``-I -S`` and imports the standard library only, to cost a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time

END_SIGNAL = signal.SIGUSR1
"""Makes a guard kill its tree at once."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HANDLED = {*_PASSED_ON, END_SIGNAL, signal.SIGCHLD}
_POLL_S = 0.01
_NO_PRCTL, _NO_LAUNCHER, _NO_COMMAND = 70, 71, 127


def main(arguments: list[str]) -> int:
    """Guard the command until its tree is gone; the exit status, which is the command's."""
    launcher, command = int(arguments[0]), arguments[1:]
    if sys.platform != "linux":
        return _become(command) if os.getppid() == launcher else _orphaned()
    # Before anything that could be signalled: signals wait until the loop below takes them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    if not (_prctl(_PR_SET_CHILD_SUBREAPER, 1) and _prctl(_PR_SET_PDEATHSIG, END_SIGNAL)):
        return _NO_PRCTL
    # The launcher may have died before the prctl above: then the signal would never come.
    if os.getppid() != launcher:
        return _orphaned()
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        os._exit(_run(command, guard))
    return _as_ended(_watch(child))


def _run(command: list[str], guard: int) -> int:
    """In the child: die with the guard, take signals again, become the command."""
    if not _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        return _NO_PRCTL
    if os.getppid() != guard:
        return _orphaned()
    os.setpgid(0, 0)
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    return _become(command)


def _become(command: list[str]) -> int:
    try:
        os.execvp(command[0], command)  # replaces this process; returns only by raising
    except OSError as error:
        _report(f"cannot run {command[0]}: {error.strerror}")
        return _NO_COMMAND


def _watch(child: int) -> int:
    """Pass signals on until the command has ended, then end the rest of the tree; the command's wait status."""
    while True:
        signum = signal.sigwait(_HANDLED)
        if signum in _PASSED_ON:
            _signal_group(child, signum)
            continue
        status = None if signum == END_SIGNAL else _reap(child)
        if status is not None or signum == END_SIGNAL:
            return _end_tree(child, status)


def _end_tree(child: int, status: int | None) -> int:
    """Kill all descendants of this process until none is left."""
    while True:
        for pid in _descendants(os.getpid()):
            _kill(pid)
        try:
            while True:
                pid, found = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == child:
                    status = found
        except ChildProcessError:
            return status if status is not None else signal.SIGKILL
        time.sleep(_POLL_S)


def _reap(child: int) -> int | None:
    """Collect all ended children; the command's wait status once it is among them."""
    status = None
    try:
        while True:
            pid, found = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                status = found
    except ChildProcessError:
        return status
    return status


def _descendants(root: int) -> list[int]:
    """Every process below ``root``, from /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # pid (name, which may hold anything) state parent ...
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _signal_group(child: int, signum: int) -> None:
    try:
        os.killpg(child, signum)
    except ProcessLookupError:
        # The child has not made its group yet, or has ended.
        try:
            os.kill(child, signum)
        except ProcessLookupError:
            return


def _as_ended(status: int) -> int:
    """End this process as the command ended: the same exit code, or the same signal."""
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
        os.kill(os.getpid(), signum)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _prctl(option: int, value: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) == 0:
        return True
    _report(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")
    return False


def _orphaned() -> int:
    _report("the launcher is gone")
    return _NO_LAUNCHER


def _report(message: str) -> None:
    sys.stderr.write(f"guard: {message}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
