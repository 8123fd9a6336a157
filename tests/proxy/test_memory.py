"""Ranges of memory that are put on huge pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from proxy.memory import heap_ranges

MIB = 1024 * 1024
MAPS = """\
55d1a6c00000-55d1a6e00000 r-xp 00001000 fe:01 1234    /usr/bin/python3.11
55d1a7010000-55d1a7c10000 rw-p 00000000 00:00 0       [heap]
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
7f0000500000-7f0000700000 rw-p 00000000 00:00 0
7f0000800000-7f0000c00000 r--p 00000000 00:00 0
7f0001000000-7f0001400000 rw-p 00000000 fe:01 77      /usr/lib/libc.so.6
7f0002000000-7f0002400000 rw-s 00000000 00:00 0
7ffd00000000-7ffd00400000 rw-p 00000000 00:00 0       [stack]
"""


def test_only_whole_huge_pages_of_the_heap_and_of_anonymous_memory_count() -> None:
    assert list(heap_ranges(MAPS.splitlines())) == [
        (0x55D1A7200000, 10 * MIB),
        (0x7F0000000000, 4 * MIB),
    ]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="not Linux")
def test_a_process_keeps_its_objects_when_its_memory_is_moved() -> None:
    code = (
        "from proxy import memory\n"
        "kept = {str(number): [number] * 3 for number in range(200_000)}\n"
        "memory.tune()\n"
        "assert all(kept[str(number)] == [number] * 3 for number in range(200_000))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
