"""The load that a plan offers, as a Rich table."""

from __future__ import annotations

from rich.table import Table

from replayer.replay.plan import OfferedLoad, describe


def offered_table(offered: OfferedLoad) -> Table:
    """The load a plan offers."""
    table = Table(title="Offered load (engine seconds, after scaling)", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in describe(offered):
        table.add_row(name, value)
    return table
