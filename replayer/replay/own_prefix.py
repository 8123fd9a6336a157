"""Part of a prompt that repeats the session's previous prompt, found without keeping that prompt.

Ids are chained (`replayer.traces.trace.TraceRequest`), so equal ids at one place mean equal blocks up to there. Of a
prompt with n ids, those at 1, 2, 4, ... and at n, n - 1, n - 2, n - 4, ... are kept: O(log n) numbers a session.
"""

from __future__ import annotations

from collections.abc import Sequence


class PromptMarks:
    """Some ids of a session's latest prompt."""

    __slots__ = ("_ids", "_size")

    def __init__(self) -> None:
        self._size = 0
        self._ids: tuple[int, ...] = ()
        """Those at `_places`, in the same order."""

    def next(self, ids: Sequence[int]) -> int:
        """Take the session's next prompt; returns how many of its first blocks the one before had.

        Exact where the prompt begins with the whole previous prompt, or with all but its last two blocks. Where it
        leaves the previous prompt earlier, down to half of the true number. 0 for the first prompt. O(log n).
        """
        size = len(ids)
        marks = zip(_places(self._size), self._ids, strict=True)
        shared = next((place for place, mark in marks if place <= size and ids[place - 1] == mark), 0)
        self._size = size
        self._ids = tuple([ids[place - 1] for place in _places(size)])
        return shared


def _places(size: int) -> list[int]:
    """Places to mark in a prompt of ``size`` ids, counted from 1, the last place first."""
    places = {size} if size else set()
    step = 1
    while step < size:
        places |= {step, size - step}
        step *= 2
    return sorted(places, reverse=True)
