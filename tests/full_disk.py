"""A disk without room, for tests: a limit on the size of this process's files, and a stand-in for `replace_file`."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.run.files import replace_file


@contextmanager
def limited_to(size_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size: the kernel then writes a part and refuses the rest, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Disk:
    """The disk under files that are replaced; ``replace`` takes the place of `launch.run.files.replace_file`."""

    def __init__(self) -> None:
        self.error: int | None = None
        """Error number of writes; None: none fails."""
        self.left = 0
        """Writes that succeed before the first that fails."""

    def replace(self, path: Path, content: bytes, *, sync: bool = False) -> None:
        """Replace a file, or raise OSError."""
        if self.error is not None:
            self.left -= 1
            if self.left < 0:
                raise OSError(self.error, os.strerror(self.error), str(path))
        replace_file(path, content, sync=sync)
