"""The tables of a kept run as Markdown, for docs/performance.md between its markers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from bench.data_plane.launches import OURS
from bench.data_plane.measure import DataPlaneRecord
from bench.data_plane.report.ratios import medians, ratios
from bench.data_plane.report.table import MORE_IS_BETTER, NO_RATIO, number, quantities, title
from bench.data_plane.report.targets import check
from bench.data_plane.stacks import DIRECT

BEGIN, END = "<!-- data plane: begin -->", "<!-- data plane: end -->"


def markdown(record: DataPlaneRecord) -> str:
    """Medians, ratios and targets, with the machine they were measured on."""
    where = record.machine
    day = time.strftime("%Y-%m-%d", time.gmtime(record.started_unix_s))
    load = ", ".join(f"{each:.1f}" for each in where["load_average"])
    lines = [
        f"{where['cpu']}, {where['cores']} cores, Python {where['python']}, {day}; {record.rounds} rounds, "
        f"seed {record.seed}, {record.seconds / 60:.0f} minutes; load average {load} at the start.",
        "",
        *(f"- `{stack}`: {note}" for stack, note in record.stacks.items()),
        "",
        "Medians over the rounds:",
        "",
        *_absolute(record),
        "",
        "`warmroute` to each peer: median of the rounds' ratios, lowest to highest in brackets; below 1 is less.",
        "",
        *_compared(record),
        "",
        "Targets:",
        "",
        *_targets(record),
    ]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterator[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _absolute(record: DataPlaneRecord) -> list[str]:
    found = medians(record.samples)
    stacks = list(record.stacks)
    rows = ([title(each), *(number(found.get((each, stack))) for stack in stacks)] for each in quantities(record))
    return _table(["quantity", *(f"`{stack}`" for stack in stacks)], rows)


def _compared(record: DataPlaneRecord) -> list[str]:
    peers = [stack for stack in record.stacks if stack not in (OURS, DIRECT)]

    def rows() -> Iterator[list[str]]:
        for quantity in quantities(record):
            found = [ratios(record.samples, quantity, OURS, peer) for peer in peers]
            if quantity.startswith(NO_RATIO) or not any(found):
                continue
            cells = [
                "-" if ratio is None else f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" for ratio in found
            ]
            yield [title(quantity) + (" (more is better)" if quantity.startswith(MORE_IS_BETTER) else ""), *cells]

    return _table(["quantity", *(f"`{peer}`" for peer in peers)], rows())


def _targets(record: DataPlaneRecord) -> list[str]:
    rows = (
        [
            title(finding.target.quantity),
            f"{finding.target.limit:g}" + (f" x `{finding.target.peer}`" if finding.target.peer else ""),
            "not measured" if finding.value is None else f"{finding.value:.3g}",
            "met" if finding.met else "**missed**",
        ]
        for finding in check(record.samples)
    )
    return _table(["quantity", "at most", "found", ""], rows)
