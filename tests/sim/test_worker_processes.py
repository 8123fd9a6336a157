"""Worker processes of a sweep end with the process that started them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

LIMIT_S = 120.0
BUSY = """
import os, time
from sim.worker_processes import worker_processes
with worker_processes(2) as pool:
    pool.submit(os.getpid).result()
    computing = [pool.submit(time.sleep, 3600) for _ in range(2)]
    while not all(one.running() for one in computing):
        time.sleep(0.01)
    print("computing", flush=True)
    {then}
"""


def busy(then: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUSY.format(then=then)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


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
    process = busy("computing[0].result()")
    assert process.stdout is not None
    assert process.stdout.readline() == "computing\n"
    process.send_signal(stop)
    assert_all_end(process)
    assert process.returncode == -stop


def test_an_error_does_not_wait_for_what_workers_compute() -> None:
    process = busy("raise KeyboardInterrupt")
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
