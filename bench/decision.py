"""Processor time of one request in the proxy without input and output: parse, look up, decide, count, record.

``python -m bench.decision [--shape text|chat|ids] [--output FILE.json]`` drives a `Router`, `Metrics` and `Breakdown`
with the requests of agents whose prompts grow turn by turn, over an index that holds 1,000,000 blocks, and prints the
microseconds of every stage. Requests overlap, so that the ledger is never empty; rows are kept and written as JSON
lines, as in production. The stages *snapshot*, *decide* and *commit* are parts of *route*; the sum counts *route* once.

Times are wall-clock times of one thread that never waits, one stage at a time; the row *whole loop* is the processor
time of everything except making the requests. The garbage collector runs as it does in the proxy; its pauses are shown
too, since they depend on the objects kept in memory. No test asserts these times.
"""

from __future__ import annotations

import gc
import json
import random
import tempfile
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import policies.session as session_module
from bench.figures.machine import machine
from bench.figures.result_file import writable
from bench.prefix_index import FIRST_FILLER, prompt
from policies.row import RequestOutcome, Row
from policies.session import Routed
from proxy.breakdown import Breakdown
from proxy.metrics.exporter import Metrics
from proxy.request.parse import Endpoint
from proxy.request.usage import Usage
from proxy.routing.router import Router
from proxy.sessions.identity import SessionSources
from proxy.settings import SessionSettings, Settings

PARTS_OF_ROUTE = ("snapshot", "decide", "commit")
_SOURCES = SessionSources(SessionSettings())
_WORDS = (
    *("return", "value", "the", "file", "import", "self.items[index]", "policy", "of", "request_tokens"),
    *("\n    if x is None:\n", "def choose(self):", "'name'", "tokens = 0", "# every", '"""'),
)
"""Three bytes in a hundred need an escape in JSON, as in source code."""


class PromptShape(StrEnum):
    """Content of the prompts."""

    TEXT = "text"
    CHAT = "chat"
    IDS = "ids"


class StageCost(NamedTuple):
    """One row of the result, in microseconds per request."""

    what: str
    p50_us: float
    p90_us: float
    p99_us: float


class Pauses(NamedTuple):
    """Time and objects of the garbage collector."""

    full_collections: int
    longest_ms: float
    share: float
    """Share of all processor time, for collections of every generation."""
    tracked_objects: int


class ShapeResult(NamedTuple):
    """All measurements of one prompt shape."""

    stages: list[StageCost]
    sum_us: float
    """Sum of the stages' medians."""
    loop_cpu_us: float
    body_bytes: int
    pauses: Pauses
    jsonl_bytes_per_row: int


