"""Bailian-style JSONL: chat_id, parent_chat_id, timestamp, input_length, output_length, type, turn, hash_ids.

Our own files add ``session_id`` and, where known, ``think_time``, ``api_time``, ``subagent``, ``tenant``,
``lengths_only``. A trace without session ids gets them by following ``parent_chat_id`` to the root.
"""

from __future__ import annotations

import gzip
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard

from replayer.records.counted import counted
from replayer.records.json_errors import BAD_JSON
from replayer.records.outputs import replacing
from replayer.traces.formats.checks import NO_TURN, Number
from replayer.traces.formats.source import iter_lines
from replayer.traces.trace import TraceError, TraceRequest


class _Row(msgspec.Struct):
    chat_id: int | str
    timestamp: Number
    input_length: int
    output_length: int
    hash_ids: list[int]
    parent_chat_id: int | str | None = -1
    turn: int | None = None
    type: str | None = None
    session_id: str | int | None = None
    think_time: Number | None = None
    api_time: Number | None = None
    subagent: bool | str | int | None = None
    tenant: str | int | None = None
    lengths_only: bool | None = None
    text: str | None = None


_DECODER = msgspec.json.Decoder(_Row, strict=False)  # not strict: 1807.0 and "1807" are integers too


def id_array(values: Iterable[int], where: str) -> array[int]:
    """Block ids, 8 bytes each.

    Raises:
        TraceError: a negative id, or one past 63 bits.
    """
    try:
        ids = array("q", values)
    except OverflowError:
        raise TraceError(f"{where}: a hash id needs more than 63 bits; renumber the ids") from None
    least = int(np.frombuffer(ids, dtype=np.int64).min()) if ids else 0
    if least < 0:
        raise TraceError(f"{where}: negative hash id {least}; ids must be 0 or more")
    return ids


def check_lengths(where: str, input_length: int, output_length: int) -> None:
    """Check that there is a prompt and no negative output; raises TraceError."""
    if input_length <= 0:
        raise TraceError(
            f"{where}: input_length {input_length}; a request needs at least one prompt token: drop the line"
        )
    if output_length < 0:
        raise TraceError(f"{where}: output_length {output_length} is negative; drop or correct the line")


class _Links:
    """Sessions and parents from parent links: a session without an id is named after its root's chat id."""

    def __init__(self, remembered: int | None) -> None:
        self._session_of: dict[int, str] = {}
        self._missing: dict[int, int] = {}
        """Parent that has not been seen -> the first request that names it."""
        self._remembered = remembered
        self._orphans = self._own_parents = 0

    def place(self, request: TraceRequest) -> int | None:
        """Set the request's session, and its parent to -1 where that is unknown.

        Returns:
            Chat id of an earlier request that names this one as its parent; None if there is none.
        """
        chat_id, parent = request.chat_id, request.parent_chat_id
        if parent == chat_id:
            self._own_parents += 1
            parent = -1
        known = self._session_of.get(parent) if parent != -1 else None
        if parent != -1 and known is None:
            self._orphans += 1
            self._missing.setdefault(parent, chat_id)
            _forget_oldest(self._missing, self._remembered)
        request.session_id = request.session_id or known or f"s{chat_id}"
        request.parent_chat_id = parent if known is not None else -1
        self._session_of[chat_id] = request.session_id
        _forget_oldest(self._session_of, self._remembered)
        return self._missing.get(chat_id)

    def notes(self) -> list[str]:
        """Sentences on links that lead nowhere."""
        notes = []
        if self._orphans:
            notes.append(f"{counted(self._orphans, 'request')} with a parent that is not in the file (cut window)")
        if self._own_parents:
            notes.append(f"{counted(self._own_parents, 'request')} with its own id as parent; taken as first turn")
        return notes


def _forget_oldest(table: dict[Any, Any], most: int | None) -> None:
    if most is not None and len(table) > most:
        del table[next(iter(table))]


class _Numbers:
    """Chat ids that are text, numbered in order of appearance."""

    def __init__(self, remembered: int | None) -> None:
        self._numbers: dict[str, int] = {}
        self._remembered = remembered
        self._count = 0

    def of(self, value: int | str | None) -> int:
        """The id as a number; -1 for none."""
        if isinstance(value, int) or value is None:
            return -1 if value is None else value
        if value in ("", "-1"):
            return -1
        known = self._numbers.get(value)
        if known is not None:
            return known
        number = self._numbers[value] = self._count
        self._count += 1
        _forget_oldest(self._numbers, self._remembered)
        return number


