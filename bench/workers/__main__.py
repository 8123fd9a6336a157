"""Cost of a request behind 1, 2 and 4 workers, side by side: CPU of all processes of the proxy, and throughput.

``python -m bench.workers`` keeps every stack up and measures them in turns, in an order drawn for each round, so that
other work on the machine meets all of them alike. CPU is that of the parent and its workers together, with what they do
without requests. Where generator, engine stub and workers have fewer cores than they could use, throughput says little;
CPU per request then shows what would be left on free cores. With cores to spare give ``--generators 4``: neither
generator nor stub, one process each, is the limit then. The stack ``N apart`` has as many processes on ports of
their own, which share nothing: its cost is what the machine asks for several processes, the rest is that of workers.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import numpy as np
import typer
import yaml

from bench.data_plane import cpu
from bench.data_plane.launches import free_ports
from bench.data_plane.load.client import LoadTarget
from bench.data_plane.load.jobs import ClosedLoopJob, JobResult, LoadWorkload
from bench.data_plane.processes import LoadProcess, StubProcess
from bench.figures.machine import machine
from bench.figures.result_file import writable

SIZES = {"2k": 2_000, "130k": 130_000}
EVENTS = 80
_ENGINES = 8
_READY_S = 60.0
_END_S = 20.0
_NUMBERS = 1_000_000


class WorkerSample(msgspec.Struct, frozen=True):
    """One measurement of one stack."""

    round: int
    stack: str
    size: str
    requests: int
    seconds: float
    cpu_ms_per_request: float
    """Of parent and workers."""
    requests_per_s: float
    ttft_p50_ms: float
    errors: int
    load_average: float


class WorkerReport(msgspec.Struct, frozen=True):
    """Everything that was measured, and on what."""

    machine: dict[str, str]
    seed: int
    rounds: int
    requests: dict[str, int]
    concurrency: int
    events: int
    generators: int
    """Load generators, each with an engine stub of its own."""
    idle_cpu_ms_per_s: dict[str, float]
    """By stack, of all its processes."""
    shares: dict[str, list[int]]
    """By stack, requests that each process has started."""
    samples: list[WorkerSample]


class ServedPort:
    """`warmroute serve` with a number of workers."""

    def __init__(self, workers: int, engines: list[LoadTarget], folder: Path) -> None:
        self._workers = workers
        self.port = free_ports(1)[0]
        config = folder / f"port-{self.port}.yaml"
        instances = [{"name": f"inst-{n}", "url": f"http://{each.host}:{each.port}"} for n, each in enumerate(engines)]
        settings = {"port": self.port, "workers": workers, "instances": instances, "log_level": "error"}
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "proxy", "--config", str(config)], stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.pids: list[int] = []

    def wait(self) -> None:
        """Wait until all workers serve. Raises TimeoutError."""
        give_up_s = time.monotonic() + _READY_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{self.port}/ready", trust_env=False).status_code == 200:
                    break
            if time.monotonic() > give_up_s or self._process.poll() is not None:
                raise TimeoutError(f"{self._workers} worker(s) are not ready")
            time.sleep(0.1)
        self.pids = cpu.tree(self._process.pid)

    def shares(self) -> list[int]:
        """Requests that each worker has started."""
        stats = httpx.get(f"http://127.0.0.1:{self.port}/stats", trust_env=False).json()
        return [row["started"] for row in stats.get("workers", [{"started": stats["requests"]["started"]}])]

    def end(self) -> None:
        """End it gracefully, or kill it."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class WorkerStack:
    """One way to serve, on one port or several."""

    def __init__(self, label: str, ports: list[ServedPort]) -> None:
        self.label = label
        self._ports = ports
        for each in ports:
            each.wait()
        self.targets = [LoadTarget("127.0.0.1", each.port) for each in ports]
        self.pids = [pid for each in ports for pid in each.pids]

    def shares(self) -> list[int]:
        """Requests that each process has started."""
        return [share for each in self._ports for share in each.shares()]


@contextlib.contextmanager
def worker_stacks(counts: list[int], apart: list[int], engines: list[LoadTarget]) -> Iterator[list[WorkerStack]]:
    """Stacks that are ready, ended after the context: one for each number of workers, and of processes apart."""
    with tempfile.TemporaryDirectory(prefix="workers-") as folder, contextlib.ExitStack() as stack:
        wanted = {str(count): [count] for count in counts}
        wanted |= {f"{count} apart": [1] * count for count in apart}
        started: dict[str, list[ServedPort]] = {}
        for label, each in wanted.items():
            for count in each:
                port = ServedPort(count, engines, Path(folder))
                stack.callback(port.end)
                started.setdefault(label, []).append(port)
        yield [WorkerStack(label, ports) for label, ports in started.items()]


