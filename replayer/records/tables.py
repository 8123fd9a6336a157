"""A run's summary as a Rich table and as lines of text."""

from __future__ import annotations

from rich import box
from rich.table import Table

from replayer.records.counted import counted
from replayer.records.sessions import SessionFigures, SessionSpread
from replayer.records.summary import Quantiles, Summary


def summary_table(summary: Summary) -> Table:
    """Table of latencies by class."""
    label = f" {summary.label}" if summary.label else ""
    table = Table(title=f"Run{label}: p50/p90/p99 of successful requests, engine time", box=box.SIMPLE)
    for name in ("class", "OK/N", "TTFT s", "TPOT ms", "E2E s"):
        table.add_column(name, justify="left" if name == "class" else "right", no_wrap=True)
    for group in [summary.total, *summary.classes]:
        if group.requests == 0:
            continue
        table.add_row(
            group.name,
            f"{group.ok}/{group.requests}",
            _three(group.ttft_s),
            _three(group.tpot_s, 1000, 1),
            _three(group.e2e_s),
        )
    return table


def summary_lines(summary: Summary) -> list[str]:
    """Sentences on the figures that are not in the table."""
    planned = f" of {summary.planned} planned" if summary.planned is not None else ""
    remedy = "continue with --resume" if summary.resumable else "replay again"
    state = "complete" if summary.complete else f"INCOMPLETE ({summary.incomplete}; {remedy})"
    lines = [
        f"{counted(summary.requests, 'request')}{planned}, {summary.ok} ok, {state}; "
        f"{summary.span_s:,.1f} s, {summary.requests_per_s:,.3f} ok requests/s"
    ]
    if summary.resumed_after is not None:
        before = counted(summary.resumed_after, "request")
        lines.append(f"resumed after {before}: caches and load are not those of an unbroken run")
    if summary.apc is not None:
        lines.append(f"APC (cached / prompt tokens, as the engines report): {summary.apc:.3f}")
    elif summary.ok:
        lines.append("APC unknown: the engine reports no cached tokens (vLLM: --enable-prompt-tokens-details)")
    if summary.predicted_requests:
        error = summary.predicted_error_tokens
        lines.append(
            f"predicted against actual cached tokens, {counted(summary.predicted_requests, 'request')}: mean error "
            f"{error.mean:,.0f}, p90 {error.p90:,.0f}, bias {summary.predicted_bias_tokens:+,.0f} tokens"
        )
    if summary.offloaded:
        lines.append(f"{counted(summary.offloaded, 'request')} prefilled on another instance")
    if summary.short_outputs:
        lines.append(f"{counted(summary.short_outputs, 'successful request')} gave fewer tokens than requested")
    if summary.total.ttft_scheduled_s.n:
        lines.append(f"TTFT from the scheduled time, p50/p90/p99: {_three(summary.total.ttft_scheduled_s)} s")
    if summary.total.e2e_scheduled_s.n:
        lines.append(f"E2E from the scheduled time, p50/p90/p99: {_three(summary.total.e2e_scheduled_s)} s")
    lines += _session_lines(summary.sessions)
    if summary.send_lag_s.p99 is not None:
        lines.append(
            f"sent - scheduled: p50 {summary.send_lag_s.p50:,.3f}, p99 {summary.send_lag_s.p99:,.3f} s "
            "(session slots and the client's own lateness)"
        )
    lines += [f"failed, {count}x: {reason}" for reason, count in summary.errors.items()]
    return lines


def _session_lines(sessions: SessionFigures) -> list[str]:
    """Completion time and slowdown, and the sessions that have none."""
    if not sessions.sessions:
        return []
    left_out = [f"{sessions.failed} with a failed turn"] if sessions.failed else []
    left_out += [f"{sessions.cut} not known to be whole"] if sessions.cut else []
    counts = f"{sessions.completed} of {sessions.sessions} sessions completed"
    lines = [f"{counts} ({', '.join(left_out)})" if left_out else counts]
    if sessions.completed:
        lines[0] += f"; first turn due to last turn's end, mean/p50/p90: {_spread(sessions.completion_s, 1)} s"
    if sessions.slowdown.n:
        lines.append(f"session slowdown (over the time on an idle fleet), mean/p50/p90: {_spread(sessions.slowdown)}")
    return lines


def _spread(values: SessionSpread, digits: int = 2) -> str:
    return "/".join("–" if value is None else f"{value:,.{digits}f}" for value in (values.mean, values.p50, values.p90))


def _three(values: Quantiles, factor: float = 1.0, digits: int = 2) -> str:
    if values.p50 is None or values.p90 is None or values.p99 is None:
        return "–"
    return "/".join(f"{value * factor:,.{digits}f}" for value in (values.p50, values.p90, values.p99))
