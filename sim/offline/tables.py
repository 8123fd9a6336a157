"""Tables of simulated runs for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.table import Table

from replayer.records.counted import counted
from sim.offline.running import Ran


def figures_table(rows: Iterable[tuple[str, Mapping[str, Any], str | None]]) -> Table:
    """A row per run: its name and its figures (``SimulatedOutcome.figures``), or "failed" for one with an error."""
    table = _table(
        "p50 / p90 / p99 of successful requests, engine time",
        ("OK / N", "TTFT s", "TPOT ms", "E2E s", "APC", "error, tokens", "offloads"),
    )
    table.caption = "error: mean |predicted - actual| cached tokens"
    for name, figures, error in rows:
        if error is not None:
            table.add_row(name, "failed")
            continue
        table.add_row(
            name,
            f"{figures['ok']:,} / {figures['requests']:,}",
            _quantiles(figures, "ttft", 1.0, 2),
            _quantiles(figures, "tpot", 1e3, 1),
            _quantiles(figures, "e2e", 1.0, 2),
            "–" if figures["apc"] is None else f"{figures['apc']:.3f}",
            "–" if figures["prediction_error_tokens"] is None else f"{figures['prediction_error_tokens']:,.0f}",
            f"{figures['offloaded']:,}",
        )
    return table


def sessions_table(rows: Iterable[tuple[str, Mapping[str, Any], str | None]]) -> Table:
    """A row per run that has no error: completion and slowdown of its sessions, mean latencies of its requests."""
    table = _table(
        "mean / p50 / p90 of completed sessions, mean of successful requests, engine time",
        ("completed / N", "session s", "slowdown", "mean TTFT s", "mean E2E s"),
    )
    for name, figures, error in rows:
        if error is not None:
            continue
        shares = ("mean", "p50", "p90")
        table.add_row(
            name,
            f"{figures['sessions_completed']:,} / {figures['sessions']:,}",
            " / ".join(_number(figures[f"session_completion_{share}_s"], 1) for share in shares),
            " / ".join(_number(figures[f"session_slowdown_{share}"], 2) for share in shares),
            _number(figures["ttft_mean_s"], 2),
            _number(figures["e2e_mean_s"], 2),
        )
    return table


def _table(title: str, columns: Iterable[str]) -> Table:
    """A table with narrow gaps, for `print_table`."""
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("run")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _quantiles(figures: Mapping[str, Any], what: str, scale: float, digits: int) -> str:
    values = [figures[f"{what}_{share}_s"] for share in ("p50", "p90", "p99")]
    return " / ".join("–" if value is None else f"{value * scale:.{digits}f}" for value in values)


def load_line(ran: Ran) -> str:
    """Line on the instances' busy time, and the evictions and preemptions of their KV pools."""
    span_s = ran.end.finished_unix_s
    busy = [row.busy_s / span_s if span_s else 0.0 for row in ran.instances]
    evictions, preemptions = (sum(getattr(row, name) for row in ran.instances) for name in ("evictions", "preemptions"))
    return (
        f"instances busy {min(busy):.0%} to {max(busy):.0%} of {span_s:,.0f} s; "
        f"{counted(evictions, 'block')} evicted, {counted(preemptions, 'preemption')}"
    )
