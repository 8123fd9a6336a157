"""Tables of transfers: medians by size and load, bandwidth, slowdown, stalls, parts of a hand-off."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from bench.analysis.output import Sheet
from bench.instruments.hooked.stages import stages_sheet
from bench.instruments.transfer import STALL_S, TransferRow

_GIB = 2**30


class TransferPointKey(NamedTuple):
    """One combination of the plan."""

    background: int
    concurrent: int
    tokens: int


def by_load(rows: Sequence[TransferRow]) -> dict[TransferPointKey, list[TransferRow]]:
    """Rows by combination, sorted."""
    found: dict[TransferPointKey, list[TransferRow]] = {}
    for row in rows:
        found.setdefault(TransferPointKey(row.background, row.concurrent, row.tokens), []).append(row)
    return dict(sorted(found.items()))


def typical(rows: Sequence[TransferRow]) -> list[TransferRow]:
    """The rows that are no stalls; all of them where half or more are: then that is how long such a transfer takes."""
    steady = [row for row in rows if not row.stalled]
    return steady if 2 * len(steady) > len(rows) else list(rows)


def transfer_sheet(rows: Sequence[TransferRow], warnings: Sequence[str] = ()) -> Sheet:
    """Times and bandwidth, one line for each combination. Medians and the slowest leave stalls out, as ``typical``.

    Warnings, of hand-offs that failed for instance, go below the table.
    """
    groups = by_load(rows)
    cells = []
    for key, found in groups.items():
        steady = typical(found)
        seconds = median(row.transfer_s for row in steady)
        idle = groups.get(TransferPointKey(0, key.concurrent, key.tokens))
        base = median(row.transfer_s for row in typical(idle)) if idle else 0.0
        cells.append(
            (
                f"{key.background}",
                f"{key.concurrent}",
                f"{key.tokens:,}",
                f"{found[0].size_bytes / _GIB:.2f}",
                f"{len(found)}",
                _ms(median(row.p_leg_s for row in steady)),
                _ms(median(row.d_leg_s for row in steady)),
                _ms(seconds),
                _ms(max(row.transfer_s for row in steady)),
                _gb(median(row.bytes_per_s for row in steady)),
                f"{seconds / base:.1f}x" if base > 0 else "-",
                f"{sum(row.stalled for row in found)}",
                f"{sum(row.pulled for row in found)}/{sum(row.same_text for row in found)}",
            )
        )
    kind = rows[0].background_kind if rows else "decode"
    return Sheet(
        "KV transfer, medians",
        (
            f"background ({kind})",
            "at once",
            "tokens",
            "GiB",
            "n",
            "P leg ms",
            "D leg ms",
            "transfer ms",
            "slowest",
            "GB/s",
            "slowdown",
            "stalls",
            "pulled/text",
        ),
        cells,
        left=0,
        notes=[
            "Background: streams on each side. Transfer: the D leg less the same request fully cached. GB/s: all "
            f"transfers at once. Slowdown: against no background. Stalls: over {STALL_S:g} s; where fewer than half "
            "are, they are not in the medians. Pulled/text: hand-offs that D reports as pulled, and whose text is P's.",
            *warnings,
        ],
    )


def parts_sheet(rows: Sequence[TransferRow]) -> Sheet:
    """Parts of a hand-off as far as they are seen from outside; medians in milliseconds."""
    cells = []
    for key, found in by_load(rows).items():
        queue = [row.p_queue_s for row in found if row.p_queue_s is not None]
        prefill = [row.p_prefill_s for row in found if row.p_prefill_s is not None]
        steady = typical(found)
        cells.append(
            (
                f"{key.background}",
                f"{key.concurrent}",
                f"{key.tokens:,}",
                _ms(median(queue)) if queue else "-",
                _ms(median(prefill)) if prefill else "-",
                _ms(median(row.p_leg_s for row in steady)),
                _ms(median(row.transfer_s for row in steady)),
                _ms(median(row.cached_leg_s for row in steady)),
            )
        )
    return Sheet(
        "Parts of a hand-off, medians",
        (
            "background",
            "at once",
            "tokens",
            "queue on P ms",
            "prefill on P ms",
            "P leg",
            "transfer",
            "rest of the D leg",
        ),
        cells,
        left=0,
        notes=[
            "Queue and prefill: P's own metrics, where it has them. Transfer: waiting for readiness, control plane and "
            "wire together; only hooks inside the connector separate them."
        ],
    )


def hooks_sheet(rows: Sequence[TransferRow]) -> Sheet:
    """Stages of the hand-offs that the connector's hooks recorded, one line for each combination."""
    groups = [
        (
            (f"{key.background}", f"{key.concurrent}", f"{key.tokens:,}"),
            [row.stages for row in found if row.stages is not None],
        )
        for key, found in by_load(rows).items()
    ]
    return stages_sheet(groups, ("background", "at once", "tokens"))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"


def _gb(bytes_per_s: float) -> str:
    return "-" if bytes_per_s == float("inf") else f"{bytes_per_s / 1e9:.2f}"
