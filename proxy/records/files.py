"""The JSONL file of rows: appended to in batches by one thread, rotated by size, and retried when the disk is full."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

log = logging.getLogger("warmroute.records")

BUFFER_BYTES = 16 * 1024 * 1024
"""Rows that wait for the disk, in bytes; later ones are dropped."""
_BATCH_S = 0.2
"""Interval of the writes: rows wait for the next one, so that a burst of them is one write."""
_BATCH_BYTES = 256 * 1024
_RETRY_S = 2.0
"""Interval of the attempts while writing fails."""
_CLOSE_S = 10.0
"""Bound on waiting for the disk at the end."""
_TAIL_BYTES = 4 * 1024 * 1024
"""Longest row that is looked for at the end of the file."""


def record_files(path: Path) -> list[Path]:
    """The files of a path that exist, newest first: ``PATH``, ``PATH.1``, ``PATH.2`` and so on."""
    found = [path] if path.exists() else []
    number = 1
    while (older := older_file(path, number)).exists():
        found.append(older)
        number += 1
    return found


def older_file(path: Path, number: int) -> Path:
    """The file that was rotated away ``number`` rotations ago."""
    return path.with_name(f"{path.name}.{number}")


class RecordFiles:
    """Appends rows to a file, and to the next one when it is full.

    ``write`` never waits and never raises. Without ``open`` no thread runs, and ``flush`` writes.

    Args:
        path: the current file; its folder is created.
        max_bytes: size at which it is renamed to ``PATH.1``, that to ``PATH.2`` and so on.
        files: files kept, the current one included; the oldest is removed.
        buffer_bytes: rows that wait for the disk, in bytes.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int, files: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._files = files
        self._buffer_bytes = buffer_bytes
        self.error: str | None = None
        """Reason for which rows cannot be written at the moment; None while they can."""
        self.dropped = 0
        """Rows that were not written, because the buffer was full or the end came."""
        self._rows: deque[bytes] = deque()
        # Each is changed by one thread only; their difference is the buffer's size.
        self._added_bytes = 0
        self._written_bytes = 0
        self._unwritten: list[bytes] = []
        """Batch whose write failed."""
        self._retry_s = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        _complete_last_line(path)
        self._descriptor: int | None = _opened(path)

    def open(self) -> None:
        """Start the thread that writes."""
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Add a row, without its line end, to the buffer; dropped if that is full."""
        if self._added_bytes - self._written_bytes + len(line) > self._buffer_bytes:
            self.dropped += 1
            return
        self._added_bytes += len(line) + 1
        self._rows.append(line)

    def flush(self) -> None:
        """Write what is in the buffer now; blocks for the disk."""
        self._drain()

    def close(self) -> None:
        """Write the buffer, once more if that failed before, and close the file; waits 10 s for the disk at most."""
        self._stop.set()
        if self._thread is None:
            self._last_drain()
            return
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.error("the breakdown file %s was not written within %g s", self._path, _CLOSE_S)

    def _run(self) -> None:
        while not self._stop.wait(_BATCH_S):
            self._drain()
        self._last_drain()

    def _last_drain(self) -> None:
        self._retry_s = 0.0
        self._drain()
        with self._lock:
            self.dropped += len(self._unwritten) + len(self._rows)
            self._unwritten = []
            self._rows.clear()
            self._close_file()

    def _drain(self) -> None:
        """Write batches until the buffer is empty or a write fails."""
        with self._lock:
            if self._unwritten and time.monotonic() < self._retry_s:
                return
            while batch := self._unwritten or self._take():
                try:
                    size = self._append(b"\n".join((*batch, b"")))
                except OSError as error:
                    self._unwritten = batch
                    self._retry_s = time.monotonic() + _RETRY_S
                    if self.error is None:
                        log.error("writing the breakdown file failed, rows are kept in memory: %s", error)
                    self.error = str(error)
                    return
                self._unwritten = []
                self._written_bytes += size
                if self.error is not None:
                    log.warning("the breakdown file %s can be written again", self._path)
                    self.error = None

    def _take(self) -> list[bytes]:
        """The next rows of the buffer, as many as make one write."""
        batch: list[bytes] = []
        bound = min(_BATCH_BYTES, self._max_bytes)
        size = 0
        while self._rows and (not batch or size + len(self._rows[0]) < bound):
            line = self._rows.popleft()
            size += len(line) + 1
            batch.append(line)
        return batch

    def _append(self, lines: bytes) -> int:
        """Append whole lines; a failed write leaves no part of them. Returns their bytes. Raises OSError."""
        file = self._open_file()
        found = os.fstat(file)
        if not _is_at(found, self._path):  # removed or renamed by somebody else
            self._close_file()
            file = self._open_file()
            found = os.fstat(file)
        size = found.st_size
        if stat.S_ISREG(found.st_mode) and size and size + len(lines) > self._max_bytes:
            self._rotate()
            file, size = self._open_file(), 0
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, size)
            self._close_file()
            raise
        return len(lines)

    def _rotate(self) -> None:
        """Close the file, and rename it and the older ones. Raises OSError."""
        self._close_file()
        number = self._files - 1
        while (surplus := older_file(self._path, number + 1)).exists():  # fewer files are kept than before
            surplus.unlink()
            number += 1
        for each in range(self._files - 1, 1, -1):
            with suppress(FileNotFoundError):
                older_file(self._path, each - 1).replace(older_file(self._path, each))
        if self._files > 1:
            self._path.replace(older_file(self._path, 1))
        else:
            self._path.unlink()

    def _open_file(self) -> int:
        if self._descriptor is None:
            self._descriptor = _opened(self._path)
        return self._descriptor

    def _close_file(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _opened(path: Path) -> int:
    """Descriptor that appends to a file."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _is_at(found: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(found, path.stat())
    except FileNotFoundError:
        return False


def _complete_last_line(path: Path) -> None:
    """Remove a row at the end of the file that a crash left incomplete, so that the next one gets its own line."""
    if not path.is_file() or not (size := path.stat().st_size):
        return
    with path.open("r+b") as file:
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read()
        if tail.endswith(b"\n"):
            return
        begin = tail.rfind(b"\n") + 1
        torn = tail[begin:]
        file.seek(0, os.SEEK_END)
        try:
            msgspec.json.decode(torn)
        except msgspec.DecodeError:
            if begin or size == len(tail):
                log.warning("%s: the last row is incomplete; its %d bytes are removed", path, len(torn))
                file.truncate(size - len(torn))
                return
        file.write(b"\n")
