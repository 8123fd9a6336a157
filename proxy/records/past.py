"""Rows of earlier processes, read back from the newest files at the start."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

MOST_BYTES = 64 * 1024 * 1024
"""Bytes read at the start, at most."""
MOST_S = 5.0
"""Time for reading, at most."""
_CHUNK_BYTES = 1024 * 1024

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class PastRow(NamedTuple):
    """A row of an earlier process."""

    number: int
    unserved: bool
    """True for a request that was rejected, or left by its client, before it was routed."""
    line: bytes


class PastRows(NamedTuple):
    """Result of reading back."""

    rows: list[PastRow]
    """Oldest first; numbers increase."""
    damaged: int
    """Lines that are no rows."""


def past_rows(files: Sequence[Path], capacity: int, most_bytes: int = MOST_BYTES, most_s: float = MOST_S) -> PastRows:
    """The newest ``capacity`` rows of served requests, and the others among them.

    Args:
        files: newest first.
        capacity: rows of served requests, at most.
        most_bytes: bytes read, at most.
        most_s: seconds for reading, at most.

    Raises:
        OSError: a file cannot be read.
    """
    ends_s = time.monotonic() + most_s
    found: list[tuple[dict[str, Any], bytes]] = []
    served = damaged = 0
    for line in _backwards(files, most_bytes, ends_s):
        try:
            row = _decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            damaged += 1
            continue
        if not isinstance(row.get("request_id"), str):
            damaged += 1
            continue
        found.append((row, line))
        served += not _unserved(row)
        if served >= capacity:
            break
    return PastRows(list(_numbered(reversed(found))), damaged)


def _unserved(row: dict[str, Any]) -> bool:
    """As ``policies.row.Row.unserved``."""
    outcome = row.get("outcome")
    return outcome == "rejected" or (outcome == "client_gone" and row.get("prompt_tokens") is None)


def _numbered(rows: Iterator[tuple[dict[str, Any], bytes]]) -> Iterator[PastRow]:
    """Rows with increasing numbers; those of earlier versions have none."""
    last = 0
    for row, line in rows:
        stored = row.get("row")
        number = stored if isinstance(stored, int) and stored > last else last + 1
        if number != stored:
            row["row"] = number
            line = _encode(row)  # noqa: PLW2901
        last = number
        yield PastRow(number, _unserved(row), line)


def _backwards(files: Sequence[Path], most_bytes: int, ends_s: float) -> Iterator[bytes]:
    """Complete lines, last first, until the bounds are reached."""
    for path in files:
        if not path.is_file():
            continue
        with path.open("rb") as file:
            at = file.seek(0, os.SEEK_END)
            rest = b""
            while at and most_bytes > 0 and time.monotonic() < ends_s:
                size = min(_CHUNK_BYTES, at, most_bytes)
                at -= size
                most_bytes -= size
                file.seek(at)
                first, *lines = (file.read(size) + rest).split(b"\n")
                rest = first
                yield from (line for line in reversed(lines) if line)
            if at:
                return  # what is left of this line was not read
            if rest:
                yield rest
