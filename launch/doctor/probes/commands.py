"""Run the commands that the doctor reads: read-only, each with a time limit."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

_COMMAND_S = 10.0


def answer(
    command: Sequence[str], environment: Mapping[str, str] | None = None, limit_s: float = _COMMAND_S
) -> tuple[str | None, str]:
    """A command's standard output, None when it is missing, fails or takes longer than ``limit_s``; and the reason.

    Args:
        command: program and arguments.
        environment: its complete environment; default: this process's.
        limit_s: seconds it may take.
    """
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            env=None if environment is None else dict(environment),
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {limit_s:g} s"
    except (OSError, UnicodeDecodeError) as error:
        return None, str(error)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return None, last[0]
    return done.stdout, ""
