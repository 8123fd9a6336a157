"""One frame of ``top`` as Rich renderables. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from io import StringIO
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from proxy.console.figures import FleetFigures, InstanceFigures, TopRow
from proxy.console.printable import printable

_FEWEST_ROWS = 3
_NAME_CELLS = 24
_SHORTEST_NAME_CELLS = 10
_DEFAULT_COLUMNS = 80
_FLEET_COLUMNS = ("instance", "state", "in flight", "hit", "KV", "req/s", "TTFT p50", "waiting", "W/M/H", "prefill")
_DECISION_COLUMNS = ("instance", "outcome", "reason", "class", "ended", "cached", "prompt")
"""Columns in the order in which a narrow terminal keeps them."""


def frame(
    figures: FleetFigures | None, url: str, no_answer: str | None, height: int | None, width: int = _DEFAULT_COLUMNS
) -> RenderableType:
    """One frame.

    Args:
        figures: of the last answer; None: there was none yet.
        url: of the proxy.
        no_answer: reason for which these figures are old; None: they are not.
        height: lines of the terminal; None: show everything.
        width: columns of the terminal.
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
        instances, decisions = _rows(instances, decisions, height - _lines(parts, width))
    parts.append(_fleet(figures.instances[:instances], width))
    if hidden := len(figures.instances) - instances:
        more = f"  {hidden} more instance{'s' if hidden > 1 else ''}, less loaded"
        parts.append(Text(more, style="dim", no_wrap=True, overflow="ellipsis"))
    if decisions or height is None:
        parts.append(_decisions(figures.last[:decisions], width))
    return Group(*parts)


def _lines(parts: Sequence[RenderableType], width: int) -> int:
    """Lines of the parts at this width, in which long ones are wrapped."""
    console = Console(width=width, file=StringIO())
    return sum(len(console.render_lines(part, pad=False)) for part in parts)


def _rows(instances: int, decisions: int, lines: int) -> tuple[int, int]:
    """Instances and decisions that fit into so many lines; no decisions where they leave too few instances."""
    room = lines - 3  # the heads of both tables, and the line that counts hidden instances
    if room < 2 * _FEWEST_ROWS:
        return min(instances, max(1, lines - 2)), 0
    decisions = min(decisions, max(_FEWEST_ROWS, room // 3, room - instances))
    return min(instances, max(_FEWEST_ROWS, room - decisions)), decisions


def _totals(figures: FleetFigures) -> Text:
    # As in warmroute_in_flight: those of `requests` are all that have not ended, held and queued ones too.
    holding, queue = figures.stats.get("holding") or {}, figures.stats.get("admission") or {}
    recent = figures.recent
    up = sum(each.ok for each in figures.instances)
    return Text(
        f"{up}/{len(figures.instances)} instances ok   in flight {queue.get('in_flight', 0)}"
        f"   held {holding.get('held', 0)}   queued {queue.get('waiting', 0)}   {recent.per_s:.1f} requests/s\n"
        f"hit rate {_share(recent.hit_rate)}   TTFT p50 {_ms(recent.ttft_ms)}   failed {recent.failed}"
        f"   (last {figures.span_s:.0f} s)\n"
        f"policy {figures.stats.get('policy')}   planner {figures.stats.get('planner')}"
        f"   admission {holding.get('rule')}"
    )


def _fleet(instances: tuple[InstanceFigures, ...], width: int) -> Table:
    rows = [
        {
            "instance": Text(printable(each.name)),
            "state": Text(each.state, style="green" if each.ok else "bold red"),
            "in flight": Text(str(each.requests)),
            "W/M/H": Text("/".join(map(str, each.classes))),
            "prefill": Text(str(each.prefilling)),
            "waiting": Text(_number(each.waiting)),
            "KV": Text(_share(each.kv_usage)),
            "hit": Text(_share(each.recent.hit_rate)),
            "TTFT p50": Text(_ms(each.recent.ttft_ms)),
            "req/s": Text(f"{each.recent.per_s:.1f}"),
        }
        for each in instances
    ]
    order = ("instance", "state", "in flight", "W/M/H", "prefill", "waiting", "KV", "hit", "TTFT p50", "req/s")
    return _table(order, _FLEET_COLUMNS, {"instance", "state"}, rows, width)


def _decisions(decided: tuple[TopRow, ...], width: int) -> Table:
    rows = []
    for row in decided:
        where = f"{row.prefill_instance}>{row.instance}" if row.prefill_instance else row.instance or "-"
        cached = row.predicted_cached_tokens if row.actual_cached_tokens is None else row.actual_cached_tokens
        rows.append(
            {
                "ended": Text(datetime.fromtimestamp(row.ended_unix_s).strftime("%H:%M:%S")),
                "class": Text(row.request_class or "-"),
                "instance": Text(printable(where)),
                "reason": Text(printable(row.reason or "-")),
                "outcome": Text(printable(row.outcome), style="" if row.outcome == "ok" else "red"),
                "prompt": Text(_number(row.prompt_tokens)),
                "cached": Text(_number(cached)),
            }
        )
    order = ("ended", "class", "instance", "reason", "outcome", "prompt", "cached")
    return _table(order, _DECISION_COLUMNS, set(order) - {"prompt", "cached"}, rows, width)


def _table(
    order: tuple[str, ...], ranked: tuple[str, ...], left: set[str], rows: list[dict[str, Text]], width: int
) -> Table:
    """A table as wide as the terminal: names of instances are cut first, then whole columns are left out."""
    cells = {name: min(_NAME_CELLS, max([len(name), *(row[name].cell_len for row in rows)])) + 1 for name in order}
    over = sum(cells.values()) - width
    shortest = min(cells["instance"], _SHORTEST_NAME_CELLS + 1)
    cut = max(0, min(over, cells["instance"] - shortest))
    cells["instance"] -= cut
    shown: set[str] = set()
    for name in ranked:
        if not shown or sum(cells[each] for each in shown) + cells[name] <= width:
            shown.add(name)
    spare = width - sum(cells[each] for each in shown)
    cells["instance"] += max(0, min(cut, spare))
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in order:
        if name in shown:
            justify: Literal["left", "right"] = "left" if name in left else "right"
            table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", max_width=cells[name] - 1)
    for row in rows:
        row["instance"] = _shortened(row["instance"], cells["instance"] - 1)
        table.add_row(*(row[name] for name in order if name in shown))
    return table


def _shortened(name: Text, cells: int) -> Text:
    """A long name without its middle: names of one fleet often differ at the end."""
    plain = name.plain
    if len(plain) <= cells:
        return name
    end = (cells - 1) // 2
    return Text(f"{plain[: cells - 1 - end]}…{plain[len(plain) - end :]}")


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else "-"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms" if value < 10_000 else f"{value / 1e3:.0f} s"
