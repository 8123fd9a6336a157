"""Allocator, garbage collector and page settings for a process that holds 100 KB bodies for seconds each."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP_BYTES = 32 * 1024 * 1024
_MADV_COLLAPSE = 25
_HUGE_BYTES = 2 * 1024 * 1024
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

GENERATIONS = (5_000, 10, 10)
"""Thresholds of the garbage collector."""


def tune() -> None:
    """Keep freed memory for the next body, collect garbage less often, use huge pages. Call once, after all imports.

    A request's body is larger than glibc's default threshold for heap allocation: each would be mapped and unmapped by
    the kernel, page by page. A request leaves no reference cycles (``tests/chaos/fuzz/test_garbage.py``), so
    collections can be rare; objects loaded so far are permanent and need not be traversed again. The code of a request
    touches objects all over the heap once in a while, and takes less time in huge pages (docs/decisions/0024).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GENERATIONS)
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _KEEP_BYTES)
    except (OSError, AttributeError):  # another C library: use its defaults
        return
    try:
        if "[never]" in _HUGE_PAGES.read_text(encoding="ascii"):
            return
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # a kernel without huge pages
        return
    for start, size in heap_ranges(maps.splitlines()):
        # Without effect where the kernel is older than 6.1 or has no huge page to give.
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_COLLAPSE)


def heap_ranges(maps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Address and size of the whole huge pages in a process's heap and anonymous mappings.

    Args:
        maps: lines of ``/proc/PID/maps``.
    """
    for line in maps:
        addresses, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if not permissions.startswith("rw-p") or inode != "0" or (name and name[0] != "[heap]"):
            continue
        first, last = (int(each, 16) for each in addresses.split("-"))
        first = -(-first // _HUGE_BYTES) * _HUGE_BYTES
        size = (last - first) // _HUGE_BYTES * _HUGE_BYTES
        if size > 0:
            yield first, size