def read(path: Path, unit_s: float, notes: list[str], *, remembered: int | None = None) -> Iterator[TraceRequest]:
    """Requests in file order, with sessions and parents.

    One line is in memory at a time, plus small entries for each of the ``remembered`` last requests (None: for all),
    to find parents and duplicate chat ids.

    Raises:
        TraceError: names file, line and remedy; also for a request above its parent, whose session is not known then.
    """
    links = _Links(remembered)
    for request in read_unlinked(path, unit_s, remembered=remembered):
        child = links.place(request)
        if child is not None:
            raise TraceError(
                f"{path}: request {child} comes before its parent {request.chat_id}, and a file that is read as a "
                "stream must have parents first: load it whole, or sort it by time"
            )
        yield request
    notes += links.notes()


def link(requests: Iterable[TraceRequest], where: str) -> list[str]:
    """Give the requests of `read_unlinked` their sessions and parents, in place. They must be sorted by time.

    Returns:
        Sentences on links that lead nowhere.

    Raises:
        TraceError: a request comes before its parent.
    """
    links = _Links(None)
    for request in requests:
        child = links.place(request)
        if child is not None:
            raise TraceError(
                f"{where}: request {child} comes before its parent {request.chat_id} in time; correct the timestamps"
            )
    return links.notes()


def read_unlinked(path: Path, unit_s: float, *, remembered: int | None = None) -> Iterator[TraceRequest]:
    """Requests in file order, with the parents that the file names, and an empty session id where it has none.

    Raises:
        TraceError: names file, line and remedy.
    """
    number_of = _Numbers(remembered).of
    seen: dict[int, None] = {}
    for line_number, line in iter_lines(path):
        where = f"{path}:{line_number}"
        try:
            row = _DECODER.decode(line)
        except BAD_JSON as error:
            raise TraceError(
                f"{where}: not a Bailian-style request ({error}); correct the line, or cut the file before it"
            ) from None
        check_lengths(where, row.input_length, row.output_length)
        chat_id = number_of(row.chat_id)
        if chat_id in seen:
            raise TraceError(f"{where}: chat_id {row.chat_id} occurs twice; every request needs its own")
        seen[chat_id] = None
        _forget_oldest(seen, remembered)
        yield TraceRequest(
            chat_id=chat_id,
            parent_chat_id=number_of(row.parent_chat_id),
            session_id="" if row.session_id is None else str(row.session_id),
            turn=NO_TURN if row.turn is None else row.turn,
            timestamp_s=row.timestamp * unit_s,
            input_length=row.input_length,
            output_length=row.output_length,
            hash_ids=id_array(row.hash_ids, where),
            think_time_s=row.think_time,
            api_time_s=row.api_time,
            type=row.type or "",
            subagent=bool(row.subagent),
            tenant=None if row.tenant is None else str(row.tenant),
            lengths_only=bool(row.lengths_only),
            text=row.text or None,
        )


def to_row(request: TraceRequest) -> dict[str, Any]:
    """One request as a Bailian-style object (times in seconds)."""
    row: dict[str, Any] = {
        "chat_id": request.chat_id,
        "parent_chat_id": request.parent_chat_id,
        "timestamp": round(request.timestamp_s, 6),
        "input_length": request.input_length,
        "output_length": request.output_length,
        "type": request.type,
        "turn": request.turn,
        "hash_ids": list(request.hash_ids),
        "session_id": request.session_id,
    }
    optional = {
        "think_time": request.think_time_s,
        "api_time": request.api_time_s,
        "tenant": request.tenant,
        "text": request.text,
    }
    row |= {key: value for key, value in optional.items() if value is not None}
    if request.subagent:
        row["subagent"] = True
    if request.lengths_only:
        row["lengths_only"] = True
    return row


def write(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write Bailian-style JSONL; ``.gz`` and ``.zst`` by the name. The same requests give the same bytes.

    The file appears when it is complete: part of a trace would look like a whole one. Its folder is made if missing.

    Returns:
        Number of requests written.
    """
    encoder = msgspec.json.Encoder()
    count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as raw:
        if path.name.endswith(".gz"):
            # No name and no time in the gzip header: equal content gives equal bytes.
            sink: Any = gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6)
        elif path.name.endswith(".zst"):
            sink = zstandard.ZstdCompressor(level=9).stream_writer(raw, closefd=False)
        else:
            sink = raw
        try:
            for request in requests:
                sink.write(encoder.encode(to_row(request)) + b"\n")
                count += 1
        finally:
            if sink is not raw:
                sink.close()
    return count
