"""Frames between a worker and its parent, over a pair of connected sockets: four bytes of length, then MessagePack."""

from __future__ import annotations

from asyncio import IncompleteReadError, StreamReader
from enum import StrEnum

import msgspec

from proxy.sharing.wire import Message, Pin, SharedResponse

_LENGTH_BYTES = 4
_LARGEST_BYTES = 256 * 1024 * 1024


class Order(StrEnum):
    """Orders of the parent to a worker."""

    END = "end"
    """Shut down gracefully."""
    HURRY = "hurry"
    """Shut down without waiting for running requests."""
    RELOAD = "reload"
    """Read the settings again."""


class Question(StrEnum):
    """Things that a worker may ask its parent for."""

    REPLICAS = "replicas"
    """Last full message of every worker. A new reading of pins and responses begins."""
    PINS = "pins"
    """The next pins of that reading; none: it is complete."""
    RESPONSES = "responses"
    """The next stored responses of it, likewise."""
    ROSTER = "roster"
    CHANGES = "changes"
    ENDED = "ended"
    """Counters of processes that have ended."""


class ChangeRequest(msgspec.Struct, frozen=True):
    """A request that changed every worker, for those that start later."""

    method: str
    target: str
    """Path and query."""
    body: bytes
    admin_key: str | None


class WorkerStanding(msgspec.Struct, frozen=True):
    """One worker, as its parent knows it."""

    worker: int
    pid: int | None
    """None: no process, as between an end and a restart."""
    listed: bool
    """It can be asked by the others."""
    serving: bool
    """It listens."""
    restarts: int
    since_unix_s: float
    """Start of its process, or the end of the last one."""
    last_end: str | None
    """End of its last process."""
    hung: int = 0
    """Restarts after it had shown no life; they are among ``restarts``."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Worker to parent: for all workers."""

    message: Message


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Worker to parent."""

    number: int
    question: Question


class Listed(msgspec.Struct, frozen=True, tag=True):
    """Worker to parent: it has every change and can be asked."""


class Serving(msgspec.Struct, frozen=True, tag=True):
    """Worker to parent: it listens."""


class Ending(msgspec.Struct, frozen=True, tag=True):
    """Worker to parent: it shuts down."""

    within_s: float


class Changed(msgspec.Struct, frozen=True, tag=True):
    """Worker to parent: a request has changed all workers."""

    change: ChangeRequest


class Reloaded(msgspec.Struct, frozen=True, tag=True):
    """Worker to parent: settings were read again, and those with these keys applied."""

    keys: tuple[str, ...]


class Reread(msgspec.Struct, frozen=True, tag=True):
    """Worker to parent: a reload that was ordered has ended, whatever its result."""


class Shown(msgspec.Struct, frozen=True, tag=True):
    """Worker to parent: counters as they are about to be shown, kept for the time after its end."""

    families: bytes


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Worker to parent: its event loop runs."""


class AskAlive(msgspec.Struct, frozen=True, tag=True):
    """Parent to worker: it has been silent, and is to answer ``Alive``."""


class Delivered(msgspec.Struct, frozen=True, tag=True):
    """Parent to worker: a message of a worker."""

    message: Message


class Ordered(msgspec.Struct, frozen=True, tag=True):
    """Parent to worker."""

    order: Order


class Answered(msgspec.Struct, frozen=True, tag=True):
    """Parent to worker: the answer to a question; fields of other questions are empty."""

    number: int
    replicas: tuple[tuple[Message, float], ...] = ()
    """With the age of each in seconds."""
    pins: tuple[Pin, ...] = ()
    responses: tuple[SharedResponse, ...] = ()
    roster: tuple[WorkerStanding, ...] = ()
    changes: tuple[ChangeRequest, ...] = ()
    ended: bytes = b""


FromWorker = Publish | Ask | Listed | Serving | Ending | Changed | Reloaded | Reread | Shown | Alive
FromParent = Delivered | Ordered | Answered | AskAlive

_from_worker = msgspec.msgpack.Decoder(FromWorker)
_from_parent = msgspec.msgpack.Decoder(FromParent)
_encode = msgspec.msgpack.Encoder().encode


def framed(frame: FromWorker | FromParent) -> bytes:
    """Encode one frame."""
    body = _encode(frame)
    return len(body).to_bytes(_LENGTH_BYTES) + body


async def next_from_worker(reader: StreamReader) -> FromWorker | None:
    """Next frame of a worker; None at the end of the connection. Raises ValueError for bytes that are no frame."""
    body = await _next(reader)
    return None if body is None else _from_worker.decode(body)


async def next_from_parent(reader: StreamReader) -> FromParent | None:
    """Next frame of the parent; None at the end of the connection. Raises ValueError for bytes that are no frame."""
    body = await _next(reader)
    return None if body is None else _from_parent.decode(body)


async def _next(reader: StreamReader) -> bytes | None:
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
        if length > _LARGEST_BYTES:
            raise ValueError(f"a frame of {length} bytes")
        return await reader.readexactly(length)
    except (IncompleteReadError, ConnectionError):
        return None
