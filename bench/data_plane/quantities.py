"""The measurements: jobs for the load generator, and the figures computed from their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from bench.data_plane import cpu
from bench.data_plane.load.jobs import Aborts, ClosedLoopJob, JobResult, LoadWorkload, Paired, Streams
from bench.data_plane.load.prompts import SESSION_TURNS
from bench.data_plane.processes import LoadProcess, StubProcess
from bench.data_plane.stacks import DIRECT, Stack

SIZES = {"2k": 2_000, "130k": 130_000, "350k": 350_000}
IDS_BYTES = 200_000
STREAM_512_BYTES = 30_000
PREFILL_S = 1.0
"""Prefill time of requests that clients abort: four times the longest wait."""


class Scale(msgspec.Struct, kw_only=True, frozen=True):
    """Amount of work in one round."""

    requests: dict[str, int]
    """Workload name -> counted requests of the CPU measurements."""
    pairs: int
    window_s: float
    """Measured seconds of paced streams."""
    saturation_s: float
    many: int
    """Streams held at once in the test of 512."""
    many_requests: int
    aborts: int
    """Aborted requests of each kind."""
    idle_s: float
    settle_s: float = 0.0
    """Seconds after the start of the stacks: the work of starting is not idle use."""
    warmup: int = 30
    streams: dict[str, int] = msgspec.field(default_factory=lambda: {"event_1ms": 8, "event": 64, "event_many": 512})
    """Measurement of paced streams -> their number."""
    concurrency: int = 8
    saturation_concurrency: int = 32


FULL = Scale(
    requests={"2k": 400, "130k": 300, "350k": 200, "ids": 200, "sessions": 16 * SESSION_TURNS},
    pairs=250,
    window_s=4.0,
    saturation_s=3.0,
    many=512,
    many_requests=1024,
    aborts=100,
    idle_s=3.0,
    settle_s=3.0,
)
QUICK = Scale(
    requests={"2k": 160, "130k": 120, "350k": 64, "ids": 64, "sessions": 8 * SESSION_TURNS},
    pairs=40,
    window_s=1.5,
    saturation_s=1.0,
    many=512,
    many_requests=512,
    aborts=24,
    idle_s=1.0,
    settle_s=2.0,
    warmup=10,
)


class Bench(msgspec.Struct, kw_only=True):
    """Processes and settings that a measurement uses."""

    stub: StubProcess
    load: LoadProcess
    scale: Scale
    seed: int
    idle: dict[str, float] = {}
    """Stack -> CPU seconds per second while idle."""


class QuantitySample(msgspec.Struct, kw_only=True):
    """One measurement of one stack in one round."""

    round: int
    stack: str
    measurement: str
    values: dict[str, float]
    """Quantity -> value; quantities that could not be measured are missing, with the reason in ``errors``."""
    errors: dict[str, int]
    result: JobResult | None = None
    stub_cpu_s: float = 0.0
    load_average: float = 0.0


class Measurement(msgspec.Struct, kw_only=True, frozen=True):
    """One measurement of a stack: the engines' settings and the function to run."""

    name: str
    stub: dict[str, Any]
    run: Callable[[Bench, Stack, int], tuple[dict[str, float], JobResult]]
    """Bench, stack, number of the first request -> figures and the raw result."""
    direct: bool = True
    """True if it is also run directly against the engines, as the ceiling of the harness."""


def _workload(bench: Bench, name: str, events: int = 80) -> LoadWorkload:
    if name == "sessions":
        return LoadWorkload(kind="sessions", seed=bench.seed, events=events)
    if name == "ids":
        return LoadWorkload(kind="ids", seed=bench.seed, size_bytes=IDS_BYTES, events=events)
    return LoadWorkload(kind="text", seed=bench.seed, size_bytes=SIZES[name], events=events)


def _busy_s(bench: Bench, stack: Stack, result: JobResult) -> float:
    """CPU seconds less the stack's idle use."""
    return max(0.0, result.cpu_s - bench.idle.get(stack.name, 0.0) * result.seconds)


TOKEN_RATE = 1000.0
"""Events per second of a stream whose engine writes each event by itself, 1 ms apart."""


def cpu_per_request(workload: str) -> Measurement:
    """CPU of the router per request, with 8 requests in flight; events are written one by one, 1 ms apart."""

    def run(bench: Bench, stack: Stack, first: int) -> tuple[dict[str, float], JobResult]:
        scale = bench.scale
        result = bench.load.run(
            ClosedLoopJob(
                targets=stack.targets,
                workload=_workload(bench, workload),
                first=first,
                pids=stack.pids,
                concurrency=scale.concurrency,
                requests=scale.requests[workload],
                warmup=scale.warmup,
            )
        )
        if not result.requests:
            return {}, result
        values = {f"harness_rps_{workload}": result.requests / result.seconds}
        if stack.name != DIRECT:
            values = {f"cpu_ms_{workload}": _busy_s(bench, stack, result) / result.requests * 1e3}
        return values, result

    return Measurement(name=f"cpu_{workload}", stub={"events_per_s": TOKEN_RATE}, run=run)


def added_ttft(workload: str) -> Measurement:
    """Time that the router adds to the first event, one request at a time."""

    def run(bench: Bench, stack: Stack, first: int) -> tuple[dict[str, float], JobResult]:
        result = bench.load.run(
            Paired(
                targets=stack.targets,
                direct=bench.stub.engines,
                workload=_workload(bench, workload),
                first=first,
                pids=stack.pids,
                pairs=bench.scale.pairs,
            )
        )
        if result.added_ms is None:
            return {}, result
        return {
            f"added_p50_ms_{workload}": result.added_ms.p50,
            f"added_p99_ms_{workload}": result.added_ms.p99,
        }, result

    return Measurement(name=f"ttft_{workload}", stub={}, run=run, direct=False)


