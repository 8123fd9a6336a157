"""The table of the bench of workers."""

from __future__ import annotations

from bench.workers.__main__ import WorkerReport, WorkerSample, table


def sample(number: int, stack: str, size: str, cpu_ms: float, rate: float) -> WorkerSample:
    return WorkerSample(number, stack, size, 10, 1.0, cpu_ms, rate, 5.0, 0, 1.0)


def test_ratios_are_those_of_the_same_round() -> None:
    samples = [
        sample(number, stack, size, cpu_ms * (1 + number), rate)
        for number in range(3)
        for size in ("2k", "130k")
        for stack, cpu_ms, rate in (("1", 1.0, 100.0), ("2", 1.1, 190.0))
    ]
    report = WorkerReport({}, 7, 3, {}, 64, 80, {}, {}, samples)
    rows = table(report, ["1", "2"]).splitlines()
    assert rows[3] == "| 2k | 2 | 2.20 | 1.10 | 190 | 1.90 | 5.0 | 0 |"
    assert len(rows) == 6
