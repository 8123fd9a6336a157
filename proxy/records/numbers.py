"""Numbers of rows: one after the other, or of several workers by the time of their ends."""

from __future__ import annotations

import time
from typing import Protocol

WORKERS = 64
"""Numbers per tenth of a millisecond, one for each worker that there may be."""


def number_at(unix_s: float) -> int:
    """Smallest number of a worker's row that ends at this time; 16 digits in this century."""
    return int(unix_s * 1e4) * WORKERS


class RowNumbers(Protocol):
    """Numbers of one process's rows, which increase."""

    shared: bool
    """The numbers between belong to other workers' rows."""

    def after(self, last: int) -> int:
        """Number of a row that ends now; ``last``: of the row before."""
        ...


class SingleNumbers:
    """One after the other."""

    shared = False

    def after(self, last: int) -> int:
        return last + 1


class WorkerNumbers:
    """The time, with the worker in the lowest digits, so that the rows of all workers have one order.

    Args:
        worker: number of the worker.
        clock_offset_s: Unix time less monotonic time, the same for all workers.
    """

    shared = True

    def __init__(self, worker: int, clock_offset_s: float) -> None:
        self._worker = worker
        self._offset_s = clock_offset_s

    def after(self, last: int) -> int:
        number = number_at(time.monotonic() + self._offset_s) + self._worker
        return number if number > last else last + WORKERS
