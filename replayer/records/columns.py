"""Column widths for a terminal: figures and names stay whole, where Rich would cut them or break them within a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_ANY_WIDTH = 10_000
_NAME_COLUMNS = 20
"""A word longer than this may be folded: such a name would make every line longer than the terminal."""


def print_table(console: Console, table: Table) -> None:
    """Print a table with cells that wrap between words; one that is too wide even so has lines beyond the console's.

    Lists with " / " wrap after the slash.
    """
    from rich.cells import cell_len

    whole, least = [], []
    for column in table.columns:
        column.overflow = "fold"
        texts = [console.render_str(str(cell)).plain for cell in (column.header, *column.cells)]
        words = [word for text in texts for word in text.replace(" / ", "_/ ").split()]
        whole.append(max(map(cell_len, texts)))
        least.append(min(max(map(cell_len, words), default=1), _NAME_COLUMNS))
    natural = console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum
    if natural > console.width:
        table.width = max(console.width, natural - sum(whole) + sum(least))
        spare = table.width - (natural - sum(whole) + sum(least))
        wanted = sum(whole) - sum(least)
        for column, most, fewest in zip(table.columns, whole, least, strict=True):
            column.width = fewest + spare * (most - fewest) // max(1, wanted)
    console.print(table, crop=False)
