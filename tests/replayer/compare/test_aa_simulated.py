"""`python -m bench.aa` in small: simulated fleets against themselves, and against slower ones."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.aa import Design, app, by_metric, experiment, stated_power, wilson


def test_a_simulated_fleet_is_not_different_from_itself_and_a_slow_one_is() -> None:
    alike = Design(requests=150, instances=2, runs=3)
    same = [experiment(alike, number) for number in range(6)]
    assert sum(any(one.claimed for one in found) for found in same) <= 1
    slow = Design(requests=150, instances=2, runs=3, slowdown=1.5)
    found = by_metric(experiment(slow, number) for number in range(3))
    assert sum(one.claimed for one in found["TPOT p50"]) >= 2
    assert all(one.change > 0.3 for one in found["TPOT p50"])
    assert 0.5 < stated_power(found["TPOT p50"], 0.5) <= 1.0
    assert stated_power(found["TPOT p50"], 0.001) < 0.02


def test_runs_of_one_arm_really_differ() -> None:
    [first, *_] = by_metric([experiment(Design(requests=60, instances=2, runs=2), 1)])["TPOT p50"]
    assert first.change != 0
    assert first.standard_error > 0


@pytest.mark.parametrize(("count", "expected"), [(0, (0.0, 0.0370)), (5, (0.0215, 0.1118)), (100, (0.9630, 1.0))])
def test_wilson_by_published_values(count: int, expected: tuple[float, float]) -> None:
    assert wilson(count, 100) == pytest.approx(expected, abs=1e-4)


def test_the_command_prints_both_tables() -> None:
    arguments = ["--experiments", "2", "--runs", "2", "--requests", "80", "--instances", "2", "--jobs", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "2 A/A experiments, 2 runs an arm" in result.output
    assert "2 experiments with the candidate 5% slower" in result.output
    assert np.sum(["TPOT p50" in line for line in result.output.splitlines()]) == 2
