"""Figures of records: interference, and time and bandwidth of transfers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.analysis.figures import Line, lines
from bench.instruments.interference import InterferenceRow, by_point
from bench.instruments.transfer import TransferRow
from bench.instruments.transfer_tables import by_load, typical


def draw_interference(rows: Sequence[InterferenceRow], to: Path) -> None:
    """Write ``interference.svg`` into a folder: TPOT during the prefill by its length, a line for each stream count."""
    points = by_point(rows)
    curves = []
    for streams in sorted({streams for streams, _ in points}):
        sizes = [tokens for count, tokens in points if count == streams]
        during = [median(row.during.tpot_s for row in points[streams, tokens]) * 1000 for tokens in sizes]
        curves.append(Line(f"{streams} streams", sizes, during))
    before = median(row.before.tpot_s for row in rows) * 1000
    lines(
        to / "interference.svg",
        curves,
        x="prefill [tokens]",
        y="TPOT during the prefill [ms]",
        title="Decoding streams during one prefill (burst average)",
        log_x=True,
        log_y=True,
        levels={"before, median": before},
    )


def draw_transfers(rows: Sequence[TransferRow], to: Path) -> None:
    """Write ``transfer_time.svg`` and ``transfer_bandwidth.svg`` into a folder, a line for each load."""
    times, rates = [], []
    groups = by_load(rows)
    for background, concurrent in sorted({(key.background, key.concurrent) for key in groups}):
        found = {
            key.tokens: typical(each)
            for key, each in groups.items()
            if (key.background, key.concurrent) == (background, concurrent)
        }
        name = f"{background} streams a side, {concurrent} at once"
        sizes = [each[0].size_bytes / 1e9 for each in found.values()]
        seconds = [median(row.transfer_s for row in each) * 1000 for each in found.values()]
        speeds = [median(row.bytes_per_s for row in each) / 1e9 for each in found.values()]
        seen = [place for place, each in enumerate(seconds) if each > 0 and speeds[place] != float("inf")]
        times.append(Line(name, [sizes[place] for place in seen], [seconds[place] for place in seen]))
        rates.append(Line(name, [sizes[place] for place in seen], [speeds[place] for place in seen]))
    axis = "KV of the prompt [GB]"
    lines(to / "transfer_time.svg", times, x=axis, y="transfer [ms]", log_x=True, log_y=True)
    lines(to / "transfer_bandwidth.svg", rates, x=axis, y="GB/s, all transfers at once", log_x=True, log_y=True)
