"""Rich tables of the replayer's commands: offered load, run summary, trace profiles, synthetic targets."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich import box
from rich.table import Table

from replayer.records.summary import Quantiles, Summary
from replayer.replay.plan import OfferedLoad, describe
from replayer.traces.sample import Profile
from replayer.traces.synth_targets import Comparison


def offered_table(offered: OfferedLoad) -> Table:
    """The load a plan offers."""
    table = Table(title="Offered load (engine seconds, after scaling)", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in describe(offered):
        table.add_row(name, value)
    return table


def _three(values: Quantiles, factor: float = 1.0, digits: int = 2) -> str:
    if values.p50 is None or values.p90 is None or values.p99 is None:
        return "–"
    return "/".join(f"{value * factor:,.{digits}f}" for value in (values.p50, values.p90, values.p99))


def summary_table(summary: Summary) -> Table:
    """Latencies by class."""
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
    """What does not fit the table, in words."""
    planned = f" of {summary.planned} planned" if summary.planned is not None else ""
    state = "complete" if summary.complete else "INCOMPLETE (go on with --resume)"
    lines = [
        f"{summary.requests} requests{planned}, {summary.ok} ok, {state}; "
        f"{summary.span_s:,.1f} s, {summary.requests_per_s:,.3f} ok requests/s"
    ]
    if summary.apc is not None:
        lines.append(f"APC (cached / prompt tokens, as the engines report): {summary.apc:.3f}")
    else:
        lines.append("APC unknown: the engine reports no cached tokens (vLLM: --enable-prompt-tokens-details)")
    if summary.predicted_requests:
        error = summary.predicted_error_tokens
        lines.append(
            f"predicted against actual cached tokens, {summary.predicted_requests} requests: mean error "
            f"{error.mean:,.0f}, p90 {error.p90:,.0f}, bias {summary.predicted_bias_tokens:+,.0f} tokens"
        )
    if summary.offloaded:
        lines.append(f"{summary.offloaded} requests were prefilled on another instance")
    if summary.short_outputs:
        lines.append(f"{summary.short_outputs} successful requests gave fewer tokens than asked for")
    if summary.total.ttft_scheduled_s.n:
        lines.append(f"TTFT from the scheduled time, p50/p90/p99: {_three(summary.total.ttft_scheduled_s)} s")
    if summary.send_lag_s.p99 is not None:
        lines.append(
            f"sent - scheduled: p50 {summary.send_lag_s.p50:,.3f}, p99 {summary.send_lag_s.p99:,.3f} s "
            "(session slots and the client's own lateness)"
        )
    lines += [f"failed, {count}x: {reason}" for reason, count in summary.errors.items()]
    return lines


def profiles_table(profiles: Sequence[tuple[str, Profile]]) -> Table:
    """Profiles side by side."""
    table = Table(title="Trace")
    table.add_column("property")
    for name, _ in profiles:
        table.add_column(name, justify="right")
    for field in msgspec.structs.fields(Profile):
        table.add_row(field.name, *(_number(getattr(profile, field.name)) for _, profile in profiles))
    return table


def _number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"


def targets_table(rows: Sequence[Comparison]) -> Table:
    """Targets against what was generated."""
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
