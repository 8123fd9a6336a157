"""Runs a command that dies with its launcher: ``python guard.py LAUNCHER_PID COMMAND [ARGUMENT ...]``.

On Linux the kernel is asked (``prctl(PR_SET_PDEATHSIG)``) to kill this process when the thread that started it ends;
the request survives ``execve``, so the command inherits it. That covers a launcher killed by SIGKILL, which can clean
up nothing itself. Elsewhere the command runs unguarded and only an orderly stop ends it.

This file is started by its path with ``-I -S`` and imports the standard library only, to cost a few milliseconds.
A ``preexec_fn`` would do the same between fork and exec, where Python code may deadlock in a threaded launcher.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Ask for the death signal, check that the launcher still lives, become the command."""
    launcher, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.stderr.write(f"guard: prctl failed: {os.strerror(ctypes.get_errno())}\n")
            return 70
    # The launcher may have died before the request above: then nobody would ever send the signal.
    if os.getppid() != launcher:
        sys.stderr.write("guard: the launcher is gone\n")
        return 71
    try:
        os.execvp(command[0], command)  # replaces this process; returns only by raising
    except OSError as error:
        sys.stderr.write(f"guard: cannot run {command[0]}: {error.strerror}\n")
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
