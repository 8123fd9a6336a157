"""Lines in blocks: the newest are kept, whatever their lengths, in little more memory than their bytes."""

from __future__ import annotations

import random
from collections import deque

import pytest

from proxy.records.ring import BLOCK_BYTES, LineRing


def line(number: int, length: int) -> bytes:
    return (f"{number}:".encode() * length)[:length]


@pytest.mark.parametrize("capacity", [1, 7, 300])
def test_the_ring_holds_what_a_deque_of_lines_would(capacity: int) -> None:
    lengths = random.Random(capacity)
    ring = LineRing(capacity)
    expected: deque[tuple[int, bytes]] = deque(maxlen=capacity)
    number = 0
    for _ in range(2_000):
        number += lengths.randint(1, 3)
        kept = line(number, lengths.choice([0, 1, 500, 2_000, 9_000]))
        ring.append(number, kept)
        expected.append((number, kept))
    assert len(expected) == capacity
    assert list(ring.newest_first()) == list(reversed(expected))
    view = ring.view()
    for at in (0, number - 400, number - 3, number, number + 1):
        assert list(view.after(at)) == [each for each in expected if each[0] > at]
        assert list(view.newest_first(at)) == [each for each in reversed(expected) if each[0] < at]
    assert list(view.newest_first()) == list(reversed(expected))


def test_a_view_keeps_its_lines_while_others_replace_them() -> None:
    ring = LineRing(5)
    for number in range(1, 6):
        ring.append(number, line(number, 100_000))
    view = ring.view()
    for number in range(6, 20):
        ring.append(number, line(number, 100_000))
    assert list(view.after(0)) == [(number, line(number, 100_000)) for number in range(1, 6)]
    assert [number for number, _ in ring.newest_first()] == [19, 18, 17, 16, 15]


def test_a_line_longer_than_a_block_is_kept_whole() -> None:
    ring = LineRing(3)
    long = line(2, 3 * BLOCK_BYTES + 1)
    ring.append(1, b"before")
    ring.append(2, long)
    ring.append(3, b"after")
    assert list(ring.newest_first()) == [(3, b"after"), (2, long), (1, b"before")]


def test_the_memory_is_that_of_the_lines_and_two_blocks_at_most() -> None:
    ring = LineRing(1_000)
    for number in range(1, 20_001):
        ring.append(number, line(number, 2_000))
        if number % 500 == 0:
            # At the end of a block a line may not fit any more: up to 2,000 bytes of each.
            blocks = {id(block): len(block) for _, block, _, _ in ring._places}
            assert sum(blocks.values()) <= 1.01 * 2_000 * min(number, 1_000) + 2 * BLOCK_BYTES
