"""Worker processes of a sweep, which end with the process that started them.

Imports little, so that a worker soon ignores the terminal's Ctrl-C: the parent ends it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread


@contextmanager
def worker_processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of ``jobs`` processes.

    An error or Ctrl-C ends the workers at once, where the pool alone waits for what they compute; they also end when
    this process is killed, where the pool alone leaves them waiting for work forever.
    """
    context = get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(reader,))
    try:
        yield executor
    except BaseException:
        writer.close()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        writer.close()
        reader.close()


def _begin(parent: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    """End this process when the other end of the pipe, which only the parent has, is closed."""
    try:
        parent.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
