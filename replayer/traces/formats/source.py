"""Access to trace files: plain, gzip or zstd, as a stream of lines or as members of a tar archive."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import zstandard

from replayer.traces.trace import TraceError

ZSTD_WINDOW_BYTES = 1 << 27
"""Largest window accepted: the zstd program's default limit for decompression."""
CHUNK_BYTES = 1 << 20


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
            reader = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).stream_reader(
                raw, read_across_frames=True
            )
            with io.BufferedReader(cast(io.RawIOBase, reader), CHUNK_BYTES) as buffered:
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
    except (zstandard.ZstdError, gzip.BadGzipFile, EOFError) as error:
        raise TraceError(
            f"{path}:{number + 1}: the compressed data is damaged or cut ({error}); fetch the file again"
        ) from error


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
        except (tarfile.TarError, zstandard.ZstdError, gzip.BadGzipFile, EOFError) as error:
            raise TraceError(f"{path}: not a readable tar archive ({error}); fetch the file again") from error
    else:
        with open_bytes(path) as stream:
            yield str(path), _without_bom(stream.read())


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