def max_rate() -> Measurement:
    """Requests per second with all cores busy: router, engines and load generator share them."""

    def run(bench: Bench, stack: Stack, first: int) -> tuple[dict[str, float], JobResult]:
        scale = bench.scale
        result = bench.load.run(
            ClosedLoopJob(
                targets=stack.targets,
                workload=_workload(bench, "130k"),
                first=first,
                pids=stack.pids,
                concurrency=scale.saturation_concurrency,
                seconds=scale.saturation_s,
                warmup=scale.warmup,
            )
        )
        return ({"max_rps_130k": result.requests / result.seconds} if result.requests else {}), result

    return Measurement(name="saturation", stub={}, run=run)


STREAM_RATES = {"event_1ms": TOKEN_RATE, "event": 100.0, "event_many": 10.0}
"""Measurement of paced streams -> events per second of each. 512 streams of 100/s need more than two cores for the load
generator and the engine stub alone.
"""
STREAM_SETTLE_S = 0.5


def cpu_per_event(scale: Scale, name: str) -> Measurement:
    """CPU of the router per relayed event: paced streams side by side, one event a write."""
    rate = STREAM_RATES[name]
    # The window, settling before and after it, and half a second for streams that begin late.
    events = round((scale.window_s + STREAM_SETTLE_S + 1.3) * rate)

    def run(bench: Bench, stack: Stack, first: int) -> tuple[dict[str, float], JobResult]:
        result = bench.load.run(
            Streams(
                targets=stack.targets,
                workload=_workload(bench, "2k", events),
                first=first,
                pids=stack.pids,
                streams=bench.scale.streams[name],
                settle_s=STREAM_SETTLE_S,
                window_s=bench.scale.window_s,
            )
        )
        if not result.events or stack.name == DIRECT:
            return {}, result
        return {f"cpu_us_{name}": _busy_s(bench, stack, result) / result.events * 1e6}, result

    label = name.replace("event", "events")
    return Measurement(name=label, stub={"events": events, "events_per_s": rate}, run=run)


def many_streams() -> Measurement:
    """512 streams at once, each of two seconds."""

    def run(bench: Bench, stack: Stack, first: int) -> tuple[dict[str, float], JobResult]:
        scale = bench.scale
        work = LoadWorkload(kind="text", seed=bench.seed, size_bytes=STREAM_512_BYTES)
        result = bench.load.run(
            ClosedLoopJob(
                targets=stack.targets,
                workload=work,
                first=first,
                pids=stack.pids,
                concurrency=scale.many,
                requests=scale.many_requests,
            )
        )
        values = {"many_errors": float(sum(result.errors.values()))}
        if result.ttft_ms is not None:
            values |= {"many_ttft_p99_ms": result.ttft_ms.p99, "many_rps": result.requests / result.seconds}
        return values, result

    return Measurement(name="many", stub={"events_per_s": 40.0}, run=run)


def abort_latency(after_event: bool) -> Measurement:
    """Time from the client's disconnect until the engine's connection is closed."""
    kind = "stream" if after_event else "prefill"
    stub = {"events_per_s": 50.0, "first_event_delay_s": 0.02 if after_event else PREFILL_S, "records": True}

    def run(bench: Bench, stack: Stack, first: int) -> tuple[dict[str, float], JobResult]:
        result = bench.load.run(
            Aborts(
                targets=stack.targets,
                workload=_workload(bench, "2k"),
                first=first,
                pids=stack.pids,
                requests=bench.scale.aborts,
                concurrency=bench.scale.concurrency,
                after_event=after_event,
            )
        )
        latencies = abort_latencies_ms(result.left, bench.stub.settled(len(result.left)))
        result.left = {}
        if not latencies:
            return {}, result
        p50, p99 = np.percentile(latencies, [50, 99])
        return {f"abort_{kind}_p50_ms": float(p50), f"abort_{kind}_p99_ms": float(p99)}, result

    return Measurement(name=f"abort_{kind}", stub=stub, run=run)


def abort_latencies_ms(left: dict[str, float], records: list[dict[str, Any]]) -> list[float]:
    """Milliseconds from each client's disconnect to the end at the engine.

    A request that the engine finished anyway counts up to that end, which is less than it would be with a longer
    answer. A request that never reached an engine is left out.
    """
    return [(each["ended_s"] - left[each["tag"]]) * 1e3 for each in records if each["tag"] in left]


def measurements(scale: Scale, sizes: list[str]) -> list[Measurement]:
    """All measurements for these body sizes."""
    return [
        *(cpu_per_request(name) for name in (*sizes, "ids", "sessions")),
        *(added_ttft(size) for size in sizes),
        *(cpu_per_event(scale, name) for name in STREAM_RATES),
        max_rate(),
        many_streams(),
        abort_latency(False),
        abort_latency(True),
    ]


def sampled(
    bench: Bench, stack: Stack, measurement: Measurement, round_number: int, first: int, load: float
) -> QuantitySample:
    """Run one measurement. The engines are set first; requests that they rejected count as errors too."""
    bench.stub.settings(**measurement.stub)
    before_s = cpu.cpu_s([bench.stub.pid])
    values, result = measurement.run(bench, stack, first)
    stub_cpu_s = cpu.cpu_s([bench.stub.pid]) - before_s
    report = bench.stub.report()
    errors = dict(result.errors) | {f"engine rejected {what}": count for what, count in report["refused"].items()}
    if report["pipelined"]:
        errors["requests pipelined to an engine"] = report["pipelined"]
    return QuantitySample(
        round=round_number,
        stack=stack.name,
        measurement=measurement.name,
        values=values,
        errors=errors,
        result=result,
        stub_cpu_s=stub_cpu_s,
        load_average=load,
    )
