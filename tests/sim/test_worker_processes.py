"""Worker processes of a sweep end with the process that started them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

LIMIT_S = 120.0
BUSY = """
import os, time
from sim.worker_processes import worker_processes
with worker_processes(2) as pool:
    pool.submit(os.getpid).result()
    computing = [pool.submit(time.sleep, 3600) for _ in range(2)]
    for _ in range(6000):
        if all(one.running() for one in computing):
            break
        time.sleep(0.01)
    else:
        raise TimeoutError("no worker has begun within a minute")
    print("computing", flush=True)
    {then}
"""


@contextmanager
def busy(then: str) -> Iterator[subprocess.Popen[str]]:
    """A process whose workers compute; it is killed, if it has not ended by then."""
    command = [sys.executable, "-c", BUSY.format(then=then)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def assert_all_end(process: subprocess.Popen[str]) -> str:
    """The pipes end when the last process that holds them does: workers inherit both."""
    try:
        _, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail("workers outlived the process that started them")
    return errors


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_when_their_parent_is_killed(stop: signal.Signals) -> None:
    with busy("computing[0].result()") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "computing\n"
        process.send_signal(stop)
        assert_all_end(process)
        assert process.returncode == -stop


def test_an_error_does_not_wait_for_what_workers_compute() -> None:
    with busy("raise KeyboardInterrupt") as process:
        assert "KeyboardInterrupt" in assert_all_end(process)


def test_workers_ignore_the_terminal_s_interrupt() -> None:
    script = BUSY.replace("time.sleep, 3600", "signal.getsignal, signal.SIGINT").replace("os, time", "os, signal, time")
    script = script.replace("one.running()", "one.done()")
    done = subprocess.run(
        [sys.executable, "-c", script.format(then="print(computing[0].result())")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert done.stdout == "computing\n1\n"
