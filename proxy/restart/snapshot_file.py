"""Format of a snapshot: magic number with version, SHA-256 of the rest, then records in MessagePack.

Every record is preceded by its length in 4 bytes. The order: one `Header`; one `Learned`; per engine an `EnginePart`
and its `Runs`; then `Pins`. A reader takes a file as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from policies.costs.learned import LearnedCosts
from policies.predict.prefix_tree import PrefixRun

MAGIC = b"warmroute-snap-3"
"""Changes with every incompatible change of the format or of the block hashes."""
_DIGEST_BYTES = 32
_START = len(MAGIC) + _DIGEST_BYTES
_LENGTH_BYTES = 4


class SnapshotError(ValueError):
    """A file that is not a usable snapshot; the message has the reason."""


class Header(msgspec.Struct, frozen=True, tag=True):
    """Parameters that the hashes depend on."""

    written_unix_s: float
    seed: int
    block_tokens: int
    text_block_bytes: int


class Learned(msgspec.Struct, frozen=True, tag=True):
    """Learned times and ratios."""

    costs: LearnedCosts
    text_ratios: dict[str, float]
    """Bytes per token by endpoint."""


class EnginePart(msgspec.Struct, frozen=True, tag=True):
    """Identity of the engine process whose cache the following runs describe."""

    name: str
    url: str
    started_unix_s: float | None
    engine_id: str | None


class Runs(msgspec.Struct, frozen=True, tag=True):
    """Runs of an engine's prefix tree, most recently used first."""

    runs: list[PrefixRun]


class Pins(msgspec.Struct, frozen=True, tag=True):
    """Sessions, most recently used first."""

    pins: list[tuple[bytes, str, float]]
    """Key of a session's context, instance, idle time in seconds."""


Record = Header | Learned | EnginePart | Runs | Pins

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Header | Learned | EnginePart | Runs | Pins).decode


@dataclass(slots=True)
class SnapshotContents:
    """Contents of a snapshot."""

    header: Header
    learned: Learned
    engines: list[tuple[EnginePart, list[PrefixRun]]] = field(default_factory=list)
    pins: list[tuple[bytes, str, float]] = field(default_factory=list)


def framed(record: Record) -> bytes:
    """Encode one record."""
    encoded = _encode(record)
    return len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded


def write_snapshot(path: Path, records: Iterable[bytes]) -> int:
    """Replace the file at ``path`` by framed records, in one step that survives a crash; returns its bytes.

    Readable by the owner only: the seed in it is a secret. Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()  # of a process that was killed: its mode is not known
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            digest = hashlib.sha256()
            file.write(bytes(_START))
            for record in records:
                digest.update(record)
                file.write(record)
            size = file.tell()
            file.seek(0)
            file.write(MAGIC + digest.digest())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return size


def read_snapshot(path: Path, max_bytes: int) -> SnapshotContents:
    """Contents of the file at ``path``.

    Raises:
        FileNotFoundError: there is none.
        SnapshotError: it is not a regular file, too large, open to other users, of another version, or damaged.
        OSError: it cannot be read.
    """
    # Not blocking: the open of a named pipe would wait for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SnapshotError("it is not a regular file")
        if status.st_mode & 0o007:  # the group: Kubernetes opens volumes to that of the pod
            raise SnapshotError(f"its mode is {stat.S_IMODE(status.st_mode):o}: other users may know its seed")
        if status.st_size > max_bytes:
            raise SnapshotError(f"it has {status.st_size} bytes, more than {max_bytes} (snapshot.max_bytes)")
        contents = file.read(max_bytes + 1)
    if not contents.startswith(MAGIC):
        raise SnapshotError("it is of another version, or no snapshot")
    payload = memoryview(contents)[_START:]
    if hashlib.sha256(payload).digest() != contents[len(MAGIC) : _START]:
        raise SnapshotError("it is damaged: its checksum does not match")
    try:
        return _contents(_records(payload))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SnapshotError(f"it is damaged: {error}") from error


def _records(payload: memoryview) -> Iterator[Record]:
    at = 0
    while at < len(payload):
        end = at + _LENGTH_BYTES + int.from_bytes(payload[at : at + _LENGTH_BYTES], "big")
        if end > len(payload):
            raise SnapshotError("it is damaged: its last record is not complete")
        yield _decode(payload[at + _LENGTH_BYTES : end])
        at = end


def _contents(records: Iterator[Record]) -> SnapshotContents:
    header, learned = next(records, None), next(records, None)
    if not isinstance(header, Header) or not isinstance(learned, Learned):
        raise SnapshotError("it is damaged: it has no header")
    contents = SnapshotContents(header, learned)
    for record in records:
        if isinstance(record, EnginePart):
            contents.engines.append((record, []))
        elif isinstance(record, Runs) and contents.engines:
            contents.engines[-1][1].extend(record.runs)
        elif isinstance(record, Pins):
            contents.pins.extend(record.pins)
        else:
            raise SnapshotError("it is damaged: its records are out of order")
    return contents
