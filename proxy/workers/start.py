"""The argument of a worker's process, without what a worker imports: its parent needs no application."""

from __future__ import annotations

import signal
from typing import Any

import msgspec

STACKS_SIGNAL = signal.SIGUSR1


class WorkerStart(msgspec.Struct, frozen=True):
    """All that a worker is given, as the one argument of its process."""

    worker: int
    clock_offset_s: float
    parent_pid: int
    descriptor: int
    """Of its end of the line."""
    stacks: int
    """Descriptor that it writes the stacks of its threads to on ``STACKS_SIGNAL``."""
    folder: str
    """Of the workers' sockets."""
    port: int
    admin_port: int | None
    config: str | None
    """Settings file."""
    flags: dict[str, Any]
    """Settings of the command line."""


def encode_start(start: WorkerStart) -> str:
    """The argument of a worker's process."""
    return msgspec.json.encode(start).decode()


def decode_start(argument: str) -> WorkerStart:
    """The start that ``argument`` encodes."""
    return msgspec.json.decode(argument, type=WorkerStart)
