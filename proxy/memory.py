"""Settings of the allocator and the garbage collector for a process that holds 100 KB bodies for seconds each."""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP_BYTES = 32 * 1024 * 1024

_GENERATIONS = (5_000, 10, 10)


def settle() -> None:
    """Keep freed memory for the next body, and look for garbage less often. Once, when all is imported.

    A request's body is larger than what glibc takes from its heap by default: each would be mapped and unmapped by the
    kernel, page by page. A request leaves no cycles behind (``tests/chaos/fuzz/test_garbage.py``), so the collector may be
    patient; what is loaded by now stays for good and need not be walked again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GENERATIONS)
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _KEEP_BYTES)
    except (OSError, AttributeError):  # another C library: its defaults will do
        pass
