"""``python -m proxy``: the same as ``warmroute serve``."""

import typer

from proxy.cli import serve

if __name__ == "__main__":
    typer.run(serve)
