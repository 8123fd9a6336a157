"""The newest records as encoded lines, in blocks of memory of their own."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from operator import itemgetter

BLOCK_BYTES = 256 * 1024
"""Size of a block; a longer line has one of its own."""

Numbered = tuple[int, bytes]
"""Number of a record, and the record as one encoded line."""
_Place = tuple[int, bytearray, int, int]
"""Number of a record, its block, and first and end offset in it, bytes."""
_number = itemgetter(0)


class LineRing:
    """The newest lines, whose numbers increase.

    Lines are copied into blocks. Each as an object of its own would lie between the bodies of requests, which are a
    hundred times larger and soon freed, and the gaps would not take the next body: 5 KB of memory for a line of 2 KB
    (``docs/home-case.md``). A block is freed with the last of its lines.

    Args:
        capacity: lines kept, at least 1.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._places: deque[_Place] = deque(maxlen=capacity)
        self._block = bytearray()
        self._used = 0
        """Bytes of the block that have lines."""

    def append(self, number: int, line: bytes) -> None:
        """Keep a line; the oldest is dropped above ``capacity``."""
        first, end = self._used, self._used + len(line)
        if end > len(self._block):
            first, end = 0, len(line)
            self._block = bytearray(max(BLOCK_BYTES, end))
        self._block[first:end] = line
        self._used = end
        self._places.append((number, self._block, first, end))

    def newest_first(self) -> Iterator[Numbered]:
        """The lines from the newest on. None may be appended in between: see ``view``."""
        return map(_line, reversed(self._places))

    def view(self) -> RingView:
        """The lines of now, which stay while others are appended."""
        return RingView(list(self._places))


class RingView:
    """The lines of a ring at one time, oldest first. Lines are copied out of their blocks as they are read."""

    def __init__(self, places: list[_Place]) -> None:
        self._places = places

    def newest_first(self, before: int | None = None) -> Iterator[Numbered]:
        """The lines from the newest on; ``before``: only those with smaller numbers."""
        end = len(self._places) if before is None else bisect_left(self._places, before, key=_number)
        return (_line(self._places[at]) for at in range(end - 1, -1, -1))

    def after(self, number: int) -> Iterator[Numbered]:
        """The lines with larger numbers, oldest first."""
        first = bisect_right(self._places, number, key=_number)
        return (_line(self._places[at]) for at in range(first, len(self._places)))


def _line(place: _Place) -> Numbered:
    number, block, first, end = place
    return number, bytes(memoryview(block)[first:end])
