"""Rich tables of the trace commands: profiles of traces, and a synthetic trace against its targets."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.table import Table

from replayer.traces.sample import Profile
from replayer.traces.synth_targets import TargetComparison


def profiles_table(profiles: Sequence[tuple[str, Profile]]) -> Table:
    """Table of profiles, side by side."""
    table = Table(title="Trace")
    table.add_column("property")
    for name, _ in profiles:
        table.add_column(name, justify="right")
    for field in msgspec.structs.fields(Profile):
        table.add_row(field.name, *(_number(getattr(profile, field.name)) for _, profile in profiles))
    return table


def targets_table(rows: Sequence[TargetComparison]) -> Table:
    """Table of targets and generated values."""
    table = Table(title="Target against generated")
    table.add_column("property")
    table.add_column("target", justify="right")
    table.add_column("generated", justify="right")
    table.add_column("deviation", justify="right")
    table.add_column("note")
    for row in rows:
        deviation = f"{row.deviation * 100:+.1f} {'points' if row.is_share else '%'}"
        table.add_row(row.name, _number(row.target), _number(row.value), deviation, row.note)
    return table


def _number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
