"""Output of every analysis: tables for people, Markdown for documents, JSON for programs, figures as SVG files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn

import msgspec
import typer

from replayer.records.columns import print_table
from replayer.traces.load_options import Sessions, TimeUnit

if TYPE_CHECKING:
    from replayer.traces.loading import LoadOptions
    from replayer.traces.trace import Trace

TracePath = Annotated[
    Path, typer.Argument(help="Trace of any format that `warmroute replay` reads.", show_default=False)
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Read at most this many requests. Default: all.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print everything as one JSON object instead of tables.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")]
Figures = Annotated[
    Path | None,
    typer.Option(help="Also write figures (SVG) to this folder. Default: none are written.", show_default=False),
]
Model = Annotated[str, typer.Option(help="Model: a name in configs/models, such a YAML file, or a config.json.")]
Gpu = Annotated[str, typer.Option(help="GPU: a name in configs/gpus, or such a YAML file.")]


class AnalysisError(Exception):
    """Inputs from which an analysis cannot be made; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """One table of text cells; the first ``left`` columns are aligned left, the others right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    notes: Sequence[str] = ()
    """Sentences below the table."""


class TraceReading(NamedTuple):
    """The options of a command that concern its trace."""

    limit: int | None
    block_tokens: int | None
    time_unit: TimeUnit
    sessions: Sessions
    allow_deltas: bool

    def options(self, chain: Literal["repair", "keep"] = "repair") -> LoadOptions:
        """The loader's options."""
        from replayer.traces.loading import LoadOptions

        return LoadOptions(
            limit=self.limit,
            block_tokens=self.block_tokens,
            time_unit=self.time_unit.value,
            sessions=self.sessions.value,
            chain=chain,
            allow_deltas=self.allow_deltas,
        )


def load_trace(path: Path, options: LoadOptions) -> Trace:
    """A checked trace; ends the command with the loader's message if there is none."""
    from replayer.traces.loading import load
    from replayer.traces.trace import TraceError

    try:
        return load(path, options)
    except (TraceError, OSError) as error:
        stop(error)


def stop(error: object) -> NoReturn:
    """End the command with exit code 2 and a message."""
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2)


def show(result: Any, sheets: Sequence[Sheet], *, as_json: bool, as_markdown: bool) -> None:
    """Print a result as tables, Markdown or JSON."""
    if as_json and as_markdown:
        stop("give --json or --markdown, not both")
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
    elif as_markdown:
        typer.echo("\n\n".join(markdown(sheet) for sheet in sheets))
    else:
        _print(sheets)


def markdown(sheet: Sheet) -> str:
    """A sheet as a Markdown table with its title above and its notes below."""
    lines = [f"**{sheet.title}**", "", _row(sheet.columns)]
    lines.append(_row(["---" if index < sheet.left else "---:" for index in range(len(sheet.columns))]))
    lines += [_row(row) for row in sheet.rows]
    for note in sheet.notes:
        lines += ["", note]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _print(sheets: Sequence[Sheet]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for sheet in sheets:
        table = Table(
            title=escape(sheet.title), box=box.SIMPLE, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False
        )
        for index, name in enumerate(sheet.columns):
            table.add_column(escape(name), justify="left" if index < sheet.left else "right")
        for row in sheet.rows:
            table.add_row(*(escape(cell) for cell in row))
        print_table(console, table)
        for note in sheet.notes:
            console.print(note, markup=False, soft_wrap=True)


def folder(path: Path) -> Path:
    """A folder for figures, created if missing; ends the command if it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        stop(f"cannot write figures to {path}: {error.strerror}; give another --figures")
    return path
