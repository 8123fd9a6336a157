"""``python -m replayer``: the ``replay`` command."""

from __future__ import annotations

import typer

from replayer.cli import replay_command

if __name__ == "__main__":
    typer.run(replay_command)
