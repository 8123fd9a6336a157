"""CSV logs of arrivals and lengths: Azure's LLM inference traces (2023, 2024) and BurstGPT.

They do not say what prompts have in common, so every prompt gets block ids of its own: a replay has their arrivals and
lengths, and prefix caches find nothing.
"""

from __future__ import annotations

import csv
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from replayer.records.counted import counted
from replayer.traces.formats.source import iter_lines
from replayer.traces.trace import TraceError, TraceRequest


class _Columns(NamedTuple):
    """Names in lower case."""

    name: str
    time: str
    input: str
    output: str
    dated: bool
    """Times are dates, not seconds."""
    session: str | None = None
    """Column that a part of the files has."""


AZURE = _Columns("Azure", "timestamp", "contexttokens", "generatedtokens", dated=True)
BURSTGPT = _Columns("BurstGPT", "timestamp", "request tokens", "response tokens", dated=False, session="session id")


def fields(line: bytes) -> list[str]:
    """Fields of a CSV line, without spaces around them; an empty list if it is not text."""
    try:
        return [field.strip() for field in next(csv.reader([line.decode()]), [])]
    except (UnicodeDecodeError, csv.Error):
        return []


def columns_of(header: bytes) -> _Columns | None:
    """Columns of the log that has this first line; None for any other line."""
    names = {name.lower() for name in fields(header)}
    return next((one for one in (AZURE, BURSTGPT) if {one.time, one.input, one.output} <= names), None)


def read(path: Path, columns: _Columns, unit_s: float, block_tokens: int, notes: list[str]) -> Iterator[TraceRequest]:
    """Requests in file order; a request is a session where the log has no session ids.

    Requests without tokens, which are failures in BurstGPT, are dropped and counted in ``notes`` at the end.

    Args:
        path: of the log.
        columns: of its kind.
        unit_s: seconds in one unit of time, unless times are dates.
        block_tokens: prompt tokens for each block id.
        notes: remarks on the trace.

    Raises:
        TraceError: names file, line and remedy.
    """
    notes.append(
        f"{columns.name} traces have lengths only: no prompt begins as another, so prefix caches find nothing in them"
    )
    lines = iter_lines(path)
    names = [name.lower() for _, header in [next(lines)] for name in fields(header)]
    places = [names.index(name) for name in (columns.time, columns.input, columns.output)]
    session = names.index(columns.session) if columns.session in names else None
    turns: Counter[str] = Counter()
    next_id = dropped = 0
    for index, (number, line) in enumerate(lines):
        row = fields(line)
        where = f"{path}:{number}"
        if len(row) != len(names):
            raise TraceError(
                f"{where}: {len(row)} fields under {len(names)} columns; correct the line, or cut the file before it"
            )
        time_s, input_length, output_length = _figures([row[place] for place in places], columns, unit_s, where)
        if input_length == 0 or output_length == 0:
            dropped += 1
            continue
        blocks = -(-input_length // block_tokens)
        session_id = f"s{index}"
        if session is not None and row[session]:
            session_id = row[session]
            turns[session_id] += 1
        yield TraceRequest(
            chat_id=index,
            session_id=session_id,
            turn=turns[session_id] or 1,
            timestamp_s=time_s,
            input_length=input_length,
            output_length=output_length,
            hash_ids=array("q", range(next_id, next_id + blocks)),
            lengths_only=True,
        )
        next_id += blocks
    if dropped:
        notes.append(f"{counted(dropped, 'request')} without prompt or response tokens (failures of the log) dropped")


def _count(text: str) -> int:
    """A number of tokens; libraries write a column with gaps as 374.0."""
    whole, _, fraction = text.partition(".")
    return int(text if fraction.strip("0") else whole)


def _figures(row: Sequence[str], columns: _Columns, unit_s: float, where: str) -> tuple[float, int, int]:
    """Seconds, prompt tokens and response tokens of a row."""
    try:
        if columns.dated:
            date = datetime.fromisoformat(row[0])
            time_s = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        else:
            time_s = float(row[0]) * unit_s
        lengths = _count(row[1]), _count(row[2])
    except (ValueError, OverflowError) as error:
        raise TraceError(
            f"{where}: not a request of {columns.name} ({error}); correct the line, or cut the file before it"
        ) from None
    if min(lengths) < 0 or not abs(time_s) < float("inf"):
        raise TraceError(f"{where}: negative lengths or no finite time ({', '.join(row)}); drop or correct the line")
    return time_s, *lengths
