"""One run: all stacks up at once, all measurements of every round in shuffled order, every sample kept."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec

from bench.data_plane import cpu
from bench.data_plane.launches import OURS, NotInstalledError
from bench.data_plane.load import prompts
from bench.data_plane.load.client import COMPLETIONS
from bench.data_plane.load.jobs import ClosedLoopJob, LoadWorkload
from bench.data_plane.processes import LoadProcess, StubProcess
from bench.data_plane.quantities import SIZES, Bench, Measurement, QuantitySample, Scale, measurements, sampled
from bench.data_plane.stacks import DIRECT, Stack, machine, start

NUMBERS_PER_ROUND = 100_000_000
NUMBERS_PER_MEASUREMENT = 1_000_000
"""Requests of each round and measurement have their own numbers, and so their own prompts."""
RENDERS = 20

Progress = Callable[[str], None]


class DataPlaneRecord(msgspec.Struct, kw_only=True):
    """Everything that a run writes to JSON."""

    kind: str = "data_plane"
    schema: int = 1
    seed: int
    rounds: int
    fresh: bool = False
    """Every round had processes of its own."""
    sizes: list[str]
    scale: Scale
    stacks: dict[str, str]
    """Name -> version and settings."""
    left_out: dict[str, str] = {}
    """Name -> reason for which it was not measured."""
    machine: dict[str, Any]
    samples: list[QuantitySample]
    evidence: dict[str, list[str]] = {}
    """Stack -> lines of its metrics at the end."""
    idle_cpu_ms_per_s: dict[str, float]
    """Latest value per stack; subtracted from the CPU figures."""
    render_stub_ms: dict[str, float] = {}
    """CPU of the stub for one answer of `/render`: ``first`` for a new body, ``known`` for a cached one."""
    started_unix_s: float
    seconds: float = 0.0


def _idle(bench: Bench, stacks: Sequence[Stack]) -> None:
    """Measure the CPU that each stack uses while idle."""
    bench.stub.settings()
    before = {stack.name: stack.cpu_s() for stack in stacks}
    started_s = time.monotonic()
    time.sleep(bench.scale.idle_s)
    seconds = time.monotonic() - started_s
    for stack in stacks:
        bench.idle[stack.name] = (stack.cpu_s() - before[stack.name]) / seconds


def _render_cost(bench: Bench) -> dict[str, float]:
    """CPU of the stub's simulated tokenizing, at 130 KB."""
    target = bench.stub.engines[0]
    url = f"http://{target.host}:{target.port}{COMPLETIONS}/render"
    bodies = [prompts.text_body(bench.seed, -1 - i, SIZES["130k"], 80) for i in range(RENDERS)]
    costs = {}
    with httpx.Client(timeout=10, trust_env=False) as client:
        for what in ("first", "known"):
            before_s = cpu.cpu_s([bench.stub.pid])
            for body in bodies:
                client.post(url, content=body).raise_for_status()
            costs[what] = (cpu.cpu_s([bench.stub.pid]) - before_s) / RENDERS * 1e3
    return costs


