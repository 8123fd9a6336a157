"""``python -m bench.analysis.document``: regenerates the tables of docs/analysis.md from the commands above them.

A table between ``<!-- analyse ARGUMENTS -->`` and ``<!-- end -->`` is the output of ``warmroute analyse ARGUMENTS
--markdown``. ``$TRACES`` in the arguments is the folder of public traces (environment: WARMROUTE_TRACES). ``TABLES
1,3`` before the arguments keeps only these tables of the output.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "analysis.md"
_BLOCK = re.compile(
    r"(?P<open><!-- (?:TABLES (?P<tables>[\d,]+) )?analyse (?P<arguments>[^\n]*?) -->\n)"
    r"(?P<text>.*?)(?P<close><!-- end -->)",
    re.DOTALL,
)
TIMEOUT_S = 600.0


class Block(NamedTuple):
    """One generated part of a document."""

    arguments: str
    tables: tuple[int, ...]
    """Numbers of the output's tables to keep, from 1; empty: all."""
    text: str

    @property
    def needs_traces(self) -> bool:
        """True if the command reads a public trace."""
        return "$TRACES" in self.arguments


def traces_folder() -> Path:
    """Folder of the public traces: ``$WARMROUTE_TRACES``, else shared/traces beside the repository."""
    return Path(os.environ.get("WARMROUTE_TRACES", ROOT.parent / "shared" / "traces"))


def blocks(document: str) -> list[Block]:
    """The generated parts of a document."""
    return [_block(match) for match in _BLOCK.finditer(document)]


def rewritten(document: str, render: Callable[[Block], str]) -> str:
    """The document with every generated part replaced by the result of ``render``."""
    return _BLOCK.sub(lambda match: match["open"] + render(_block(match)) + match["close"], document)


def render(block: Block) -> str:
    """Up-to-date text of a part; a part whose trace is missing stays as it is.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    if block.needs_traces and not traces_folder().is_dir():
        return block.text
    arguments = shlex.split(block.arguments.replace("$TRACES", shlex.quote(str(traces_folder()))))
    command = [sys.executable, "-m", "bench.analysis", *arguments, "--markdown"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    return chosen(done.stdout, block.tables)


def chosen(output: str, tables: tuple[int, ...]) -> str:
    """The selected tables of a command's output, in the document's format."""
    every = re.split(r"\n\n(?=\*\*)", output.strip())
    return "\n\n".join(every[number - 1] for number in tables or range(1, len(every) + 1)) + "\n"


def _block(match: re.Match[str]) -> Block:
    tables = tuple(int(number) for number in (match["tables"] or "").split(",") if number)
    return Block(match["arguments"], tables, match["text"])


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if anything would change.")
    ] = False,
    document: Annotated[Path, typer.Argument(help="Document to update.")] = DOCUMENT,
) -> None:
    """Regenerate the tables of docs/analysis.md with the commands above them."""
    before = document.read_text(encoding="utf-8")
    after = rewritten(before, render)
    if after == before:
        typer.echo(f"{document}: up to date")
        return
    if check:
        typer.echo(f"{document}: out of date; run python -m bench.analysis.document", err=True)
        raise typer.Exit(1)
    document.write_text(after, encoding="utf-8")
    typer.echo(f"{document}: written")


if __name__ == "__main__":
    typer.run(main)
