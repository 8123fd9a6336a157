"""Cells by name: one arena per process, traces as chosen on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.tournament.arena import Arena, PreparedCell
from bench.tournament.results import GridCell
from bench.tournament.settings import TournamentError, read_settings

_arenas: dict[tuple[str, str], Arena] = {}
"""One per process, by folder and profile: reading the traces takes longer than a cell."""


def prepared(folder: str, cell: GridCell, seed: int, profile: str = "") -> PreparedCell:
    """A cell over the traces of a folder; ``profile`` times the engines in place of that of the tournament's settings.

    Raises:
        TournamentError: no such trace, or no request to judge.
    """
    key = (folder, profile)
    if key not in _arenas:
        settings = read_settings()
        _arenas[key] = Arena(msgspec.structs.replace(settings, profile=profile or settings.profile), Path(folder))
    return _arenas[key].stage(cell, seed)


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
