"""Coverage of the intervals of ``warmroute compare``, beside other bootstrap intervals.

``python -m bench.interval_coverage`` draws experiments from `bench.synthetic_runs`, where the true change is known, and
counts how often four kinds of 95 % interval contain it:

- t: the interval that the comparison prints (`replayer.effects`);
- percentile: the 2.5 % and 97.5 % quantiles of the same resamples;
- BCa: bias-corrected and accelerated (Efron 1987), the acceleration from leaving out one session at a time; only for
  experiments with one run per arm, where only sessions are drawn;
- plain: percentiles when whole runs are drawn with replacement as well, without scaling; with several runs only.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import log1p
from multiprocessing import get_context
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from scipy.special import ndtr, ndtri

from bench.synthetic_runs import SyntheticNoise, SyntheticTrace, SyntheticWork
from replayer.compare.effects import estimate
from replayer.compare.goodput import Slo
from replayer.compare.metrics import QUANTILES, Evaluator, Metric, Values
from replayer.compare.noise_floor import between_runs
from replayer.compare.pairing import Columns, Requests, align
from replayer.compare.statistics.bootstrap import BoolArray, FloatArray, SessionBootstrap
from replayer.compare.statistics.tests import ALPHA, t_quantile

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)

METHODS = ("t", "percentile", "BCa", "plain")
RUN_SIGMA = 0.03
EFFECT = 0.05
"""True change of TTFT in every experiment."""


class ExperimentKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of experiment."""

    sessions: int
    runs: int
    resamples: int


