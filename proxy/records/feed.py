"""Live feed of finished rows: any number of subscribers, each with a bounded buffer of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

DEFAULT_BUFFER_ROWS = 1_000


class RowSubscription:
    """Async iterator of encoded rows, in the order of their ends; it ends when the feed is closed.

    A reader that is slower than the rows loses the oldest that it has not read; ``dropped`` counts them.
    """

    def __init__(self, buffer_rows: int) -> None:
        self._rows: deque[tuple[int, bytes]] = deque(maxlen=buffer_rows)
        self._some = asyncio.Event()
        self._closed = False
        self.dropped = 0
        """Rows that this subscriber lost so far."""
        self.number = 0
        """Number of the row returned last."""

    def put(self, number: int, line: bytes) -> None:
        """Add a row; drops the oldest if the buffer is full."""
        if len(self._rows) == self._rows.maxlen:
            self.dropped += 1
        self._rows.append((number, line))
        self._some.set()

    def close(self) -> None:
        """End the iteration once the buffered rows are read."""
        self._closed = True
        self._some.set()

    def take(self) -> list[tuple[int, bytes]]:
        """The rows that wait in the buffer, with their numbers; does not wait."""
        rows = list(self._rows)
        self._rows.clear()
        return rows

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._rows:
            if self._closed:
                raise StopAsyncIteration
            self._some.clear()
            await self._some.wait()
        self.number, line = self._rows.popleft()
        return line


class RowFeed:
    """Distributes rows to subscribers of the same event loop. ``publish`` costs nothing without subscribers."""

    def __init__(self) -> None:
        self.subscriptions: list[RowSubscription] = []
        """Those that have not ended."""
        self._closed = False
        self._dropped_before = 0

    @property
    def dropped(self) -> int:
        """Rows that subscribers lost, over all of them."""
        return self._dropped_before + sum(each.dropped for each in self.subscriptions)

    @asynccontextmanager
    async def subscribe(self, buffer_rows: int = DEFAULT_BUFFER_ROWS) -> AsyncIterator[RowSubscription]:
        """Rows that end from now on, as JSON lines, until the context is left."""
        subscription = RowSubscription(buffer_rows)
        if self._closed:
            subscription.close()
        self.subscriptions.append(subscription)
        try:
            yield subscription
        finally:
            self.subscriptions.remove(subscription)
            self._dropped_before += subscription.dropped

    def publish(self, number: int, line: bytes) -> None:
        """Give a row to every subscriber."""
        for subscription in self.subscriptions:
            subscription.put(number, line)

    def close(self) -> None:
        """End every subscription, and those still to come; a second call does nothing."""
        self._closed = True
        for subscription in self.subscriptions:
            subscription.close()