class Agents:
    """Conversations that grow by ``turn_units`` a turn around a prompt of ``units`` on average, many at once."""

    def __init__(self, shape: PromptShape, units: int, turns: int, side_by_side: int) -> None:
        self._shape = shape
        self._random = random.Random(0)
        self._first_units, self._turn_units, self._turns = int(units * 0.85), int(units * 0.3 / turns), turns
        self._side_by_side = side_by_side
        self._shared = self._make(units // 6)

    def requests(self) -> Iterator[tuple[bytes, str]]:
        """Endless (body, session id); sessions send their turns in random order, and ended ones are replaced."""
        numbers = count()
        live = [self._start(next(numbers)) for _ in range(self._side_by_side)]
        for each in live:  # not all at the same age
            for _ in range(self._random.randrange(self._turns)):
                each[1] += self._make(self._turn_units)
                each[2] += 1
        while True:
            place = self._random.randrange(self._side_by_side)
            session, history, turn = live[place]
            yield self._body(history), f"session-{session}"
            if turn + 1 >= self._turns:
                live[place] = self._start(next(numbers))
            else:
                live[place] = [session, history + self._make(self._turn_units), turn + 1]

    def _start(self, number: int) -> list[Any]:
        return [number, self._shared + self._make(self._first_units - len(self._shared)), 0]

    def _make(self, units: int) -> Any:
        if self._shape is PromptShape.IDS:
            return array("I", self._random.choices(range(150_000), k=units))  # nothing for the collector to walk
        words = " ".join(self._random.choices(_WORDS, k=units // 8 + 1))
        return (words * (units // len(words) + 1))[:units]

    def _body(self, history: Any) -> bytes:
        common: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 256, "temperature": 0.0}
        if self._shape is PromptShape.CHAT:
            pieces = [history[start : start + 8_000] for start in range(0, len(history), 8_000)]
            roles = ("user", "assistant")
            messages = [{"role": roles[number % 2], "content": piece} for number, piece in enumerate(pieces)]
            return json.dumps({**common, "messages": messages}).encode()
        prompt_field = history.tolist() if self._shape is PromptShape.IDS else history
        return json.dumps({**common, "prompt": prompt_field}, separators=(",", ":")).encode()


class Loop:
    """One router with its records, fed request by request."""

    def __init__(self, instances: int, held_blocks: int, prompt_blocks: int, folder: Path, rows: int) -> None:
        self._router = Router(
            Settings.model_validate(
                {"instances": [{"name": f"inst-{i}", "url": f"http://127.0.0.1:{9000 + i}"} for i in range(instances)]}
            )
        )
        self._available = {f"inst-{i}" for i in range(instances)}
        self._metrics = Metrics()
        self.jsonl = folder / "breakdown.jsonl"
        self._breakdown = Breakdown(rows, self.jsonl)
        self._endpoint = Endpoint.COMPLETIONS
        self.times_ns: dict[str, list[int]] = defaultdict(list)
        self._fill(held_blocks // instances, prompt_blocks)
        self._watch_parts()

    def _fill(self, blocks_each: int, prompt_blocks: int) -> None:
        index, numbers = self._router.state.index, count(FIRST_FILLER)
        for name in sorted(self._available):
            index.add_instance(name, blocks_each)
            while index.blocks(name) < blocks_each:
                index.insert(name, prompt(next(numbers), prompt_blocks))

    def _watch_parts(self) -> None:
        state: Any = self._router.state
        state.snapshot = self._watched("snapshot", state.snapshot)
        state.commit = self._watched("commit", state.commit)
        module: Any = session_module
        module.decide = self._watched("decide", module.decide)

    def _watched(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        times = self.times_ns[what]

        def timed(*args: Any, **named: Any) -> Any:
            start_ns = time.perf_counter_ns()
            result = call(*args, **named)
            times.append(time.perf_counter_ns() - start_ns)
            return result

        return timed

    def serve(self, endpoint: Endpoint, requests: Iterator[tuple[bytes, str]], calls: int, in_flight: int) -> int:
        """Serve ``calls`` requests, ``in_flight`` of them at any time; returns the nanoseconds spent on making them."""
        self._endpoint = endpoint
        in_progress: deque[tuple[Row, Routed]] = deque()
        making_ns = 0
        for number in range(calls):
            start_ns = time.process_time_ns()
            body, session = next(requests)
            making_ns += time.process_time_ns() - start_ns
            in_progress.append(self._begin(body, session))
            if len(in_progress) > in_flight:
                self._end(*in_progress.popleft())
            if number % 500 == 499:  # live, a thread does so five times a second
                self._clock("flush", self._breakdown.flush)
        while in_progress:
            self._end(*in_progress.popleft())
        self._breakdown.close()
        return making_ns

    def render(self) -> None:
        """Time a scrape of the metrics."""
        from prometheus_client import generate_latest

        self._clock("scrape", lambda: generate_latest(self._metrics.registry))

    def _clock(self, what: str, call: Callable[[], Any]) -> Any:
        start_ns = time.perf_counter_ns()
        result = call()
        self.times_ns[what].append(time.perf_counter_ns() - start_ns)
        return result

    def _begin(self, body: bytes, session: str) -> tuple[Row, Routed]:
        router, clock = self._router, time.perf_counter_ns
        times = self.times_ns
        t0 = clock()
        row = self._breakdown.open_row(Row(f"req-{len(times['parse'])}", self._endpoint.value, time.time()))
        t1 = clock()
        parsed = router.parse(self._endpoint, body)
        t2 = clock()
        headers = {b"x-session-id": session.encode(), b"content-type": b"application/json"}
        t3 = clock()
        row.session_id, row.session_source, row.parent_session_id = _SOURCES.identify(headers, parsed.fields)
        row.stream = parsed.stream
        request = router.view(parsed, row.request_id, row.session_id)
        row.prompt_tokens = request.prompt_tokens
        t4 = clock()
        routed = router.route(request, self._available)
        t5 = clock()
        decision = routed.decision
        row.decision, row.planner = decision, router.planner.name
        row.offload_reason, row.prefill_instance = decision.offload.reason.value, decision.prefill_on
        row.predicted_cached_tokens = decision.cached_tokens
        row.stages_ms |= {"parse": (t2 - t1) / 1e6, "decide": (t5 - t4) / 1e6}
        times["open row"].append(t1 - t0)
        times["parse"].append(t2 - t1)
        times["view"].append(t4 - t3)
        times["route"].append(t5 - t4)
        t6 = clock()
        router.learn(parsed, Usage(prompt_tokens=request.prompt_tokens), routed.commitment)
        times["learn usage"].append(clock() - t6)
        return row, routed

    def _end(self, row: Row, routed: Routed) -> None:
        router, clock = self._router, time.perf_counter_ns
        times = self.times_ns
        t0 = clock()
        row.note_leg("first_token", *router.routing.prefilled(routed.commitment, 0.2))
        router.routing.began(routed.commitment, 1e9)
        t1 = clock()
        row.actual_cached_tokens, row.completion_tokens, row.events = row.predicted_cached_tokens, 80, 80
        row.status, row.outcome = 200, RequestOutcome.OK
        row.stages_ms |= {"first_byte": 200.0, "total": 900.0}
        t2 = clock()
        router.routing.answered(routed.commitment, 80, 1e9 + 0.7)
        routed.commitment.release(1e9 + 0.7)
        t3 = clock()
        self._breakdown.close_row(row)
        t4 = clock()
        self._metrics.record(row)
        t5 = clock()
        times["first token"].append(t1 - t0)
        times["release"].append(t3 - t2)
        times["row, JSON line"].append(t4 - t3)
        times["metrics"].append(t5 - t4)


class CollectorWatch:
    """Times the garbage collector while it is entered."""

    def __init__(self) -> None:
        self.took_ns: dict[int, list[int]] = defaultdict(list)
        self._started_ns = 0

    def __enter__(self) -> CollectorWatch:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started_ns = time.perf_counter_ns()
        else:
            self.took_ns[info["generation"]].append(time.perf_counter_ns() - self._started_ns)

    def pauses(self, cpu_ns: int) -> Pauses:
        """Pauses of a loop that took ``cpu_ns``."""
        every = [took for each in self.took_ns.values() for took in each]
        full = self.took_ns[2]
        return Pauses(len(full), max(full, default=0) / 1e6, sum(every) / cpu_ns, len(gc.get_objects()))


def measure(shape: PromptShape, calls: int, instances: int, held_blocks: int, in_flight: int) -> ShapeResult:
    """Run one shape; the first tenth warms up and is not counted."""
    units, prompt_blocks = (33_000, 2_062) if shape is PromptShape.IDS else (130_000, 127)
    endpoint = Endpoint.CHAT if shape is PromptShape.CHAT else Endpoint.COMPLETIONS
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(instances, held_blocks, prompt_blocks, Path(folder), rows=10_000)
        requests = Agents(shape, units, turns=10, side_by_side=40).requests()
        body_bytes = len(next(requests)[0])
        with CollectorWatch() as collector:
            start_ns = time.process_time_ns()
            making_ns = loop.serve(endpoint, requests, calls, in_flight)
            cpu_ns = time.process_time_ns() - start_ns
        pauses = collector.pauses(cpu_ns)
        start_ns = time.perf_counter_ns()
        gc.collect()
        pauses = pauses._replace(longest_ms=max(pauses.longest_ms, (time.perf_counter_ns() - start_ns) / 1e6))
        lines = loop.jsonl.read_bytes()
        assert lines.count(b"\n") == calls, "a row is missing from the file"
        msgspec.json.decode(lines[: lines.index(b"\n")])
        loop.render()
    stages = [_stage(what, times, calls) for what, times in loop.times_ns.items() if what != "scrape"]
    total = sum(stage.p50_us for stage in stages if stage.what not in PARTS_OF_ROUTE)
    return ShapeResult(stages, total, (cpu_ns - making_ns) / calls / 1e3, body_bytes, pauses, len(lines) // calls)


def _stage(what: str, times_ns: list[int], calls: int) -> StageCost:
    counted = np.asarray(times_ns[len(times_ns) // 10 :], dtype=np.float64) / 1e3
    share = 1.0 if len(times_ns) >= calls // 2 else len(times_ns) / calls
    p50, p90, p99 = (float(each) * share for each in np.percentile(counted, [50, 90, 99]))
    return StageCost(what, p50, p90, p99)


def show(console: Console, shape: PromptShape, result: ShapeResult) -> None:
    """Print one shape's figures."""
    table = Table(title=f"{shape.value}: bodies of about {result.body_bytes / 1000:,.0f} KB, µs per request")
    table.add_column("stage")
    for column in ("p50", "p90", "p99"):
        table.add_column(column, justify="right")
    for stage in result.stages:
        name = f"  of route: {stage.what}" if stage.what in PARTS_OF_ROUTE else stage.what
        table.add_row(name, f"{stage.p50_us:,.1f}", f"{stage.p90_us:,.1f}", f"{stage.p99_us:,.1f}")
    table.add_row("sum of stages", f"{result.sum_us:,.1f}", "", "", style="bold")
    table.add_row("whole loop, processor time: mean", f"{result.loop_cpu_us:,.1f}", "", "")
    console.print(table)
    pauses = result.pauses
    console.print(
        f"garbage collector: {pauses.share:.1%} of the loop, {pauses.full_collections} full collection(s), the "
        f"longest {pauses.longest_ms:.1f} ms over {pauses.tracked_objects:,} objects; "
        f"{result.jsonl_bytes_per_row} bytes per row"
    )


def main(
    shape: Annotated[
        list[PromptShape] | None, typer.Option(help="Content of the prompts; default: all shapes.")
    ] = None,
    calls: Annotated[int, typer.Option(min=100, help="Requests per shape.")] = 12_000,
    instances: Annotated[int, typer.Option(min=1, help="Instances of the fleet.")] = 8,
    held_blocks: Annotated[int, typer.Option(min=1, help="Blocks held by all instances together.")] = 1_000_000,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests in flight at any time.")] = 32,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", callback=writable, help="Also write the figures to this JSON file.")
    ] = None,
) -> None:
    """Measure the processor time of a request without input and output on this machine."""
    console = Console()
    results = {}
    for each in shape or list(PromptShape):
        results[each] = measure(each, calls, instances, held_blocks, in_flight)
        show(console, each, results[each])
    where = machine()
    console.print(", ".join(f"{key} {value}" for key, value in where.items()), highlight=False)
    if output is not None:
        document = {
            "kind": "decision",
            "schema": 1,
            "machine": where,
            "instances": instances,
            "held_blocks": held_blocks,
            "calls": calls,
            "in_flight": in_flight,
            "shapes": {
                each.value: {
                    **result._asdict(),
                    "stages": [stage._asdict() for stage in result.stages],
                    "pauses": result.pauses._asdict(),
                }
                for each, result in results.items()
            },
        }
        output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
