"""The file that a benchmark writes its figures to."""

from __future__ import annotations

import os
from pathlib import Path

import typer


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
