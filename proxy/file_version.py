"""State of a file, by which a change of its content is noticed without reading it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple


class FileVersion(NamedTuple):
    """State of a file; a link counts as the file that it leads to."""

    inode: int
    size: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileVersion | None:
        """None: there is no such file, or it cannot be looked at."""
        with contextlib.suppress(OSError):
            found = os.stat(path)
            return cls(found.st_ino, found.st_size, found.st_mtime_ns)
        return None
