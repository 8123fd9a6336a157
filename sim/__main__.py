"""``python -m sim``: run one simulated engine; ``python -m sim simulate`` and ``fidelity``: virtual time.

``python -m sim check`` is for launch: see `sim.offline.checking`.
"""

import sys
from collections.abc import Callable
from typing import Any

import typer

from sim.cli import engine


def command(name: str) -> Callable[..., Any] | None:
    """Function of a command, None if there is none of this name. Engines, which start in dozens, import no other."""
    if name == "simulate":
        from sim.offline.cli import simulate_command

        return simulate_command
    if name == "fidelity":
        from sim.fidelity.cli import fidelity

        return fidelity
    if name == "check":
        from sim.offline.checking import check_command

        return check_command
    return None


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    named = sys.argv[1] if len(sys.argv) > 1 else ""
    other = command(named)
    app.command()(other or engine)
    if other is not None:
        app(sys.argv[2:], prog_name=f"python -m sim {named}")
    app(prog_name="python -m sim")
