"""Breakdown: one row per request in one of two ring buffers, and optionally in rotating JSONL files."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from heapq import merge
from itertools import chain, islice, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from policies.row import Row
from proxy.clip import clip
from proxy.records.batch import RecordBatch
from proxy.records.feed import DEFAULT_BUFFER_ROWS, RowFeed, RowSubscription
from proxy.records.files import RecordFiles, record_files
from proxy.records.filters import RowFilter
from proxy.records.numbers import RowNumbers, SingleNumbers
from proxy.records.past import past_rows
from proxy.records.ring import LineRing, Numbered

log = logging.getLogger("warmroute.breakdown")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_ROWS_PER_TURN = 200
"""Rows that are compared with a filter before other tasks run: 2 ms at most."""

_number = itemgetter(0)


class RowPage(NamedTuple):
    """Some of the rows that match a filter."""

    rows: list[Numbered]
    """Oldest first, numbered in the order in which the requests ended."""
    before: int | None
    """Cursor of the page with older rows; None: there are none."""
    after: int
    """Cursor of the page with newer rows."""


def _line(row: Row, number: int, started_unix_s: float) -> bytes:
    """The row as one JSON line."""
    head = {"row": number, "proxy_started_unix_s": started_unix_s}
    as_dict = row.as_dict()
    try:
        if row.trace is not None and as_dict["trace_id"] is not None:
            # The largest part of the row is in the trace too: encoded once.
            scores = _encode(as_dict["scores"])
            as_dict["scores"] = msgspec.Raw(scores)
            row.trace.recorded(scores)
        return _encode({**head, **as_dict})
    except (TypeError, UnicodeEncodeError, RecursionError):
        return _encode(plain({**head, **row.as_dict()}))


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
        jsonl_max_bytes: size at which the file is rotated.
        jsonl_files: files kept, the current one included.
        numbers: numbers of the rows; None: one after the other.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        capacity: int,
        jsonl_path: Path | None = None,
        *,
        rejected_capacity: int = 1_000,
        rejected_to_file: bool = False,
        jsonl_max_bytes: int = 256 * 1024 * 1024,
        jsonl_files: int = 4,
        numbers: RowNumbers | None = None,
    ) -> None:
        self._lines = LineRing(capacity)
        self._rejected = LineRing(rejected_capacity)
        self._rejected_to_file = rejected_to_file
        self._path = jsonl_path
        self._files = RecordFiles(jsonl_path, jsonl_max_bytes, jsonl_files) if jsonl_path is not None else None
        self._feed = RowFeed()
        self._batch = RecordBatch(self._keep, log, lambda ended: f"the row of request {ended[1].request_id} is lost")
        """Finished rows and their numbers, not encoded yet. Everything that reads rows encodes them first."""
        self._numbers: RowNumbers = numbers or SingleNumbers()
        self.number = 0
        """Number of the newest row, of an earlier process at first."""
        self.started_unix_s = round(time.time(), 3)
        """Start of this process, which its rows have as ``proxy_started_unix_s``."""
        self.open_rows: set[Row] = set()
        """Rows of the requests in flight."""
        self.started = 0
        self.finished = 0
        self.outcomes: dict[str, int] = {}

    @property
    def file_error(self) -> str | None:
        """Reason for which rows cannot be written to the file at the moment; None while they can."""
        return self._files.error if self._files is not None else None

    @property
    def file_dropped(self) -> int:
        """Rows that were not written to the file since the start."""
        return self._files.dropped if self._files is not None else 0

    @property
    def feed_dropped(self) -> int:
        """Rows that slow subscribers did not receive since the start."""
        return self._feed.dropped

    @property
    def subscribers(self) -> int:
        """Number of subscriptions."""
        return len(self._feed.subscriptions)

    def open(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Read the rows of earlier processes from the files, 64 MiB and 5 s at most, and start writing.

        With an event loop, several rows are encoded together from now on.
        """
        if loop is not None:
            self._batch.open(loop)
        if self._files is None or self._path is None:
            return
        try:
            past = past_rows(record_files(self._path), self._lines.capacity)
        except OSError as error:
            log.warning("earlier rows cannot be read from %s: %s", self._path, error)
        else:
            for row in past.rows:
                (self._rejected if row.unserved else self._lines).append(row.number, row.line)
            self.number = past.rows[-1].number if past.rows else 0
            if past.rows or past.damaged:
                damaged = f", {past.damaged} damaged lines left out" if past.damaged else ""
                log.info("%d rows of earlier processes read from %s%s", len(past.rows), self._path, damaged)
        self._files.open()

    def open_row(self, row: Row) -> Row:
        """Count a new request and return its row."""
        self.started += 1
        self.open_rows.add(row)
        return row

    def close_row(self, row: Row) -> None:
        """Store a finished row; every opened row is closed once."""
        self.finished += 1
        self.open_rows.discard(row)
        outcome = row.outcome
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        # Cut error texts, which may repeat input of any size.
        if row.error is not None:
            row.error = clip(row.error)
        for attempt in row.attempts:
            attempt["error"] = clip(attempt["error"])
        number = self.number = self._numbers.after(self.number)
        self._batch.add((number, row), row.trace is not None or bool(self._feed.subscriptions))

    def _keep(self, ended: tuple[int, Row]) -> None:
        number, row = ended
        line = _line(row, number, self.started_unix_s)
        unserved = row.unserved
        (self._rejected if unserved else self._lines).append(number, line)
        if self._files is not None and (self._rejected_to_file or not unserved):
            self._files.write(line)
        self._feed.publish(number, line)

    def subscribe(self, buffer_rows: int = DEFAULT_BUFFER_ROWS) -> AbstractAsyncContextManager[RowSubscription]:
        """Rows that end from now on, as encoded JSON; the oldest of ``buffer_rows`` unread ones is dropped first."""
        self._batch.settle()
        return self._feed.subscribe(buffer_rows)

    def end_subscriptions(self) -> None:
        """End every subscription, and those still to come: the proxy shuts down."""
        self._feed.close()

    def select(self, limit: int, **equal: str) -> Iterator[dict[str, Any]]:
        """The newest ``limit`` rows, oldest first, whose fields equal ``equal`` (``EQUAL_FIELDS``, by JSON name).

        Rows of rejected requests fill what the others leave of ``limit``.
        """
        self._batch.settle()
        wanted = RowFilter(equal)
        newest_first = chain(self._lines.newest_first(), self._rejected.newest_first())
        found = sorted(islice((each for each in newest_first if wanted.matches(each[1])), limit), key=_number)
        return (_decode(line) for _, line in found)

    def after(self, number: int, limit: int) -> list[tuple[int, bytes]]:
        """Numbers and JSON lines of the rows after the row ``number``: the newest ``limit`` of each ring, in order."""
        self._batch.settle()
        found = [
            numbered
            for lines in (self._lines, self._rejected)
            for numbered in takewhile(lambda line: line[0] > number, islice(lines.newest_first(), limit))
        ]
        return sorted(found, key=_number)

    async def page(self, limit: int, wanted: RowFilter, before: int | None = None, after: int | None = None) -> RowPage:
        """Rows that match a filter; other tasks run in between.

        Without a cursor, the newest, where rows of rejected requests fill what the others leave of ``limit``. With one,
        all rows count the same.

        Args:
            limit: rows, at most.
            wanted: the filter.
            before: only rows with smaller numbers, the newest of them.
            after: only rows with larger numbers, the oldest of them. Larger than the newest row's: it belongs to a
                process whose last rows are lost, and all rows are returned from the oldest on. Of several workers: the
                newest is another's, and there are no rows.
        """
        self._batch.settle()
        newest = self.number
        lines, rejected = self._lines.view(), self._rejected.view()
        if after is not None:
            first = 0 if after > newest and not self._numbers.shared else after
            since = merge(lines.after(first), rejected.after(first), key=_number)
            last = newest + 1 if before is None else before
            found = await _matching((each for each in since if each[0] < last), wanted, limit)
            more = found[-1][0] if len(found) == limit else min(newest, last - 1)
            return RowPage(found, first + 1 if first else None, more)
        if before is None:
            found = await _matching(chain(lines.newest_first(), rejected.newest_first()), wanted, limit + 1)
        else:
            older = merge(lines.newest_first(before), rejected.newest_first(before), key=_number, reverse=True)
            found = await _matching(older, wanted, limit + 1)
        shown = sorted(found[:limit], key=_number)
        oldest = shown[0][0] if len(found) > limit else None
        return RowPage(shown, oldest, newest if before is None else before - 1)

    def flush(self) -> None:
        """Write the rows that wait to the file now; blocks for the disk."""
        self._batch.settle()
        if self._files is not None:
            self._files.flush()

    def close(self) -> None:
        """End the subscriptions; write the rows that wait, and close the file. Later rows are not put off."""
        self._batch.close()
        self.end_subscriptions()
        if self._files is not None:
            self._files.close()


async def _matching(rows: Iterable[Numbered], wanted: RowFilter, limit: int) -> list[Numbered]:
    """The first ``limit`` rows that match."""
    found: list[Numbered] = []
    for scanned, each in enumerate(rows, 1):
        if wanted.matches(each[1]):
            found.append(each)
            if len(found) == limit:
                break
        if scanned % _ROWS_PER_TURN == 0:
            await asyncio.sleep(0)
    return found
