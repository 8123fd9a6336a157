"""The failure matrix as Markdown: ``python -m tests.chaos.matrix_table`` prints it, ``--write`` updates the page."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.chaos.matrix import CELLS, Cell, View
from tests.chaos.test_offload_legs import LEGS

DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"
_BEGIN, _END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->"


def _view(view: View) -> str:
    attempts = f", {view.attempts} failed attempt" if view.attempts else ""
    return f"{view.status}: {view.sees} (`{view.outcome}`{attempts})"


def _rows(cells: list[Cell]) -> list[str]:
    """One row for cells that differ in mode or endpoint only."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for cell in cells:
        alone, beside = _view(cell.expected.alone), _view(cell.expected.beside)
        key = (cell.name, cell.moment or "–", alone, "the same" if alone == beside else beside, cell.expected.health)
        modes = merged.setdefault(key, [])
        mode = "stream" if cell.stream else "whole"
        if mode not in modes:
            modes.append(mode)
    return [
        f"| {name} | {moment} | {', '.join(modes)} | {alone} | {beside} | {health} |"
        for (name, moment, alone, beside, health), modes in merged.items()
    ]


def table() -> str:
    """Both tables."""
    legs = {(leg.leg, leg.name, leg.reason, leg.outcome): leg.stream for leg in LEGS}
    return "\n".join(
        [
            "| what the engine does | when | mode | client sees, with this engine alone | with a good one beside it | "
            "to its health |",
            "| --- | --- | --- | --- | --- | --- |",
            *_rows(CELLS),
            "",
            "| leg | what the engine does | mode | `offload_reason` | outcome |",
            "| --- | --- | --- | --- | --- |",
            *(
                f"| {leg} | {name} | {', '.join('stream' if streamed else 'whole' for streamed in streams)} "
                f"| `{reason}` | `{outcome}` |"
                for (leg, name, reason, outcome), streams in legs.items()
            ),
            "",
        ]
    )


def between(document: str) -> str:
    """The generated part of the document."""
    return document.partition(_BEGIN)[2].partition(_END)[0]


def main() -> None:
    """Print the tables, or write them into the document."""
    if "--write" not in sys.argv[1:]:
        print(table(), end="")
        return
    document = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = document.partition(_BEGIN)
    DOCUMENT.write_text(before + _BEGIN + table() + _END + rest.partition(_END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
