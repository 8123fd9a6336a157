"""Breakdown: one row per request in a ring buffer, and optionally in a JSONL file."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from policies.row import Row

log = logging.getLogger("warmroute.breakdown")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def _line(row: Row) -> bytes:
    """The row as one JSON line."""
    as_dict = row.as_dict()
    try:
        return _encode(as_dict)
    except (TypeError, UnicodeEncodeError):
        return _encode(_plain(as_dict))


def _plain(value: object) -> object:
    """Convert to types msgspec can encode: a third-party policy or an error text may hold others."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(value)
    return value if value is None or isinstance(value, int) else str(value)


class Breakdown:
    """The last ``capacity`` rows, oldest first, and counts since the start.

    Rows are kept as encoded JSON lines: 2 KB each, instead of dozens of objects that every full garbage collection
    would traverse.
    """

    def __init__(self, capacity: int, jsonl_path: Path | None = None) -> None:
        self._lines: deque[bytes] = deque(maxlen=capacity)
        self._file: BinaryIO | None = None
        if jsonl_path is not None:
            jsonl_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = jsonl_path.open("ab")
        self.started = 0
        self.finished = 0
        self.outcomes: dict[str, int] = {}

    def open_row(self, row: Row) -> Row:
        """Count a new request and return its row."""
        self.started += 1
        return row

    def close_row(self, row: Row) -> None:
        """Store a finished row; every opened row is closed once."""
        self.finished += 1
        self.outcomes[row.outcome.value] = self.outcomes.get(row.outcome.value, 0) + 1
        line = _line(row)
        self._lines.append(line)
        if self._file is not None:
            self._write(line)

    def select(self, limit: int, **equal: str) -> Iterator[dict[str, Any]]:
        """The newest ``limit`` rows, oldest first, whose fields equal ``equal`` (by name of the JSON field)."""
        # A line without the text cannot match, so few lines need decoding.
        needles = [_encode(value)[1:-1] for value in equal.values()]
        found: list[dict[str, Any]] = []
        for line in reversed(self._lines):
            if len(found) >= limit:
                break
            if not all(needle in line for needle in needles):
                continue
            row = _decode(line)
            if all(str(row.get(key)) == value for key, value in equal.items()):
                found.append(row)
        return iter(found[::-1])

    def flush(self) -> None:
        """Write buffered rows to the file."""
        self._write(b"")

    def close(self) -> None:
        """Flush and close the file."""
        self._write(b"")
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: bytes) -> None:
        """Append, or flush for an empty line. A full disk disables the file, but does not fail the request."""
        if self._file is None:
            return
        try:
            if line:
                self._file.write(line)
                self._file.write(b"\n")
            else:
                self._file.flush()
        except OSError as error:
            log.error("writing the breakdown file failed, rows are kept in memory only: %s", error)
            # Closing normally would write the buffer again, so close only the descriptor.
            with suppress(OSError):
                self._file.raw.close()  # type: ignore[attr-defined]
            self._file = None
