"""Files of a running fleet: replaced in one step, and reported, not fatal, where they cannot be written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.run.processes import StartError
from replayer.records.outputs import replacing


def replace_file(path: Path, content: bytes, *, sync: bool = False, private: bool = False) -> None:
    """Replace a file in one step: a reader sees the old or the new one, never part of it. A link stays a link.

    Args:
        path: the file.
        content: its new content.
        sync: wait until the content is on the disk, so that this also holds after a crash of the machine.
        private: readable by its owner only, from before the first byte.

    Raises:
        OSError: it cannot be written, with its path; the old one is untouched, and nothing is left beside it.
    """
    with replacing(path) as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def required() -> Iterator[None]:
    """Turn an error of the block, which writes a file without which nothing starts, into one that names the file.

    Raises:
        StartError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise StartError(f"{error.filename}: cannot be written ({error.strerror})") from error


class FileReports:
    """Reports on files that a fleet can run without: once for each reason, and when a file is written again.

    Args:
        notify: called with each report.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._reasons: dict[Path, set[str]] = {}

    def failing(self, path: Path) -> bool:
        """True if the last attempt to write the file failed."""
        return path in self._reasons

    @contextmanager
    def tolerated(self, path: Path, consequence: str) -> Iterator[None]:
        """Suppress and report errors of the block, which writes ``path``; ``consequence`` is for the report."""
        try:
            yield
        except OSError as error:
            reason, known = error.strerror or str(error), self._reasons.setdefault(path, set())
            if reason not in known:
                known.add(reason)
                self._notify(f"warning: {path} cannot be written ({reason}); {consequence}")
        else:
            if self._reasons.pop(path, None):
                self._notify(f"{path} is written again")