def run(
    names: Sequence[str],
    scale: Scale,
    rounds: int,
    seed: int,
    sizes: list[str],
    *,
    only_measurements: Sequence[str] = (),
    profile: Path | None = None,
    baseline_tree: Path | None = None,
    fresh: bool = False,
    progress: Progress = lambda line: None,
) -> DataPlaneRecord:
    """Measure these stacks in ``rounds`` shuffled rounds.

    ``fresh``: every round has processes of its own.

    Raises:
        StackError: a stack cannot be started.
        ChildError: the engine stub or the load generator ended.
    """
    started_s = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="data-plane-"))
    with ExitStack() as owned:
        owned.callback(shutil.rmtree, scratch, ignore_errors=True)
        bench = Bench(
            stub=owned.enter_context(StubProcess()), load=owned.enter_context(LoadProcess()), scale=scale, seed=seed
        )
        running = owned.enter_context(ExitStack())
        left_out: dict[str, str] = {}

        def start_all(folder: Path) -> list[Stack]:
            stacks: list[Stack] = []
            for name in names:
                try:
                    stack = start(name, bench.stub.engines, folder, profile if name == OURS else None, baseline_tree)
                except NotInstalledError as error:
                    left_out[name] = str(error)
                    progress(f"{name} is left out: {error}")
                    continue
                running.callback(stack.stop)
                stacks.append(stack)
                progress(f"{name} serves: {stack.note}")
            time.sleep(scale.settle_s)
            return stacks

        stacks = start_all(scratch / "0")
        record = DataPlaneRecord(
            seed=seed,
            rounds=rounds,
            fresh=fresh,
            sizes=sizes,
            scale=scale,
            stacks={stack.name: stack.note for stack in stacks},
            left_out=left_out,
            machine=machine(),
            samples=[],
            idle_cpu_ms_per_s={},
            started_unix_s=time.time(),
        )
        record.render_stub_ms = _render_cost(bench)
        chosen = [
            each for each in measurements(scale, sizes) if each.name in only_measurements or not only_measurements
        ]
        numbers = {each.name: number for number, each in enumerate(measurements(scale, sizes))}
        started = [stack.name for stack in stacks]
        for round_number, order in enumerate(orders(seed, rounds, chosen, started)):
            if fresh and round_number:
                running.close()
                stacks = start_all(scratch / str(round_number))
            by_name = {stack.name: stack for stack in stacks}
            _idle(bench, stacks)
            for measurement, name in order:
                first = round_number * NUMBERS_PER_ROUND + numbers[measurement.name] * NUMBERS_PER_MEASUREMENT
                sample = _sampled(bench, by_name[name], measurement, round_number, first)
                record.samples.append(sample)
                progress(_line(sample, rounds))
        record.idle_cpu_ms_per_s = {name: share * 1e3 for name, share in bench.idle.items()}
        record.evidence = {stack.name: lines for stack in stacks if (lines := stack.evidence())}
        record.seconds = time.monotonic() - started_s
    return record


def orders(
    seed: int, rounds: int, chosen: Sequence[Measurement], stacks: Sequence[str]
) -> Iterator[list[tuple[Measurement, str]]]:
    """Measurements and names of stacks of each round, shuffled: what drifts meets each of them alike."""
    rng = random.Random(f"order {seed}")
    for _ in range(rounds):
        yield [
            (measurement, name)
            for measurement in rng.sample(chosen, len(chosen))
            for name in rng.sample(stacks, len(stacks))
            if name != DIRECT or measurement.direct
        ]


def _sampled(bench: Bench, stack: Stack, measurement: Measurement, round_number: int, first: int) -> QuantitySample:
    return sampled(bench, stack, measurement, round_number, first, os.getloadavg()[0])


def _line(sample: QuantitySample, rounds: int) -> str:
    values = ", ".join(f"{name} {value:.3g}" for name, value in sample.values.items())
    wrong = sum(sample.errors.values())
    errors = f"  [{wrong} errors: {next(iter(sample.errors))[:80]}]" if wrong else ""
    return f"round {sample.round + 1}/{rounds}  {sample.measurement:13} {sample.stack:15} {values}{errors}"


def memory_after(
    names: Sequence[str], prompts_sent: int, seed: int, progress: Progress = lambda line: None
) -> list[QuantitySample]:
    """Resident memory of each stack, newly started, after this many distinct prompts of 130 KB.

    Raises:
        StackError: a stack cannot be started.
        ChildError: the engine stub or the load generator ended.
    """
    samples = []
    for name in names:
        if name == DIRECT:
            continue
        with ExitStack() as owned:
            scratch = Path(tempfile.mkdtemp(prefix="data-plane-"))
            owned.callback(shutil.rmtree, scratch, ignore_errors=True)
            stub = owned.enter_context(StubProcess())
            load = owned.enter_context(LoadProcess())
            stub.settings(events=4)
            try:
                stack = start(name, stub.engines, scratch)
            except NotInstalledError:
                continue  # the run before has reported it
            owned.callback(stack.stop)
            before = stack.rss_bytes()
            work = LoadWorkload(kind="text", seed=seed, size_bytes=SIZES["130k"], events=4)
            result = load.run(ClosedLoopJob(targets=stack.targets, workload=work, concurrency=8, requests=prompts_sent))
            sample = QuantitySample(
                round=0,
                stack=name,
                measurement="memory",
                values={"rss_start_mb": before / 1e6, "rss_mb": stack.rss_bytes() / 1e6},
                errors=result.errors,
                result=result,
                load_average=os.getloadavg()[0],
            )
        samples.append(sample)
        progress(_line(sample, 1))
    return samples
