"""One frame of ``top`` as Rich renderables. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from proxy.console.figures import WINDOW_S, FleetFigures, InstanceFigures, TopRow
from proxy.console.printable import printable

_FEWEST_ROWS = 3
_LINES_WITHOUT_ROWS = 9
"""Lines of a frame besides instances, decisions and conditions."""


def frame(figures: FleetFigures | None, url: str, no_answer: str | None, height: int | None) -> RenderableType:
    """One frame.

    Args:
        figures: of the last answer; None: there was none yet.
        url: of the proxy.
        no_answer: reason for which these figures are old; None: they are not.
        height: lines of the terminal; None: show everything.
    """
    parts: list[RenderableType] = [Text(f"warmroute top  {url}", style="bold")]
    if no_answer is not None:
        parts.append(Text(printable(no_answer), style="bold red"))
    if figures is None:
        return Group(*parts)
    parts.append(_totals(figures))
    parts += [
        Text(printable(f"{name}: {detail}" + (f" -> {remedy}" if remedy else "")), style="red")
        for name, detail, remedy in figures.problems
    ]
    instances, decisions = len(figures.instances), len(figures.last)
    if height is not None:
        room = max(2 * _FEWEST_ROWS, height - _LINES_WITHOUT_ROWS - 2 * len(figures.problems) - (no_answer is not None))
        decisions = min(decisions, max(_FEWEST_ROWS, room // 3, room - instances))
        instances = min(instances, max(_FEWEST_ROWS, room - decisions))
    parts.append(_fleet(figures.instances[:instances]))
    if hidden := len(figures.instances) - instances:
        parts.append(Text(f"  {hidden} more instances, less loaded", style="dim"))
    parts.append(_decisions(figures.last[:decisions]))
    return Group(*parts)


def _totals(figures: FleetFigures) -> Text:
    # As in warmroute_in_flight: those of `requests` are all that have not ended, held and queued ones too.
    holding, queue = figures.stats.get("holding") or {}, figures.stats.get("admission") or {}
    recent = figures.recent
    up = sum(each.ok for each in figures.instances)
    return Text(
        f"{up}/{len(figures.instances)} instances ok   in flight {queue.get('in_flight', 0)}"
        f"   held {holding.get('held', 0)}   queued {queue.get('waiting', 0)}   {recent.per_s:.1f} requests/s\n"
        f"hit rate {_share(recent.hit_rate)}   TTFT p50 {_ms(recent.ttft_ms)}   failed {recent.failed}"
        f"   (last {WINDOW_S:.0f} s)\n"
        f"policy {figures.stats.get('policy')}   planner {figures.stats.get('planner')}"
        f"   admission {holding.get('rule')}"
    )


def _fleet(instances: tuple[InstanceFigures, ...]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("instance", no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("state", no_wrap=True)
    for name in ("in flight", "W/M/H", "prefill", "waiting", "KV", "hit", "TTFT p50", "req/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in instances:
        table.add_row(
            Text(printable(each.name)),
            Text(each.state, style="green" if each.ok else "bold red"),
            str(each.requests),
            "/".join(map(str, each.classes)),
            str(each.prefilling),
            _number(each.waiting),
            _share(each.kv_usage),
            _share(each.recent.hit_rate),
            _ms(each.recent.ttft_ms),
            f"{each.recent.per_s:.1f}",
        )
    return table


def _decisions(rows: tuple[TopRow, ...]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("ended", no_wrap=True)
    for name in ("class", "instance", "reason", "outcome"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("prompt", justify="right", no_wrap=True)
    table.add_column("cached", justify="right", no_wrap=True)
    for row in rows:
        where = f"{row.prefill_instance}>{row.instance}" if row.prefill_instance else row.instance or "-"
        cached = row.predicted_cached_tokens if row.actual_cached_tokens is None else row.actual_cached_tokens
        table.add_row(
            datetime.fromtimestamp(row.ended_unix_s).strftime("%H:%M:%S"),
            row.request_class or "-",
            Text(printable(where)),
            Text(printable(row.reason or "-")),
            Text(printable(row.outcome), style="" if row.outcome == "ok" else "red"),
            _number(row.prompt_tokens),
            _number(cached),
        )
    return table


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else "-"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms" if value < 10_000 else f"{value / 1e3:.0f} s"
