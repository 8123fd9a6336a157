"""``python -m sim``: run one simulated engine; ``python -m sim simulate`` and ``fidelity``: virtual time.

``python -m sim check`` is for launch: see `sim.offline.checking`.
"""

import sys
from collections.abc import Callable
from typing import Any

import typer

from sim.cli import engine
from sim.fidelity.cli import fidelity
from sim.offline.checking import check_command
from sim.offline.cli import simulate_command

COMMANDS: dict[str, Callable[..., Any]] = {"simulate": simulate_command, "fidelity": fidelity, "check": check_command}

if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    named = sys.argv[1] if len(sys.argv) > 1 else ""
    app.command()(COMMANDS.get(named, engine))
    if named in COMMANDS:
        app(sys.argv[2:], prog_name=f"python -m sim {named}")
    app(prog_name="python -m sim")
