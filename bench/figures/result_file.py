"""The file that a benchmark writes its figures to: checked before it measures, and written after every cell."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import typer

from bench.figures.machine import machine
from replayer.records.outputs import replacing


def writable(path: Path | None) -> Path | None:
    """Path of an option, with its folder: found out before hours of measuring, not after them.

    Raises:
        typer.BadParameter: the file cannot be written there.
    """
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{path}: its folder cannot be made: {error.strerror}") from error
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; give the name of a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written")
    return path


def write_cells(path: Path, kind: str, schema: int, setting: Mapping[str, object], cells: Sequence[object]) -> None:
    """Replace the file by the cells there are, a line each: a run that is interrupted keeps those that it finished.

    Args:
        path: the file; its folder is made.
        kind: of the benchmark.
        schema: version of the file.
        setting: further keys, before the cells.
        cells: measured so far.

    Raises:
        OSError: it cannot be written; the old one is untouched.
    """
    head = msgspec.json.encode({"kind": kind, "schema": schema, "machine": machine(), **setting})
    lines = b",\n".join(map(msgspec.json.encode, cells))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(head[:-1] + b',"cells":[\n' + lines + b"\n]}\n")
