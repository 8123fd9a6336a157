"""Access log: one JSON line per request, written by a thread so that no request waits for a disk or a pipe."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from policies.row import Row
from proxy.clip import clip
from proxy.logs import LimitedLog, redact
from proxy.settings.section import SettingsError

_EVERY_S = 0.25
"""Interval between two writes, in seconds."""
_CLOSE_S = 5.0
"""Bound on the last write, in seconds: standard output may be a pipe that nobody reads."""
_ERROR_CHARS = 300
_PIPE_BYTES = 4096
"""PIPE_BUF of Linux: a write of as many bytes to a pipe is not divided."""
STDOUT = "-"
"""Path that stands for standard output."""

_encode = msgspec.json.Encoder().encode


def access_line(row: Row) -> bytes:
    """JSON of one finished request, without texts of prompts and answers, and without keys."""
    return _encode(_fields(row)) + b"\n"


def _fields(row: Row) -> dict[str, Any]:
    decision, stages = row.decision, row.stages_ms
    return {
        "time": datetime.fromtimestamp(row.arrived_unix_s, UTC).isoformat(timespec="milliseconds"),
        "request_id": _text(row.request_id),
        "session_id": _text(row.session_id),
        "tenant": _text(row.tenant),
        "endpoint": _text(row.endpoint),
        "stream": row.stream,
        "status": row.status,
        "outcome": row.outcome,
        "instance": row.instance,
        "prefill_instance": row.prefill_instance,
        "class": decision.request_class if decision else None,
        "attempts": len(row.attempts),
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.actual_cached_tokens,
        "completion_tokens": row.completion_tokens,
        "held_s": round(row.held_s, 3),
        "ttft_s": _seconds(stages.get("first_byte")),
        "e2e_s": _seconds(stages.get("total")),
        "error": None if row.error is None else clip(redact(row.error), _ERROR_CHARS),
    }


def _text(value: str | None) -> str | None:
    """A text that clients chose, in a form that has an encoding."""
    return None if value is None else value.encode("utf-8", "replace").decode()


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds / 1e3, 6)


class AccessLog:
    """Writes finished requests to a file or to standard output. ``open`` and ``close`` bracket its thread's lifetime.

    The file is opened for every write, so that it can be rotated by renaming it. Lines that cannot be written, and
    those above ``capacity``, are dropped and counted.

    Args:
        path: file to append to, ``-`` for standard output, or None: no access log.
        capacity: requests that may wait to be written.

    Raises:
        SettingsError: the file cannot be written.
    """

    def __init__(self, path: str | None, capacity: int) -> None:
        self._path = path
        self._capacity = capacity
        self._rows: deque[Row] = deque()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = LimitedLog(logging.getLogger("warmroute.access_log"), interval_s=60.0)
        self._overflowed = self._failed = 0
        self._reported = 0
        if path not in {None, STDOUT}:
            try:
                self._write(b"")
            except OSError as error:
                raise SettingsError(f"logs.access: {path} cannot be written: {error.strerror or error}") from error

    @property
    def dropped(self) -> int:
        """Requests without a line: too many waited, or writing failed."""
        return self._overflowed + self._failed

    def open(self) -> None:
        """Start the thread that writes, if there is an access log."""
        if self._path is not None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
            self._thread.start()

    def record(self, row: Row) -> None:
        """Take a finished request, which must not change any more; without an access log it is ignored."""
        if self._thread is None:
            return
        if len(self._rows) >= self._capacity:
            self._overflowed += 1
        else:
            self._rows.append(row)

    def close(self) -> None:
        """Write the rest and end the thread."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join(_CLOSE_S)
            self._thread = None

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(_EVERY_S)
            self._drain()

    def _drain(self) -> None:
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        if rows:
            try:
                self._write(b"".join(map(access_line, rows)))
            except (OSError, ValueError, TypeError) as error:  # ValueError: standard output is closed
                self._failed += len(rows)
                self._log.warning("failed", "writing the access log failed: %s", error)
        if self.dropped != self._reported:
            self._log.warning("dropped", "the access log lacks %d request(s) so far (logs.access_buffer)", self.dropped)
            self._reported = self.dropped

    def _write(self, lines: bytes) -> None:
        if self._path == STDOUT:
            for piece in _pieces(lines):
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
            return
        assert self._path is not None
        if lines and _ends_within_a_line(self._path):
            lines = b"\n" + lines
        with open(self._path, "ab") as file:
            file.write(lines)


def _ends_within_a_line(path: str) -> bool:
    """True if the last write to the file was incomplete, as on a full disk: the next line would be lost with it."""
    if not Path(path).is_file():  # reading a pipe would wait
        return False
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # it is empty, or may only be written
        return False


def _pieces(lines: bytes) -> Iterator[bytes]:
    """Whole lines, as many at a time as a pipe takes at once: lines of several workers must not mix."""
    piece = b""
    for line in lines.splitlines(keepends=True):
        if piece and len(piece) + len(line) > _PIPE_BYTES:
            yield piece
            piece = b""
        piece += line
    if piece:
        yield piece
