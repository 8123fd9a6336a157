"""The ``warmroute`` command line: one Typer application put together from each folder's own commands."""

from __future__ import annotations

__version__ = "0.1.0"
