"""Cost of one request in the offline simulation (engines, decision, rest), and its growth with size.

``python -m bench.simulator [TRACE] [--output FILE.json]`` simulates a trace (or, without one, generated conversations)
in virtual time and prints microseconds per request of

* *engines*: the engine models and the event queue (``sim.virtual``),
* *decision*: ``FleetState.snapshot``, ``decide`` and ``commit``, as the live proxy calls them,
* *rest*: planning the turns, the closed loop, the records.

Then the same for generated conversations, with one parameter changed at a time: instances (at the same load per
instance), blocks per prompt, requests. Each row is a separate simulation in a fresh process, so its memory is separate
too. All times are processor time of one thread, the best of ``--repeats`` runs; measuring the parts costs about 2 µs
per request, which is in *rest*. No test asserts these times.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from bench.figures.machine import machine
from bench.figures.result_file import writable
from policies.registry import make_routing
from replayer.replay.plan import PlanOptions
from replayer.traces.loading import load_trace
from replayer.traces.trace import Trace, TraceRequest
from sim.offline.router import OfflineRouter
from sim.offline.simulate import OfflineRun, SimOptions
from sim.virtual import VirtualFleet

TARGET_REQUESTS_PER_S = 3_000.0
BLOCK_TOKENS = 64
SHARED_BLOCKS = 16
"""Blocks of a system prompt that all conversations begin with."""
TURNS = 4
OUTPUT_TOKENS = 338
THINK_S = 10.0
REQUESTS_PER_INSTANCE_S = 0.25
REQUESTS = 6_000
BLOCKS = 530
INSTANCES = 8
TIMEOUT_S = 3_600.0


class TimedSimulation(NamedTuple):
    """One simulation to time."""

    what: str
    trace: str | None
    """None: generated conversations of the following sizes."""
    instances: int
    requests: int = REQUESTS
    blocks: int = BLOCKS
    policy: str = "lmetric"
    time_scale: float = 1.0
    repeats: int = 3


class Cost(NamedTuple):
    """Measured cost: microseconds of processor time per request, and the memory of its process."""

    what: str
    requests: int
    engines_us: float
    decision_us: float
    rest_us: float
    rss_mib: float

    @property
    def total_us(self) -> float:
        """All parts together."""
        return self.engines_us + self.decision_us + self.rest_us


def conversations(requests: int, blocks: int, instances: int) -> Trace:
    """``requests`` requests of conversations of four turns, prompts of ``blocks`` blocks on average."""
    sessions = max(requests // TURNS, 1)
    rate_per_s = REQUESTS_PER_INSTANCE_S * instances / TURNS
    made: list[TraceRequest] = []
    shared = min(SHARED_BLOCKS, blocks // 2)
    sizes = [max(int(blocks * share), 1) for share in (0.55, 0.85, 1.15, 1.45)]
    for session in range(sessions):
        first = (session + 1) << 24
        ids = [*range(1, shared + 1), *range(first, first + sizes[-1] - shared)]
        for turn, size in enumerate(sizes):
            made.append(
                TraceRequest(
                    chat_id=len(made),
                    session_id=str(session),
                    turn=turn + 1,
                    timestamp_s=session / rate_per_s + turn * THINK_S,
                    input_length=size * BLOCK_TOKENS + 7,
                    output_length=OUTPUT_TOKENS,
                    hash_ids=ids[:size],
                    think_time_s=THINK_S if turn else None,
                )
            )
    made.sort(key=lambda request: request.timestamp_s)
    return Trace(requests=made, block_tokens=BLOCK_TOKENS, tail="floor", name="conversations", sha256="0" * 64)


class _Meter:
    """Adds up the processor time of calls of some methods, without nested calls of the others."""

    def __init__(self) -> None:
        self.spent_ns: dict[str, int] = {}

    def wrap(self, part: str, owner: type[Any], name: str) -> Callable[[], None]:
        """Time every call of ``owner.name`` as ``part``; returns a function that undoes it."""
        whole, clock, spent = getattr(owner, name), time.thread_time_ns, self.spent_ns
        spent.setdefault(part, 0)

        def timed(*args: Any, **more: Any) -> Any:
            began = clock()
            try:
                return whole(*args, **more)
            finally:
                spent[part] += clock() - began

        setattr(owner, name, timed)
        return lambda: setattr(owner, name, whole)


METERED = (
    ("engines", VirtualFleet, "advance"),
    ("engines", VirtualFleet, "submit"),
    ("decision", OfflineRouter, "route"),
)


def measure(job: TimedSimulation) -> Cost:
    """Simulate ``job.repeats`` times; returns the parts of the cheapest one. Run it in a fresh process."""
    if job.trace is None:
        trace = conversations(job.requests, job.blocks, job.instances)
    else:
        trace = load_trace(job.trace)
    options = SimOptions(instances=job.instances, plan=PlanOptions(time_scale=job.time_scale))
    best: tuple[int, dict[str, int], int] | None = None
    for _ in range(job.repeats):
        meter = _Meter()
        undo = [meter.wrap(*each) for each in METERED]
        try:
            began = time.thread_time_ns()
            end, _ = OfflineRun.of_trace(trace, options, make_routing(job.policy, {})).run(lambda _: None)
            took = time.thread_time_ns() - began
        finally:
            for each in undo:
                each()
        if best is None or took < best[0]:
            best = (took, dict(meter.spent_ns), end.requests)
    assert best is not None
    took, spent, requests = best
    engines, decision = spent["engines"], spent["decision"]
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    engines_us, decision_us, took_us = (part / requests / 1000 for part in (engines, decision, took))
    return Cost(job.what, requests, engines_us, decision_us, took_us - engines_us - decision_us, rss_mib)


def jobs(
    trace: Path | None, policy: str, time_scale: float, repeats: int, most_instances: int
) -> list[TimedSimulation]:
    """Jobs for the trace, if there is one, and for the rows that show growth."""
    base = TimedSimulation("", None, INSTANCES, policy=policy, repeats=repeats)
    made = []
    if trace is not None:
        what = f"{trace.name}, {INSTANCES} instances, time scale {time_scale:g}"
        made.append(base._replace(what=what, trace=str(trace), time_scale=time_scale))
    for instances in (1, 8, 64, 250, 1_000):
        if instances <= most_instances:
            made.append(
                base._replace(what=f"{instances:,} instance{'s' if instances > 1 else ''}", instances=instances)
            )
    for blocks in (33, 132, 530, 2_120):
        made.append(base._replace(what=f"{blocks:,} blocks per prompt", blocks=blocks))
    for requests in (2_000, 8_000, 32_000):
        made.append(base._replace(what=f"{requests:,} requests", requests=requests))
    return made


def markdown(result: dict[str, Any]) -> str:
    """Kept figures as a table."""
    lines = [
        "| what | requests | engines | decision | rest | all, µs | requests/s | MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["costs"]:
        parts = (row["engines_us"], row["decision_us"], row["rest_us"], row["total_us"], 1e6 / row["total_us"])
        cells = " | ".join(f"{part:,.0f}" for part in (*parts, row["rss_mib"]))
        lines.append(f"| {row['what']} | {row['requests']:,} | {cells} |")
    return "\n".join(lines)


def main(
    trace: Annotated[
        Path | None, typer.Argument(help="A trace to simulate as well (any format that the replayer loads).")
    ] = None,
    policy: Annotated[str, typer.Option(help="Routing policy, by name.")] = "lmetric",
    time_scale: Annotated[float, typer.Option("--arrival-speed", help="2: sessions arrive twice as fast.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Simulations per row; the cheapest one counts.")] = 3,
    most_instances: Annotated[int, typer.Option(min=1, help="Leave out the rows with more instances.")] = 1_000,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", callback=writable, help="Also write the figures to this JSON file.")
    ] = None,
) -> None:
    """Measure the cost of the offline simulation on this machine."""
    if trace is not None and not trace.exists():
        raise typer.BadParameter(f"no trace {trace}")
    costs = []
    for job in jobs(trace, policy, time_scale, repeats, most_instances):
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as fresh_process:
            costs.append(fresh_process.submit(measure, job).result(timeout=TIMEOUT_S))
    where = machine()
    rows = [cost._asdict() | {"total_us": cost.total_us} for cost in costs]
    result = {"kind": "simulator", "schema": 1, "machine": where, "policy": policy, "costs": rows}
    typer.echo(markdown(result))
    if trace is not None:
        rate = 1e6 / costs[0].total_us
        verdict = "met" if rate >= TARGET_REQUESTS_PER_S else "missed"
        typer.echo(f"target: {TARGET_REQUESTS_PER_S:,.0f} requests/s on {trace.name}: {verdict} ({rate:,.0f})")
    typer.echo(", ".join(f"{key} {value}" for key, value in where.items()))
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
