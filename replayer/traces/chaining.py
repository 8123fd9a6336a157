"""Chained block keys without a memory: what a block id becomes when all ids before it count too.

The key of block i is the sum, modulo 2**63, of a mix of every (id, position) up to i: equal prefixes give equal keys,
and two different ones give equal keys with a chance of 2**-63. The mix is splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_BITS = np.uint64((1 << 63) - 1)


class Chainer:
    """Turns block ids into keys that are chained, whether or not the ids were. O(blocks) a request, in numpy."""

    def __init__(self) -> None:
        self._positions: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)

    def keys(self, ids: Sequence[int]) -> array[int]:
        """The key of every block, 0 .. 2**63 - 1."""
        count = len(ids)
        if count > len(self._positions):
            self._positions = np.arange(1, 2 * count + 1, dtype=np.uint64) * _GOLDEN
        mixed = np.array(ids, dtype=np.uint64)
        mixed *= _SECOND  # another factor than the positions', or an id and its place could be exchanged
        mixed += self._positions[:count]
        mixed ^= mixed >> _SHIFTS[0]
        mixed *= _FIRST
        mixed ^= mixed >> _SHIFTS[1]
        mixed *= _SECOND
        mixed ^= mixed >> _SHIFTS[2]
        np.cumsum(mixed, out=mixed)
        mixed &= _BITS
        return array("q", mixed.tobytes())
