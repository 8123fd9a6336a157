"""Comparison of a finished run's files with the hashes that were recorded when it ended."""

from __future__ import annotations

from pathlib import Path

from launch.arm import RUN_FILE
from launch.experiment.records.record import ARM_FILE
from launch.experiment.records.state import RunState, mark
from launch.freshness.proof import FRESH_FILE

_NEEDED = (RUN_FILE, FRESH_FILE, ARM_FILE)


def damage(folder: Path, run: RunState) -> list[str]:
    """Files that a finished run lacks or that have changed, one sentence each. Raises OSError for unreadable ones."""
    found = [f"{name} was never recorded" for name in _NEEDED if name not in run.files]
    for name, noted in run.files.items():
        if not (folder / name).is_file():
            found.append(f"{name} is missing")
        elif mark(folder / name) != noted:
            found.append(f"{name} has changed since it was written (SHA-256)")
    return found
