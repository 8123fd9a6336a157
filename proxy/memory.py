"""Allocator and garbage collector settings for a process that holds 100 KB bodies for seconds each."""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP_BYTES = 32 * 1024 * 1024

GENERATIONS = (5_000, 10, 10)
"""Thresholds of the garbage collector."""


def tune() -> None:
    """Keep freed memory for the next body, and collect garbage less often. Call once, after all imports.

    A request's body is larger than glibc's default threshold for heap allocation: each would be mapped and unmapped by
    the kernel, page by page. A request leaves no reference cycles (``tests/chaos/fuzz/test_garbage.py``), so
    collections can be rare; objects loaded so far are permanent and need not be traversed again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GENERATIONS)
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _KEEP_BYTES)
    except (OSError, AttributeError):  # another C library: use its defaults
        pass
