"""Processor time of the dashboard's feed: one state message, and the proxy's own record of requests in flight.

``python -m bench.dashboard [--instances 64] [--requests-per-s 200] [--in-flight 400] [--output FILE.json]`` fills a
core with instances, finished requests (a row with a score for every instance) and requests in flight, and computes
messages as the first viewer of each second does. Further viewers get the same bytes. Without a viewer nothing is
computed; a request then costs what the row *request in flight* shows. No test asserts these times.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.figures.machine import machine
from bench.figures.result_file import writable
from policies.row import RequestOutcome, Row
from policies.types import CandidateScore, Decision, OffloadPlan, OffloadReason, Reason, RequestClass
from proxy.core import Core
from proxy.operations.operations import Operations
from proxy.settings import load_settings
from proxy.ui.feed import DashboardFeed

_CLASSES = tuple(RequestClass)
_INPUTS = ("queue_s", "crowd_s", "room_s", "own_s", "others_s", "cached_tokens")


def row_of(number: int, names: list[str], arrived_unix_s: float) -> Row:
    """A row as the policy ``warm`` leaves it; every tenth request was handed over."""
    scores = tuple(
        CandidateScore(name, 0.1 * at, dict.fromkeys(_INPUTS, 0.0123 * at), cached_tokens=4_000)
        for at, name in enumerate(names)
    )
    chosen, other = names[number % len(names)], names[(number + 1) % len(names)]
    handed_over = number % 10 == 0
    decision = Decision(
        f"r{number}", chosen, other if handed_over else None, _CLASSES[number % 3], Reason.LOWEST_SCORE,
        OffloadPlan(other if handed_over else None, OffloadReason.DOES_NOT_PAY), scores, "warm", 9_000, 4_000,
    )  # fmt: skip
    row = Row(f"req-{number:032x}", "/v1/chat/completions", arrived_unix_s, session_id=f"session-{number % 500}")
    row.decision, row.planner, row.prompt_tokens = decision, "threshold", 9_000
    row.predicted_cached_tokens, row.actual_cached_tokens, row.completion_tokens = 4_000, 3_900, 200
    row.prefill_instance = decision.prefill_on
    row.outcome, row.status, row.stream = RequestOutcome.OK, 200, True
    row.stages_ms = {"parse": 1.1, "decide": 0.3, "first_byte": 180.0, "total": 900.0}
    return row


def measure(instances: int, requests_per_s: int, in_flight: int, messages: int) -> dict[str, float]:
    """Medians: CPU ms of a message, its KiB, and CPU µs that keeping the requests in flight adds to one request."""
    known = [{"name": f"inst-{at}", "url": f"http://127.0.0.1:{20_000 + at}"} for at in range(instances)]
    core = Core(load_settings(None, instances=known, log_level="error"))
    feed = DashboardFeed(core, Operations(core).fleet)
    names, numbers = [each["name"] for each in known], itertools.count()
    for _ in range(in_flight):
        core.breakdown.open_row(row_of(next(numbers), names, 1e9))
    times_ms, sizes = [], []
    for second in range(messages + 5):
        for _ in range(requests_per_s):
            core.breakdown.close_row(core.breakdown.open_row(row_of(next(numbers), names, 1e9 + second - 0.95)))
        began_s = time.process_time()
        message = feed.compute(1e9 + second + 1)
        if second >= 5:  # the first ones read old rows
            times_ms.append((time.process_time() - began_s) * 1e3)
            sizes.append(len(message) / 1024)
    return {
        "message_cpu_ms": round(statistics.median(times_ms), 3),
        "message_kib": round(statistics.median(sizes), 1),
        "share_of_a_core": round(statistics.median(times_ms) / 1e3, 5),
        "request_in_flight_cpu_us": round(_bookkeeping_us(names), 3),
    }


def _bookkeeping_us(names: list[str], calls: int = 200_000) -> float:
    row, rows = row_of(0, names, 1e9), set[Row]()
    began_s = time.process_time()
    for _ in range(calls):
        rows.add(row)
        rows.discard(row)
    return (time.process_time() - began_s) / calls * 1e6


def main(
    instances: Annotated[int, typer.Option(min=1, help="Instances of the fleet.")] = 64,
    requests_per_s: Annotated[int, typer.Option(min=1, help="Requests that end in each second.")] = 200,
    in_flight: Annotated[int, typer.Option(min=0, help="Requests in flight.")] = 400,
    messages: Annotated[int, typer.Option(min=1, help="Messages to compute.")] = 60,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", callback=writable, help="JSON file for the figures.")
    ] = None,
) -> None:
    """Measure the dashboard's feed."""
    figures = measure(instances, requests_per_s, in_flight, messages)
    table = Table("what", "median", title=f"{instances} instances, {requests_per_s} requests/s, {in_flight} in flight")
    table.add_row("one state message, ms of CPU per second", f"{figures['message_cpu_ms']:.2f}")
    table.add_row("its size, KiB", f"{figures['message_kib']:.1f}")
    table.add_row("request in flight, µs of CPU per request", f"{figures['request_in_flight_cpu_us']:.3f}")
    Console().print(table)
    if output is not None:
        output.write_text(json.dumps({"machine": machine(), **figures}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
