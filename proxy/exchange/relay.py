"""Relay of an engine's stream to the client, from one socket's callback to the other's.

It is bounded on both sides: against a silent engine and against a client that does not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from proxy.clients.inbound import Inbound
from proxy.engines.upstream import Answer, UpstreamError
from proxy.exchange.passage import RelayedSoFar, passage
from proxy.request.stream_end import ReportedError, reported_error, shows_end
from proxy.request.stream_filter import StreamFilter
from proxy.request.typed_events import TypedEvents
from proxy.request.usage import UsageFilter
from proxy.settings import TimeoutSettings

_DONE = (b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n")
"""End mark of a stream of events. JSON contains no unescaped line break, so it cannot end an answer's text."""
_AFTER_DONE_S = 1.0
"""Seconds to wait for the end of the answer after its last event; this only decides if the connection is kept."""


class ClientStalledError(Exception):
    """The client stopped reading its stream."""


class StreamRelay:
    """Relays one answer's body from its second piece on.

    The stream is complete with its ``[DONE]``, or at the end of the body if the last events say so.

    Args:
        answer: the engine's answer.
        inbound: the client side; its head has been started.
        keep: transforms the stream.
        idle_s: longest silence of the engine, in seconds.
        stall_s: seconds for which a client may leave its stream unread once its buffers are full.
        total_s: bound on the whole stream, in seconds.
    """

    _end = "[DONE] or a finish reason"

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
        self._progress = RelayedSoFar(self._loop.time())
        self._paused_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._done_seen = False
        self._error: Exception | None = None
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._cancel: Callable[[], object] | None = None
        """Handler of a client that leaves, as it was before."""

    async def run(self, first: bytes, begun: Callable[[], None] | None = None) -> None:
        """Relay ``first`` and everything that follows until the engine's stream ends; the client's stream stays open.

        ``begun`` is called after ``first`` has been written, so that its work does not delay the client.

        Raises:
            UpstreamError: the engine broke the stream off, ended it early, was silent, or took too long in all.
            ClientStalledError: the client does not read.
        """
        inbound = self._inbound
        self._cancel = inbound.on_gone
        inbound.on_gone = self._left
        self._take(first)
        if begun is not None:
            begun()
        inbound.on_writable = self._writable
        try:
            if not inbound.writable:
                self._writable(False)
            if self._done_seen:
                self._mark_done()
            else:
                self._timer = self._loop.call_later(min(self._idle_s, self._stall_s), self._check_timeouts)
            self._answer.pump(self._take, self._ended, self._passage())
            await self._done
            if self._error is not None:
                # Released, as it will reference this frame.
                error, self._error = self._error, None
                try:
                    raise error
                finally:
                    del error
        finally:
            inbound.on_writable = None
            if not self._done_seen:
                inbound.on_gone = self._cancel
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if self._done_seen:
            return
        held = self._keep.flush()
        if self._readable and not self._complete(held):
            raise UpstreamError(f"ended its stream without {self._end}")
        if held:
            inbound.write(held)

    @property
    def reported(self) -> ReportedError | None:
        """The error with which the engine itself has ended its stream."""
        return reported_error(self._progress.before_last + self._progress.last) if self._readable else None

    @property
    def _readable(self) -> bool:
        """True if the answer is a stream of events: an engine that does not stream answers in one piece."""
        headers = self._answer.headers
        return headers.content_type.lower().startswith("text/event-stream") and not headers.encoded

    def _complete(self, held: bytes) -> bool:
        """True if the answer was complete when its body ended, with ``held`` after its last event."""
        return shows_end(self._progress.before_last + self._progress.last + held)

    def _take(self, piece: bytes) -> None:
        if self._done_seen:
            return
        progress = self._progress
        progress.heard_s = self._loop.time()
        try:
            piece = self._keep.feed(piece)
        except UpstreamError as error:
            self._ended(error)
            return
        if piece:
            self._inbound.write(piece)
            progress.before_last, progress.last = progress.last, piece
            if piece.endswith(_DONE):
                self._mark_done()

    def _passage(self) -> Callable[[bytes], bool] | None:
        keep = self._keep
        if type(keep) is not UsageFilter or self._done_seen:
            return None
        return passage(keep, self._inbound, self._progress, self._loop.time)

    def _left(self) -> None:
        """Handle a client that leaves: one that has an engine's error has its whole answer, as libraries raise it."""
        if self.reported is not None:
            self._done_seen = True
            self._ended(None)
        elif self._cancel is not None:
            self._cancel()

    def _mark_done(self) -> None:
        """Record that the last event has arrived. The end of the answer then only decides if the connection is kept.

        A client that leaves from now on has its whole answer, as those do that close at the last event.
        """
        self._done_seen = True
        self._inbound.on_gone = partial(self._ended, None)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_AFTER_DONE_S, self._ended, None)

    def _ended(self, error: UpstreamError | None) -> None:
        if self._done.done():
            return
        if not self._done_seen:
            self._error = error
        self._done.set_result(None)

    def _writable(self, writable: bool) -> None:
        if writable:
            self._paused_s = None
            self._progress.heard_s = self._loop.time()  # nothing was read from the engine in the meantime
            self._answer.resume()
        elif self._paused_s is None:
            self._paused_s = self._loop.time()
            self._answer.pause()

    def _check_timeouts(self) -> None:
        """Check the timeouts: one timer per stream, rescheduled when it fires instead of for every piece."""
        now_s = self._loop.time()
        if self._paused_s is not None:
            due_s = self._paused_s + self._stall_s
            error: Exception = ClientStalledError(f"the client read nothing for {self._stall_s:g} s")
        else:
            due_s = self._progress.heard_s + self._idle_s
            error = UpstreamError(f"no data for {self._idle_s:g} s")
        if self._ends_s < due_s:
            due_s, error = self._ends_s, UpstreamError(f"the answer took over {self._total_s:g} s")
        if now_s < due_s:
            self._timer = self._loop.call_at(due_s, self._check_timeouts)
        elif not self._done.done():
            self._error = error
            self._done.set_result(None)


