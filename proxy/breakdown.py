"""Breakdown: one row per request in one of two ring buffers, and optionally in a JSONL file."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from policies.row import Row
from proxy.clip import clip

log = logging.getLogger("warmroute.breakdown")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


_Numbered = tuple[int, bytes]
"""Number of the request in the order of their ends, and its row as a JSON line."""


def _matching(lines: deque[_Numbered], equal: Mapping[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The numbered rows whose fields equal ``equal``, newest first."""
    # A line without the text cannot match, so few lines need decoding.
    needles = [_encode(value)[1:-1] for value in equal.values()]
    for number, line in reversed(lines):
        if all(needle in line for needle in needles):
            row = _decode(line)
            if all(str(row.get(key)) == value for key, value in equal.items()):
                yield number, row


def _line(row: Row) -> bytes:
    """The row as one JSON line, with error texts cut: they may repeat input of any size."""
    if row.error is not None:
        row.error = clip(row.error)
    for attempt in row.attempts:
        attempt["error"] = clip(attempt["error"])
    as_dict = row.as_dict()
    try:
        return _encode(as_dict)
    except (TypeError, UnicodeEncodeError, RecursionError):
        return _encode(plain(as_dict))


def plain(value: object, depth: int = 8) -> object:
    """Convert to types that JSON has: a third-party policy or an error text may hold others.

    Below ``depth`` levels, contents are replaced by their type: they may contain themselves.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if depth == 0 and isinstance(value, Mapping | list | tuple):
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(key): plain(each, depth - 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, depth - 1) for each in value]
    if isinstance(value, float):
        return float(value)
    return value if value is None or isinstance(value, int) else str(value)


class Breakdown:
    """The last rows, and counts since the start.

    Rows of rejected requests have a ring of their own, so that a flood of them removes no other row. Rows are kept as
    encoded JSON lines: 2 KB each, instead of dozens of objects that every full garbage collection would traverse.

    Args:
        capacity: rows kept of requests that were served, or failed in serving.
        jsonl_path: file to which rows are appended; None: no file.
        rejected_capacity: rows kept of requests that were rejected, or left by their client, before they were routed.
        rejected_to_file: append those rows to the file as well.
    """

    def __init__(
        self,
        capacity: int,
        jsonl_path: Path | None = None,
        *,
        rejected_capacity: int = 1_000,
        rejected_to_file: bool = False,
    ) -> None:
        self._lines: deque[_Numbered] = deque(maxlen=capacity)
        self._rejected: deque[_Numbered] = deque(maxlen=rejected_capacity)
        self._rejected_to_file = rejected_to_file
        self._file: BinaryIO | None = None
        self.file_error: str | None = None
        """Reason for which writing to the file has ended; None while it works."""
        if jsonl_path is not None:
            jsonl_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = jsonl_path.open("ab")
        self.open_rows: set[Row] = set()
        """Rows of the requests in flight."""
        self.started = 0
        self.finished = 0
        self.outcomes: dict[str, int] = {}

    def open_row(self, row: Row) -> Row:
        """Count a new request and return its row."""
        self.started += 1
        self.open_rows.add(row)
        return row

    def close_row(self, row: Row) -> None:
        """Store a finished row; every opened row is closed once."""
        self.finished += 1
        self.open_rows.discard(row)
        outcome = row.outcome.value
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        line = _line(row)
        unserved = row.unserved
        (self._rejected if unserved else self._lines).append((self.finished, line))
        if self._file is not None and (self._rejected_to_file or not unserved):
            self._write(line)

    def select(self, limit: int, **equal: str) -> Iterator[dict[str, Any]]:
        """The newest ``limit`` rows, oldest first, whose fields equal ``equal`` (by name of the JSON field).

        Rows of rejected requests fill what the others leave of ``limit``.
        """
        matching = chain(_matching(self._lines, equal), _matching(self._rejected, equal))
        found = sorted(islice(matching, limit), key=itemgetter(0))
        return (row for _, row in found)

    def after(self, number: int, limit: int) -> list[tuple[int, bytes]]:
        """Numbers and JSON lines of the rows after the row ``number``: the newest ``limit`` of each ring, in order."""
        found = [
            numbered
            for lines in (self._lines, self._rejected)
            for numbered in takewhile(lambda line: line[0] > number, islice(reversed(lines), limit))
        ]
        return sorted(found, key=itemgetter(0))

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
            self.file_error = str(error)
            # Closing normally would write the buffer again, so close only the descriptor.
            with suppress(OSError):
                self._file.raw.close()  # type: ignore[attr-defined]
            self._file = None
