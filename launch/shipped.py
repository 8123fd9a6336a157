"""Lookup of configuration files that ship with the package, by name."""

from __future__ import annotations

from pathlib import Path


class ShippedFileError(LookupError):
    """Neither a file nor a shipped name; the message lists the shipped names."""


def find_shipped(path: Path, folder: Path) -> Path:
    """The file at a path, or the shipped file of that name.

    Args:
        path: a file, or a bare name such as ``sim-4x`` for ``folder/sim-4x.yaml``.
        folder: where the shipped files are.

    Raises:
        ShippedFileError: neither exists.
    """
    if path.is_file():
        return path
    shipped = folder / f"{path.name}.yaml"
    if len(path.parts) == 1 and shipped.is_file():
        return shipped
    raise ShippedFileError(", ".join(sorted(found.stem for found in folder.glob("*.yaml"))) or "none")