class LoadProcesses:
    """Load generators that run one job together, and the engine stubs behind it.

    Args:
        generators: as many load generators, with a share of the requests each.
        stubs: the stubs; every engine belongs to one of them.
    """

    def __init__(self, generators: list[LoadProcess], stubs: list[StubProcess]) -> None:
        self._generators = generators
        self.engines = [engine for stub in stubs for engine in stub.engines]

    def run(self, job: ClosedLoopJob) -> list[JobResult]:
        """Run a job, split among the generators. Raises ChildError."""
        count = len(self._generators)
        parts = [
            msgspec.structs.replace(
                job,
                first=job.first + place * _NUMBERS // count,
                concurrency=max(1, job.concurrency // count),
                requests=max(1, job.requests // count),
                warmup=max(1, job.warmup // count),
            )
            for place in range(count)
        ]
        with ThreadPoolExecutor(count) as pool:
            running = [pool.submit(each.run, part) for each, part in zip(self._generators, parts, strict=True)]
            return [each.result() for each in running]


@contextlib.contextmanager
def load_processes(count: int) -> Iterator[LoadProcesses]:
    """Generators and stubs, ended after the context. The fleet has eight engines however many stubs there are."""
    with contextlib.ExitStack() as stack:
        stubs = [stack.enter_context(StubProcess(max(1, _ENGINES // count))) for _ in range(count)]
        for stub in stubs:
            stub.settings(events=EVENTS)
        yield LoadProcesses([stack.enter_context(LoadProcess()) for _ in range(count)], stubs)


def sample_of(results: list[JobResult], number: int, stack: str, size: str) -> WorkerSample:
    """One measurement from the generators' results.

    They run at the same time and each counts the CPU of the same processes: the longest time and the most CPU count.
    """
    requests, seconds = sum(each.requests for each in results), max(each.seconds for each in results)
    p50_ms = [each.ttft_ms.p50 for each in results if each.ttft_ms is not None]
    return WorkerSample(
        number,
        stack,
        size,
        requests,
        seconds,
        max(each.cpu_s for each in results) / max(1, requests) * 1e3,
        requests / seconds,
        float(np.mean(p50_ms)) if p50_ms else float("nan"),
        sum(count for each in results for count in each.errors.values()),
        os.getloadavg()[0],
    )


def measure(
    output: Annotated[
        Path, typer.Option("--output", "-o", callback=writable, help="JSON file with every sample.")
    ] = Path("runs/workers.json"),
    workers: Annotated[
        str, typer.Option(help="Numbers of workers, comma-separated; the first is the baseline.")
    ] = "1,2,4",
    apart: Annotated[str, typer.Option(help="Numbers of processes that share nothing; empty: none.")] = "2,4",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; every stack is measured once in each.")] = 10,
    requests: Annotated[int, typer.Option(min=10, help="Counted requests of 2 KB; a third as many of 130 KB.")] = 900,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight, each on its own connection.")] = 64,
    generators: Annotated[
        int, typer.Option(min=1, max=8, help="Load generators, and engine stubs: more where cores are free.")
    ] = 1,
    idle_s: Annotated[float, typer.Option(help="Seconds of the idle measurement.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and order.")] = 7,
) -> None:
    """Measure all stacks, write the samples, print the table as Markdown."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes
    counts = _numbers(workers)
    per_size = {"2k": requests, "130k": max(10, requests // 3)}
    rng = random.Random(seed)
    samples: list[WorkerSample] = []
    with (
        load_processes(generators) as load,
        worker_stacks(counts, _numbers(apart), load.engines) as stacks,
    ):
        idle_ms = {each.label: _idle(each, idle_s) * 1e3 for each in stacks}
        for number in range(rounds):
            for place, size in enumerate(rng.sample(list(SIZES), len(SIZES))):
                for stack in rng.sample(stacks, len(stacks)):
                    job = ClosedLoopJob(
                        targets=stack.targets,
                        workload=LoadWorkload(kind="text", seed=seed, size_bytes=SIZES[size], events=EVENTS),
                        first=(number * len(SIZES) + place) * _NUMBERS,
                        pids=stack.pids,
                        concurrency=concurrency,
                        requests=per_size[size],
                        warmup=concurrency,
                    )
                    sample = sample_of(load.run(job), number, stack.label, size)
                    samples.append(sample)
                    typer.echo(msgspec.json.encode(sample).decode(), err=True)
        shares = {each.label: each.shares() for each in stacks}
    report = WorkerReport(machine(), seed, rounds, per_size, concurrency, EVENTS, generators, idle_ms, shares, samples)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    typer.echo(table(report, list(idle_ms)))


def table(report: WorkerReport, stacks: list[str]) -> str:
    """Medians of the rounds, and of the ratios to the baseline of the same round, as Markdown."""
    lines = [
        "| prompt | stack | CPU per request, ms | to the first | requests/s | to the first | TTFT p50, ms | errors |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for size in SIZES:
        by = {(each.round, each.stack): each for each in report.samples if each.size == size}
        for stack in stacks:
            own = [by[number, stack] for number in range(report.rounds)]
            base = [by[number, stacks[0]] for number in range(report.rounds)]
            cpu_ratio = _median([a.cpu_ms_per_request / b.cpu_ms_per_request for a, b in zip(own, base, strict=True)])
            rate_ratio = _median([a.requests_per_s / b.requests_per_s for a, b in zip(own, base, strict=True)])
            cells = (
                f"{_median([each.cpu_ms_per_request for each in own]):.2f} | {cpu_ratio:.2f} | "
                f"{_median([each.requests_per_s for each in own]):.0f} | {rate_ratio:.2f} | "
                f"{_median([each.ttft_p50_ms for each in own]):.1f} | {sum(each.errors for each in own)}"
            )
            lines.append(f"| {size} | {stack} | {cells} |")
    return "\n".join(lines)


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def _idle(stack: WorkerStack, seconds: float) -> float:
    """CPU seconds per second of a stack without requests."""
    before_s, began_s = cpu.cpu_s(stack.pids), time.monotonic()
    time.sleep(seconds)
    return (cpu.cpu_s(stack.pids) - before_s) / (time.monotonic() - began_s)


def _median(values: list[Any]) -> float:
    return float(np.median(values))


if __name__ == "__main__":
    typer.run(measure)
