"""A launcher in a session of its own: its start, and the wait until its fleet is ready."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from launch.run.state import FleetRecord, StateError, read_state

_POLL_S = 0.1


class NotStartedError(RuntimeError):
    """The launcher has ended before its fleet was ready."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output
        """The lines that this start has added to the launcher's log."""


class SignalError(RuntimeError):
    """A signal came before the fleet was ready; the launcher stops the fleet."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.strsignal(signum))
        self.signum = signum


def start_detached(
    command: Sequence[str], directory: Path, log_path: Path, accepted: Callable[[], bool]
) -> FleetRecord:
    """Start a launcher and return the state of its fleet once that is ready.

    Args:
        command: the launcher.
        directory: its run directory.
        log_path: file that its output is appended to.
        accepted: further condition, called when the fleet is ready.

    Raises:
        NotStartedError: the launcher has ended.
        SignalError: SIGINT, SIGTERM or SIGHUP came first.
        OSError: the log cannot be written.
    """
    with _recorded_signals() as received:
        with log_path.open("ab") as log:
            before_bytes = log.tell()
            launcher = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            state = None
            while not received and ((state := _ready(directory, launcher.pid)) is None or not accepted()):
                if launcher.poll() is not None:
                    raise NotStartedError(log_path.read_bytes()[before_bytes:].decode(errors="replace"))
                time.sleep(_POLL_S)
        except BaseException:
            launcher.terminate()
            raise
    # After the handlers have been removed: no signal is lost.
    if received or state is None:
        launcher.terminate()
        raise SignalError(received[0])
    return state


def _ready(directory: Path, pid: int) -> FleetRecord | None:
    """The state that the launcher of this pid has written, if its fleet is ready."""
    try:
        state = read_state(directory)
    except StateError:
        return None
    return state if state.supervisor_pid == pid and state.status == "ready" else None


@contextmanager
def _recorded_signals() -> Iterator[list[int]]:
    """Numbers of the signals that arrive in the block, in place of their effect; ignored ones (nohup) stay so.

    A handler that raises could do so after the launcher has been started, but before its pid is known.
    """
    received: list[int] = []

    def record(signum: int, _: FrameType | None) -> None:
        received.append(signum)

    signals = [
        each for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN
    ]
    before = {each: signal.signal(each, record) for each in signals}
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
