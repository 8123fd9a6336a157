"""Bailian-style JSONL: chat_id, parent_chat_id, timestamp, input_length, output_length, type, turn, hash_ids.

Our own files add ``session_id`` and, where known, ``think_time``, ``api_time``, ``subagent``, ``tenant``. A trace
without session ids gets them by following ``parent_chat_id`` to the root.
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

from replayer.traces.formats.source import iter_lines
from replayer.traces.trace import TraceError, TraceRequest


class _Row(msgspec.Struct):
    chat_id: int | str
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    parent_chat_id: int | str | None = -1
    turn: int = 1
    type: str = ""
    session_id: str | int | None = None
    think_time: float | None = None
    api_time: float | None = None
    subagent: bool | str | int | None = None
    tenant: str | int | None = None


_DECODER = msgspec.json.Decoder(_Row)


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
    """Raise TraceError unless there is a prompt and no negative output."""
    if input_length <= 0:
        raise TraceError(
            f"{where}: input_length {input_length}; a request needs at least one prompt token: drop the line"
        )
    if output_length < 0:
        raise TraceError(f"{where}: output_length {output_length} is negative; drop or mend the line")


class _Sessions:
    """Session ids from parent links: the session is named after its root's chat id."""

    def __init__(self, remembered: int | None) -> None:
        self._of_chat: dict[int, str] = {}
        self._remembered = remembered
        self.orphans = 0

    def place(self, chat_id: int, parent: int, given: str | None) -> tuple[str, int]:
        """(session, parent that is in the trace or -1)."""
        known = self._of_chat.get(parent) if parent != -1 else None
        if parent != -1 and known is None:
            self.orphans += 1
        session = given if given is not None else (known if known is not None else f"s{chat_id}")
        self._of_chat[chat_id] = session
        if self._remembered is not None and len(self._of_chat) > self._remembered:
            del self._of_chat[next(iter(self._of_chat))]
        return session, parent if known is not None else -1

    def __contains__(self, chat_id: int) -> bool:
        return chat_id in self._of_chat


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
        if self._remembered is not None and len(self._numbers) > self._remembered:
            del self._numbers[next(iter(self._numbers))]
        return number


def read(path: Path, unit_s: float, notes: list[str], *, remembered: int | None = None) -> Iterator[TraceRequest]:
    """Requests in file order; one line in memory at a time, plus one small entry for each of the ``remembered`` last
    requests (None: for all), so that a parent or a chat id that occurs twice is known.

    Raises:
        TraceError: names file, line, and what to do.
    """
    sessions = _Sessions(remembered)
    number_of = _Numbers(remembered).of
    for line_number, line in iter_lines(path):
        where = f"{path}:{line_number}"
        try:
            row = _DECODER.decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(
                f"{where}: not a Bailian-style request ({error}); mend the line, or cut the file before it"
            ) from None
        check_lengths(where, row.input_length, row.output_length)
        chat_id = number_of(row.chat_id)
        if chat_id in sessions:
            raise TraceError(f"{where}: chat_id {row.chat_id} occurs twice; every request needs its own")
        given = None if row.session_id is None else str(row.session_id)
        session, parent = sessions.place(chat_id, number_of(row.parent_chat_id), given)
        yield TraceRequest(
            chat_id=chat_id,
            parent_chat_id=parent,
            session_id=session,
            turn=row.turn,
            timestamp_s=row.timestamp * unit_s,
            input_length=row.input_length,
            output_length=row.output_length,
            hash_ids=id_array(row.hash_ids, where),
            think_time_s=row.think_time,
            api_time_s=row.api_time,
            type=row.type,
            subagent=bool(row.subagent),
            tenant=None if row.tenant is None else str(row.tenant),
        )
    if sessions.orphans:
        notes.append(f"{sessions.orphans} requests name a parent that is not in the file (cut window)")


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
    optional = {"think_time": request.think_time_s, "api_time": request.api_time_s, "tenant": request.tenant}
    row |= {key: value for key, value in optional.items() if value is not None}
    if request.subagent:
        row["subagent"] = True
    return row


def write(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write Bailian-style JSONL; ``.gz`` and ``.zst`` by the name. The same requests give the same bytes.

    Returns:
        How many requests were written.
    """
    encoder = msgspec.json.Encoder()
    count = 0
    with path.open("wb") as raw:
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
