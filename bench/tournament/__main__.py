"""``python -m bench.tournament``."""

from __future__ import annotations

from bench.tournament.cli import app

if __name__ == "__main__":
    app(prog_name="python -m bench.tournament")
