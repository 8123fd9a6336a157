"""Refusal of an output file that a command also reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class OverwritesInputError(ValueError):
    """The output is one of the inputs."""


def refuse_inputs(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output that is one of the inputs, by whatever path or link.

    Args:
        output: file to write.
        inputs: files that are read, or folders whose files are; missing ones are left to their readers.

    Raises:
        OverwritesInputError: it is one of them.
        OSError: a path cannot be looked up.
    """
    # Only regular files: a terminal may well be both input and output.
    if not output.is_file():
        return
    for given in inputs:
        for path in given.rglob("*") if given.is_dir() else [given]:
            if path.is_file() and output.samefile(path):
                same = "" if output == path else f" (the same file as {path})"
                raise OverwritesInputError(f"{output}{same} is an input and would be overwritten; give another output")
