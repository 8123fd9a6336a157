"""Cells by name: one arena per process, traces as chosen on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.tournament.arena import Arena, PreparedCell
from bench.tournament.results import GridCell
from bench.tournament.settings import TournamentError, read_settings

_arenas: dict[str, Arena] = {}
"""One per process: reading the traces takes longer than a cell."""


def prepared(folder: str, cell: GridCell, seed: int) -> PreparedCell:
    """A cell over the traces of a folder.

    Raises:
        TournamentError: no such trace, or no request to judge.
    """
    if folder not in _arenas:
        _arenas[folder] = Arena(read_settings(), Path(folder))
    return _arenas[folder].stage(cell, seed)


def chosen_traces(folder: Path, names: Sequence[str]) -> list[str]:
    """Names of traces in the order given; all of the folder without any.

    Raises:
        TournamentError: a trace is not there.
    """
    known = sorted(Arena(read_settings(), folder).grounds)
    missing = sorted(set(names) - set(known))
    if missing:
        raise TournamentError(f"no trace {', '.join(missing)}; known: {', '.join(known)}")
    return list(names) or known
