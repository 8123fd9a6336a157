"""Rows of all workers: pages in the order of their numbers, and live streams joined into one.

A row's number is its end in tenths of a millisecond, with the worker in the lowest digits, so that numbers of all
workers have one order: ``proxy.records.numbers``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from urllib.parse import parse_qsl, urlencode

import httpx
import msgspec

from proxy.errors import RequestError
from proxy.gather.peers import PeerAnswer, Peers
from proxy.records.numbers import number_at

_END = b"event: end"
_LOOK_S = 1.0
"""Time between two looks for workers that have started."""
_REPEAT_S = 1.0
"""Rows that ended so long before the last one that a reader has are sent again when it resumes: streams of workers are
joined as they come, so that an older row may have been on its way."""
_BUFFER = 1000


class _PageOf(msgspec.Struct):
    rows: list[msgspec.Raw]
    next: dict[str, int | None]
    proxy_started_unix_s: float
    unix_s: float


class _Numbered(msgspec.Struct):
    row: int


_page = msgspec.json.Decoder(_PageOf)
_row = msgspec.json.Decoder(_Numbered)


class PageQuery:
    """Query of one page, before and after the workers are asked.

    Args:
        query: of the request.
        now_s: time by which rows are numbered.
    """

    def __init__(self, query: bytes, now_s: float) -> None:
        self._pairs = [(name, value) for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True)]
        self.lines = dict(self._pairs).get("format") == "jsonl"
        self._closed = number_at(now_s)
        """Rows with smaller numbers have ended on every worker, and are in its answer."""

    @property
    def target(self) -> str:
        """Path and query for the workers, which answer in JSON and check everything else, unknown formats too."""
        return "/breakdown?" + urlencode([pair for pair in self._pairs if pair != ("format", "jsonl")])

    def joined(self, answers: list[PeerAnswer]) -> tuple[bytes, str]:
        """Body and content type of the page."""
        given = dict(self._pairs)
        limit, after = int(given.get("limit", 100)), "after" in given
        pages = [_page.decode(each.body) for each in answers]
        rows = sorted((_row.decode(line).row, bytes(line)) for page in pages for line in page.rows)
        rows = [each for each in rows if each[0] < self._closed]
        shown = rows[:limit] if after else rows[-limit:]
        if self.lines:
            return b"".join(line + b"\n" for _, line in shown), "application/x-ndjson"
        older = len(rows) > len(shown) or any(page.next.get("before") is not None for page in pages)
        newest = max(page.next.get("after") or 0 for page in pages)
        if after:
            # Each worker answers up to its own cursor, or to the last row of a full page.
            before: int | None = int(given["after"]) + 1
            newest = shown[-1][0] if len(shown) == limit else max(newest, int(given["after"]))
        else:
            before = shown[0][0] if older and shown else None
        rest = {
            "next": {"before": before, "after": min(newest, self._closed - 1)},
            "proxy_started_unix_s": min(page.proxy_started_unix_s for page in pages),
            "workers_started_unix_s": sorted(page.proxy_started_unix_s for page in pages),
            "unix_s": round(time.time(), 3),
        }
        body = b'{"rows":[%b],%b' % (b",".join(line for _, line in shown), msgspec.json.encode(rest)[1:])
        return body, "application/json"


def resumed(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Headers of a stream for the workers: a reader that resumes begins a little earlier."""
    last = headers.get(b"last-event-id", b"")
    if not last.isdigit() or len(last) > 16:
        return {}
    back = round(_REPEAT_S * number_at(1.0))
    return {"last-event-id": str(max(0, int(last) - back))}


class JoinedStreams:
    """One stream of server-sent events out of those of all workers; ends when one breaks, so that readers resume.

    Args:
        peers: of this worker.
        target: path and query.
        headers: of the requests to the workers.
        ending: true while this worker shuts down.
    """

    def __init__(self, peers: Peers, target: str, headers: dict[str, str], ending: Callable[[], bool]) -> None:
        self._peers = peers
        self._target = target
        self._headers = headers
        self._ending = ending
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue(_BUFFER)

    async def events(self) -> AsyncIterator[bytes]:
        """Events in the order of their arrival."""
        tasks: dict[int, asyncio.Task[None]] = {}
        looked_s = float("-inf")
        try:
            while True:
                if time.monotonic() - looked_s > _LOOK_S:
                    looked_s = time.monotonic()
                    with contextlib.suppress(RequestError):  # without the parent this process ends anyway
                        for number in await self._peers.listed():
                            if number not in tasks:
                                tasks[number] = asyncio.create_task(self._read(number), name="rows")
                event = await self._next()
                if event is None:
                    break
                if event:
                    yield event
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        yield b'event: end\ndata: {"reason": "%b"}\n\n' % (b"shutdown" if self._ending() else b"worker")

    async def _next(self) -> bytes | None:
        """The next event; empty if none comes soon, None at the end of a worker's stream."""
        try:
            async with asyncio.timeout(_LOOK_S):
                return await self._events.get()
        except TimeoutError:
            return b""

    async def _read(self, worker: int) -> None:
        """Pass one worker's events on."""
        rest = b""
        with contextlib.suppress(httpx.HTTPError):
            async with self._peers.stream(worker, self._target, self._headers) as answer:
                async for piece in answer.aiter_bytes():
                    whole, found, rest = (rest + piece).rpartition(b"\n\n")
                    if not found:
                        continue
                    ended = whole.rfind(_END)
                    if ended >= 0:
                        whole = whole[:ended]
                    if whole:
                        await self._events.put(whole.rstrip(b"\n") + b"\n\n")
                    if ended >= 0:
                        break
        await self._events.put(None)
