"""Short way of a chunk with one event from the engine's socket to the client's.

Most reads of a stream are one whole chunk with one event. Such a chunk is forwarded with the framing that it has, or
with that of the shorter event if a null usage is removed: no parser and no filter runs. What it does is what
``UsageFilter.feed`` and ``Inbound.write`` do for such an event; a test compares both. Everything else is left to them.
"""

from __future__ import annotations

from collections.abc import Callable

from proxy.clients.inbound import Inbound
from proxy.request.usage import UsageFilter

_MAX_BYTES = 4096
"""Larger chunks are left to the parser."""
_EVENT_END = b"}\n\n\r\n"
_NULL_USAGE_END = b',"usage":null}\n\n\r\n'
"""The end of vLLM's events."""
_SHORTER = len(b',"usage":null')


def _heads() -> list[bytes | None]:
    """Size line by the size of a whole chunk in bytes; None: no chunk has that size."""
    heads: list[bytes | None] = [None] * _MAX_BYTES
    for size in range(1, _MAX_BYTES):
        head = b"%x\r\n" % size
        if len(head) + size + 2 < _MAX_BYTES:
            heads[len(head) + size + 2] = head
    return heads


_HEADS = _heads()


class RelayedSoFar:
    """Time and last pieces of a stream, as its timeouts and its end are judged by them."""

    __slots__ = ("before_last", "heard_s", "last")

    def __init__(self, now_s: float) -> None:
        self.heard_s = now_s
        """Time of the last piece, on the event loop's clock."""
        self.last = self.before_last = b""
        """The last two pieces written; pieces of this module with their framing."""


def passage(
    keep: UsageFilter, inbound: Inbound, progress: RelayedSoFar, clock: Callable[[], float]
) -> Callable[[bytes], bool] | None:
    """The way of ``Answer.pump`` for one stream; None if the client's body is not sent in chunks.

    A closure, since it runs for every event: it reaches what it needs in a few steps.
    """
    write, heads = inbound.chunk_writer(), _HEADS
    if write is None:
        return None

    def passed(read: bytes) -> bool:
        """Forward a read that is one whole chunk with one event; False: it is something else."""
        size = len(read)
        head = heads[size] if size < _MAX_BYTES else None
        if head is None or keep.held or inbound.gone or not read.startswith(head) or read.count(b"data: ") != 1:
            return False
        if read.endswith(_NULL_USAGE_END):
            if keep.drop:
                at = len(head)
                shorter = size - at - 2 - _SHORTER
                read = b"%x\r\n%b}\n\n\r\n" % (shorter, read[at : -len(_NULL_USAGE_END)])
        elif not read.endswith(_EVENT_END) or b'"usage"' in read:
            return False
        keep.events += 1
        progress.heard_s = clock()
        progress.before_last, progress.last = progress.last, read
        write(read)
        return True

    return passed
