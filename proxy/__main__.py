"""Entry point of ``python -m proxy``, an alias of ``warmroute serve``."""

import typer

from proxy.cli import serve

if __name__ == "__main__":
    typer.run(serve)
