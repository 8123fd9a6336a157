"""Access to trace files: plain, gzip or zstd, as a stream of lines or as members of a tar archive."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import zstandard

from replayer.traces.trace import TraceError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ZSTD_WINDOW_BYTES = 1 << 27
"""Largest window accepted: the zstd program's default limit for decompression."""
CHUNK_BYTES = 1 << 20
_ZSTD_INPUT_BYTES = 1 << 14
"""Compressed bytes per step; a step's output is held in memory."""
_TO_UTF8 = "convert text with `iconv -f UTF-16 -t UTF-8 FILE > NEW`"
_TO_JSONL = "write it as JSONL, as with pandas: read_{}(FILE).to_json(NEW, orient='records', lines=True)"
_OTHER_FILES = (
    (b"\xff\xfe", "UTF-16 text", _TO_UTF8),
    (b"\xfe\xff", "UTF-16 text", _TO_UTF8),
    (b"PAR1", "a Parquet file", _TO_JSONL.format("parquet")),
    (b"ARROW1", "an Arrow file", _TO_JSONL.format("feather")),
    (b"PK\3\4", "a zip archive or Excel workbook", "unpack the archive, or save the sheet as CSV UTF-8"),
    (b"\xd0\xcf\x11\xe0", "an Excel workbook", "save the sheet as CSV UTF-8"),
    (b"BZh", "bzip2 data", "unpack it with bunzip2"),
    (b"\xfd7zXZ", "xz data", "unpack it with unxz"),
)
"""First bytes, name and remedy of formats that logs come in."""
_DAMAGE = (zstandard.ZstdError, gzip.BadGzipFile, zlib.error, EOFError)
"""Errors of reading compressed data that is damaged or cut."""


class _ZstdFrames(io.RawIOBase):
    """Decompressed bytes of a sequence of zstd frames, all of which must be whole.

    zstandard's own reader takes a frame that is cut for the end of the data, so a download that broke off would be a
    shorter trace.

    Raises:
        EOFError: while reading, the file ends within a frame.
        zstandard.ZstdError: while reading, damaged data.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame = self._new_frame()
        self._frame_began = False
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._output:
            if not self._input:
                self._input = self._raw.read(_ZSTD_INPUT_BYTES)
            if not self._input:
                if self._frame_began:
                    raise EOFError("the file ends before the end of a zstd frame")
                return 0
            self._frame_began = True
            self._output = memoryview(self._frame.decompress(self._input))
            self._input = b""
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame, self._frame_began = self._new_frame(), False
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._output))
        target[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    @staticmethod
    def _new_frame() -> zstandard.ZstdDecompressionObj:
        return zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Decompressed bytes of a file; the compression is detected by its first bytes, not its name."""
    with path.open("rb") as raw:
        magic = raw.read(4)
        raw.seek(0)
        if magic[:2] == b"\x1f\x8b":
            with gzip.open(raw, "rb") as unzipped:
                yield cast(IO[bytes], unzipped)
        elif magic == b"\x28\xb5\x2f\xfd":
            with io.BufferedReader(_ZstdFrames(raw), CHUNK_BYTES) as buffered:
                yield buffered
        else:
            yield raw


def iter_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Non-empty lines with their numbers, with one line in memory at a time.

    Raises:
        TraceError: the compressed stream is damaged or cut.
    """
    number = 0
    try:
        with open_bytes(path) as stream:
            for number, line in enumerate(stream, 1):
                text = _without_bom(line) if number == 1 else line
                if text.strip():
                    yield number, text
    except _DAMAGE as error:
        raise TraceError(
            f"{path}:{number + 1}: the compressed data is damaged or cut ({error}); fetch the file again"
        ) from error


def is_empty(path: Path) -> bool:
    """Test for a file without content, decompressed.

    Raises:
        TraceError: the compressed data is damaged or cut before its first byte.
    """
    try:
        with open_bytes(path) as stream:
            return not stream.read(1)
    except _DAMAGE as error:
        raise TraceError(f"{path}: the compressed data is damaged or cut ({error}); fetch the file again") from error


def refuse_other_files(path: Path) -> None:
    """Refuse a file whose first bytes are those of a format that has no lines of JSON or CSV.

    Raises:
        TraceError: names the format and a way to convert it.
    """
    try:
        with open_bytes(path) as stream:
            start = stream.read(8)
    except _DAMAGE:
        return  # the reader reports it
    for magic, kind, remedy in _OTHER_FILES:
        if start.startswith(magic):
            raise TraceError(f"{path}: {kind}, which is not read; {remedy}")
    if start[1:2] == b"\0" or start[:1] == b"\0":
        raise TraceError(f"{path}: UTF-16 text or another binary format, which is not read; {_TO_UTF8}")


def _without_bom(text: bytes) -> bytes:
    """Text without a byte order mark, which some editors write first."""
    return text.removeprefix(BOM_UTF8)


def is_tar(path: Path) -> bool:
    """Test for the name of a tar archive (.tar, .tar.gz, .tgz, .tar.zst)."""
    return path.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.zst"))


def iter_json_members(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every ``.json`` file of a folder or tar archive, or of the one file given.

    Folders come in name order; an archive in its own order, because it is read as a stream.
    """
    if path.is_dir():
        for member in sorted(path.rglob("*.json")):
            yield str(member), _without_bom(member.read_bytes())
    elif is_tar(path):
        try:
            with open_bytes(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
                for entry in archive:
                    extracted = archive.extractfile(entry) if entry.isfile() and entry.name.endswith(".json") else None
                    if extracted is not None:
                        yield f"{path}!{entry.name}", _without_bom(extracted.read())
        except (tarfile.TarError, *_DAMAGE) as error:
            raise TraceError(f"{path}: not a readable tar archive ({error}); fetch the file again") from error
    else:
        try:
            with open_bytes(path) as stream:
                content = stream.read()
        except _DAMAGE as error:
            raise TraceError(
                f"{path}: the compressed data is damaged or cut ({error}); fetch the file again"
            ) from error
        yield str(path), _without_bom(content)


def file_sha256(path: Path) -> str:
    """SHA-256 over the stored bytes (over names and bytes in name order, for a folder)."""
    digest = hashlib.sha256()
    for member in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        if path.is_dir():
            digest.update(str(member.relative_to(path)).encode())
        with member.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