class CoveredMetric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one experiment."""

    metric: str
    beyond: float
    """Requests beyond the quantile."""
    sessions_beyond: int
    held: dict[str, bool]
    """Method -> True if its interval contained the true change."""


def experiment(cell: ExperimentKind, number: int) -> list[CoveredMetric]:
    """Draw one experiment and check all its intervals.

    Args:
        cell: its kind.
        number: seed of its trace and runs.
    """
    work = SyntheticWork(SyntheticTrace(sessions=cell.sessions, seed=number))
    noise = SyntheticNoise(run_sigma=RUN_SIGMA if cell.runs > 1 else 0.0)
    drawn = [
        work.run(label, noise, 1000 * number + 100 * arm + repeat, effect=(EFFECT * arm, 0.0, 0.0))
        for arm, label in enumerate("AB")
        for repeat in range(cell.runs)
    ]
    requests, columns = align(drawn, clock="sent")
    bootstrap = SessionBootstrap(requests.session_of, requests.sessions, resamples=cell.resamples, seed=number)
    evaluator = Evaluator(requests, columns, bootstrap, Slo())
    everything = np.ones(len(requests.keys), dtype=np.bool_)
    found = []
    for level in QUANTILES:
        metric = Metric(f"TTFT p{level * 100:g}", "ttft_s", level)
        both = evaluator.values(metric, range(2 * cell.runs), everything)
        arms = both.part(0, cell.runs), both.part(cell.runs, 2 * cell.runs)
        beyond = everything & (columns[0].ttft_s > np.exp(arms[0].points[0]))
        found.append(
            CoveredMetric(
                metric=metric.name,
                beyond=len(everything) * (1 - level),
                sessions_beyond=len(np.unique(requests.session_of[beyond])),
                held={
                    method: bool(low <= log1p(EFFECT) <= high)
                    for method, low, high in _intervals(arms, requests, columns, level, number)
                },
            )
        )
    return found


def _intervals(
    arms: tuple[Values, Values], requests: Requests, columns: list[Columns], level: float, seed: int
) -> Iterator[tuple[str, float, float]]:
    runs = len(arms[0].points)
    noise = between_runs(list(arms), blocks=False)
    ours = estimate(arms[0], arms[1], noise, np.random.default_rng([seed, 1]))
    if not isinstance(ours, str):
        reach = t_quantile(1 - ALPHA / 2, ours.degrees_of_freedom) * ours.standard_error
        yield "t", ours.difference - reach, ours.difference + reach
    changes = arms[1].resampled.mean(axis=0) - arms[0].resampled.mean(axis=0)
    if runs == 1:
        low, high = np.quantile(changes, [ALPHA / 2, 1 - ALPHA / 2])
        yield "percentile", float(low), float(high)
        point = float(arms[1].points[0] - arms[0].points[0])
        low, high = np.quantile(changes, _bca_levels(changes, point, _jackknife(requests, columns, level)))
        yield "BCa", float(low), float(high)
        return
    draw = np.random.default_rng([seed, 3])
    picked = [
        np.take_along_axis(arm.resampled, draw.integers(runs, size=(runs, arm.resampled.shape[1])), axis=0).mean(axis=0)
        for arm in arms
    ]
    low, high = np.quantile(picked[1] - picked[0], [ALPHA / 2, 1 - ALPHA / 2])
    yield "plain", float(low), float(high)


def _jackknife(requests: Requests, columns: list[Columns], level: float) -> FloatArray:
    """The change with each session left out: shape (sessions,)."""

    def change(keep: BoolArray) -> float:
        before, after = (float(np.quantile(side.ttft_s[keep], level)) for side in columns)
        return float(np.log(after / before))

    return np.array([change(requests.session_of != session) for session in range(requests.sessions)])


def _bca_levels(changes: FloatArray, point: float, left_out: FloatArray) -> FloatArray:
    """The levels at which BCa reads the resamples (Efron 1987, equation 3.9)."""
    bias = ndtri(np.clip(np.mean(changes < point) + np.mean(changes == point) / 2, 1e-6, 1 - 1e-6))
    spread = left_out.mean() - left_out
    squares = float(np.sum(spread**2))
    acceleration = float(np.sum(spread**3)) / (6 * squares**1.5) if squares > 0 else 0.0
    scores = bias + ndtri(np.array([ALPHA / 2, 1 - ALPHA / 2]))
    return np.asarray(ndtr(bias + scores / (1 - acceleration * scores)))


@app.command()
def main(
    experiments: Annotated[int, typer.Option(min=1, help="Experiments of each kind.")] = 500,
    sessions: Annotated[list[int] | None, typer.Option(help="Sessions of the trace. May be repeated.")] = None,
    runs: Annotated[list[int] | None, typer.Option(help="Runs of each arm. May be repeated.")] = None,
    resamples: Annotated[int, typer.Option(min=100, help="Bootstrap resamples.")] = 1000,
    seed: Annotated[int, typer.Option(help="First experiment's number.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
) -> None:
    """Print the share of 95 % intervals that contain the true change, with the requests beyond the quantile."""
    table = Table(title=f"{experiments} experiments of each kind", title_justify="left", box=None)
    header = ["sessions", "runs an arm", "metric", "requests beyond", "sessions beyond", *METHODS]
    for name in header:
        table.add_column(name, justify="right")
    console = Console(width=140)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for count in sessions or [12, 25, 50, 100, 300]:
            for repeated in runs or [1, 3]:
                cell = ExperimentKind(sessions=count, runs=repeated, resamples=resamples)
                found = pool.map(partial(experiment, cell), range(seed, seed + experiments), chunksize=10)
                for row in _rows(cell, found):
                    table.add_row(*row)
    console.print(table)


def _rows(cell: ExperimentKind, outcomes: Iterator[list[CoveredMetric]]) -> Iterator[list[str]]:
    for metric in zip(*outcomes, strict=True):
        shares = []
        for method in METHODS:
            known = [one.held[method] for one in metric if method in one.held]
            shares.append(f"{np.mean(known):.3f}" if known else "")
        yield [
            str(cell.sessions),
            str(cell.runs),
            metric[0].metric,
            f"{np.mean([one.beyond for one in metric]):.1f}",
            f"{np.mean([one.sessions_beyond for one in metric]):.1f}",
            *shares,
        ]


if __name__ == "__main__":
    app()
