"""The table of the bench of workers."""

from __future__ import annotations

import pytest

from bench.data_plane.load.client import LoadTarget
from bench.data_plane.load.jobs import ClosedLoopJob, JobResult, LatencySpread, LoadJob, LoadWorkload
from bench.workers.__main__ import LoadProcesses, WorkerReport, WorkerSample, sample_of, table


def sample(number: int, stack: str, size: str, cpu_ms: float, rate: float) -> WorkerSample:
    return WorkerSample(number, stack, size, 10, 1.0, cpu_ms, rate, 5.0, 0, 1.0)


def test_ratios_are_those_of_the_same_round() -> None:
    samples = [
        sample(number, stack, size, cpu_ms * (1 + number), rate)
        for number in range(3)
        for size in ("2k", "130k")
        for stack, cpu_ms, rate in (("1", 1.0, 100.0), ("2", 1.1, 190.0))
    ]
    report = WorkerReport({}, 7, 3, {}, 64, 80, 1, {}, {}, samples)
    rows = table(report, ["1", "2"]).splitlines()
    assert rows[3] == "| 2k | 2 | 2.20 | 1.10 | 190 | 1.90 | 5.0 | 0 |"
    assert len(rows) == 6


class GeneratorFake:
    """Keeps its jobs instead of running them."""

    def __init__(self) -> None:
        self.jobs: list[ClosedLoopJob] = []

    def run(self, job: LoadJob) -> JobResult:
        assert isinstance(job, ClosedLoopJob)
        self.jobs.append(job)
        return result(job.requests, seconds=1.0, cpu_s=1.0, p50_ms=1.0)


def result(requests: int, *, seconds: float, cpu_s: float, p50_ms: float) -> JobResult:
    spread = LatencySpread(count=requests, p50=p50_ms, p99=p50_ms, max=p50_ms)
    return JobResult(
        requests=requests, errors={"reset": 1}, seconds=seconds, cpu_s=cpu_s, load_cpu_s=0.1, ttft_ms=spread
    )


def test_generators_divide_requests_and_connections_and_send_different_prompts() -> None:
    generators = [GeneratorFake() for _ in range(4)]
    work = LoadWorkload(kind="text", seed=1, size_bytes=2000, events=80)
    job = ClosedLoopJob(
        targets=[LoadTarget("127.0.0.1", 1)],
        workload=work,
        first=7_000_000,
        pids=[],
        concurrency=64,
        requests=800,
        warmup=64,
    )
    results = LoadProcesses(generators, []).run(job)  # type: ignore[arg-type]
    assert sum(each.requests for each in results) == 800
    jobs = [each for generator in generators for each in generator.jobs]
    assert [each.concurrency for each in jobs] == [16] * 4
    assert sorted(each.first for each in jobs) == [7_000_000, 7_250_000, 7_500_000, 7_750_000]


def test_cpu_that_every_generator_counted_counts_once() -> None:
    parts = [
        result(100, seconds=2.0, cpu_s=0.19, p50_ms=4.0),
        result(100, seconds=1.0, cpu_s=0.2, p50_ms=6.0),
    ]
    found = sample_of(parts, 3, "2", "2k")
    assert found.cpu_ms_per_request == pytest.approx(1.0)
    assert found.requests_per_s == pytest.approx(100.0)
    assert (found.ttft_p50_ms, found.errors, found.round) == (5.0, 2, 3)