class TypedRelay(StreamRelay):
    """Relays a stream of named events. It is complete with its last event; what follows that is relayed too.

    vLLM 0.18 writes ``data: [DONE]`` after the last event of a message, later versions do not.
    """

    _end = "its last event"

    def __init__(
        self,
        answer: Answer,
        inbound: Inbound,
        keep: TypedEvents,
        idle_s: float,
        stall_s: float,
        total_s: float,
    ) -> None:
        super().__init__(answer, inbound, keep, idle_s, stall_s, total_s)
        self._events = keep

    @property
    def reported(self) -> ReportedError | None:
        return self._events.reported

    def _complete(self, held: bytes) -> bool:
        return self._events.ending

    def _take(self, piece: bytes) -> None:
        self._progress.heard_s = self._loop.time()
        piece = self._events.feed(piece)
        if piece:
            self._inbound.write(piece)
            if self._events.ended and not self._done_seen:
                self._mark_done()


class PlainRelay(StreamRelay):
    """Relays a body that is complete with its framing: audio, or events whose last one is not known."""

    @property
    def _readable(self) -> bool:
        return False


def stream_relay(
    answer: Answer, inbound: Inbound, keep: StreamFilter, timeouts: TimeoutSettings, total_s: float
) -> StreamRelay:
    """The relay for a stream and its filter; ``total_s`` bounds the rest of the answer, in seconds."""
    if isinstance(keep, TypedEvents):
        return TypedRelay(answer, inbound, keep, timeouts.idle_s, timeouts.client_stall_s, total_s)
    return StreamRelay(answer, inbound, keep, timeouts.idle_s, timeouts.client_stall_s, total_s)
