"""Passes an engine's stream on to the client, from one socket's callback to the other's.

Bounds it on both sides: an engine that falls silent, a client that does not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.clients.inbound import Inbound
from proxy.engines.upstream import Answer, UpstreamError
from proxy.request.stream_filter import StreamFilter

_DONE = (b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n")
"""The end of a stream of events. JSON holds no bare line break, so this is never the end of an answer's text."""
_AFTER_DONE_S = 1.0
"""For the end of an answer whose last event has come: it decides over the connection, no longer over the answer."""


class ClientStalledError(Exception):
    """The client stopped reading its stream."""


class StreamRelay:
    """Relays one answer's body from its second piece on.

    Args:
        answer: the engine's.
        inbound: the client's side; its head is started.
        keep: changes the stream on its way.
        idle_s: longest silence of the engine.
        stall_s: how long a client may leave its stream unread once its buffers are full.
        total_s: bound on the whole.
    """

    def __init__(
        self,
        answer: Answer,
        inbound: Inbound,
        keep: StreamFilter,
        idle_s: float,
        stall_s: float,
        total_s: float,
    ) -> None:
        self._answer = answer
        self._inbound = inbound
        self._keep = keep
        self._idle_s = idle_s
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._ends_s = self._loop.time() + total_s
        self._total_s = total_s
        self._heard_s = self._loop.time()
        self._paused_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._told_done = False
        self._error: Exception | None = None
        self._done: asyncio.Future[None] = self._loop.create_future()

    async def run(self, first: bytes, begun: Callable[[], None] | None = None) -> None:
        """Relay ``first`` and all that follows, up to the engine's end of the stream; the client's is left open.

        ``begun`` is called once ``first`` is on its way: what is done with it then keeps no client waiting.

        Raises:
            UpstreamError: the engine broke the stream off, fell silent, or took too long in all.
            ClientStalledError: the client does not read.
        """
        inbound = self._inbound
        self._take(first)
        if begun is not None:
            begun()
        inbound.on_writable = self._writable
        try:
            if not inbound.writable:
                self._writable(False)
            if self._told_done:
                self._tell_done()
            else:
                self._timer = self._loop.call_later(min(self._idle_s, self._stall_s), self._look)
            self._answer.pump(self._take, self._ended)
            await self._done
            if self._error is not None:
                # Let go of, as it will hold this frame.
                error, self._error = self._error, None
                try:
                    raise error
                finally:
                    del error
        finally:
            inbound.on_writable = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        held = b"" if self._told_done else self._keep.flush()
        if held:
            inbound.write(held)

    def _take(self, piece: bytes) -> None:
        if self._told_done:
            return
        self._heard_s = self._loop.time()
        try:
            piece = self._keep.feed(piece)
        except UpstreamError as error:
            self._ended(error)
            return
        if piece:
            self._inbound.write(piece)
            if piece.endswith(_DONE):
                self._tell_done()

    def _tell_done(self) -> None:
        """The last event has come. The connection's end of it decides no more than whether the connection is kept."""
        self._told_done = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_AFTER_DONE_S, self._ended, None)

    def _ended(self, error: UpstreamError | None) -> None:
        if self._done.done():
            return
        if not self._told_done:
            self._error = error
        self._done.set_result(None)

    def _writable(self, writable: bool) -> None:
        if writable:
            self._paused_s = None
            self._heard_s = self._loop.time()  # the engine was not listened to meanwhile
            self._answer.resume()
        elif self._paused_s is None:
            self._paused_s = self._loop.time()
            self._answer.pause()

    def _look(self) -> None:
        """The one timer of a stream: it looks at what has happened since, instead of being set anew for every piece."""
        now_s = self._loop.time()
        if self._paused_s is not None:
            due_s = self._paused_s + self._stall_s
            error: Exception = ClientStalledError(f"the client read nothing for {self._stall_s:g} s")
        else:
            due_s = self._heard_s + self._idle_s
            error = UpstreamError(f"no data for {self._idle_s:g} s")
        if self._ends_s < due_s:
            due_s, error = self._ends_s, UpstreamError(f"the answer took over {self._total_s:g} s")
        if now_s < due_s:
            self._timer = self._loop.call_at(due_s, self._look)
        elif not self._done.done():
            self._error = error
            self._done.set_result(None)
