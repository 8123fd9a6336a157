"""Ends of a session's last prompts, by which a longer one that continues them is recognised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

LONGEST_DIFFERENCE = 128
"""Blocks at the end of a prompt that a further turn may have changed and still be recognised."""
_LESS = (0, 1, 2, 4, 8, 16, 32, 64, LONGEST_DIFFERENCE)
"""Differences at a prompt's end that are tried, in blocks."""

PromptEnd = tuple[int, tuple[int, ...]]
"""A prompt's number of blocks, and the hashes of those after which it is ``_LESS`` blocks shorter. No lists: of numbers
in tuples the garbage collector keeps no track.
"""


def _reader(blocks: int) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Reader of the differences that are less than a number of blocks: much faster than a loop."""
    places = [-1 - less for less in _LESS if less < blocks]
    return itemgetter(*places) if len(places) > 1 else _first


def _first(hashes: Sequence[int]) -> tuple[int, ...]:
    return (hashes[-1],)


_READERS = tuple([_reader(blocks) for blocks in range(LONGEST_DIFFERENCE + 2)])
"""By number of blocks, the last one for all longer prompts: one look, not a search for the largest difference."""


def end_of(hashes: Sequence[int]) -> PromptEnd:
    """End of a prompt of at least one block, given by its chained hashes.

    A further turn repeats nearly all of the last prompt, but not always its end: chat templates close it otherwise
    (thoughts are removed, say), and tokens of a last partial block shift. Beginnings that are 1, 2, 4, ... blocks
    shorter find the common part to a factor of two of what differs.
    """
    blocks = len(hashes)
    return blocks, _READERS[blocks if blocks <= LONGEST_DIFFERENCE else -1](hashes)


def continued(ends: Sequence[PromptEnd], hashes: Sequence[int]) -> tuple[int, PromptEnd] | None:
    """The longest part in blocks of one of the prompts that this one repeats, and that prompt's end; None: of none."""
    count = len(hashes)
    if len(ends) == 1:
        (end,) = ends
        whole, samples = end
        if whole <= count and hashes[whole - 1] == samples[0]:
            return whole, end  # what nearly all turns do: they only add
    longest, found = 0, None
    for end in reversed(ends):  # the latest is mostly the longest; of equals the earliest is taken
        whole, samples = end
        first = 0 if whole <= count else (whole - count - 1).bit_length() + 1  # of the parts no longer than this prompt
        for place in range(first, len(samples)):
            blocks = whole - _LESS[place]
            if blocks < longest:
                break
            if hashes[blocks - 1] == samples[place]:
                longest, found = blocks, end
                break
    return None if found is None else (longest, found)
