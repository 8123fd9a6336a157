"""``python -m sim``: run one simulated engine."""

import typer

from sim.cli import engine

if __name__ == "__main__":
    typer.run(engine)
