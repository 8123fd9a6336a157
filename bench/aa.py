"""Error rates of ``warmroute compare``: differences claimed where there are none, and true differences found.

``python -m bench.aa`` simulates many small experiments and lets the comparison judge each of them:

- A/A: both arms are the same fleet under the same policy, with independent noise (sessions arrive a little earlier or
  later, every instance is a little faster or slower in every run). Any metric called better or worse is an error.
- slowdown: the candidate's instances are slower by a known share. The comparison should find this with the probability
  that follows from the smallest detectable effect it printed for the A/A experiments of the same kind.

Every experiment has its own trace, so that sessions vary too. Rates are printed with 95 % intervals (Wilson).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from math import log1p, sqrt
from multiprocessing import get_context
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from policies.registry import make_routing
from replayer.compare.arms import ArmRun, ArmRuns
from replayer.compare.runs import CompareOptions, Comparison, compare_arms
from replayer.compare.statistics.power import probability_found
from replayer.compare.statistics.tests import Verdict
from replayer.replay.plan import make_plan
from replayer.traces.synth import SynthOptions, synthetic_trace
from sim.offline.simulate import Noise, SimOptions, simulate

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)

_Z = 1.959964


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of experiment."""

    runs: int = 3
    """Runs of each arm."""
    requests: int = 400
    instances: int = 4
    rate_per_s: float = 2.0
    policy: str = "lmetric"
    jitter_s: float = 1.0
    speed_sigma: float = 0.02
    slowdown: float = 1.0
    """Factor on every step time of the candidate's instances."""
    assumed_floor: float = 0.07
    resamples: int = 1000


class MetricFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison's result for one metric of one experiment."""

    metric: str
    verdict: Verdict
    change: float
    covered: bool
    """True if the interval contains no change."""
    smallest: float
    """Smallest detectable change printed by the comparison."""
    standard_error: float
    degrees_of_freedom: float
    floor: float
    """Noise floor, as a fraction; 0 if there is none."""
    tests: int
    lower_is_better: bool

    @property
    def claimed(self) -> bool:
        """True if it was called better or worse."""
        return self.verdict in (Verdict.BETTER, Verdict.WORSE)


def experiment(design: Design, number: int) -> list[MetricFinding]:
    """Simulate and judge one experiment.

    Args:
        design: its kind.
        number: seed of its trace and of its noise.
    """
    trace = synthetic_trace(SynthOptions(requests=design.requests, seed=number, rate_per_s=design.rate_per_s))
    options = SimOptions(
        instances=design.instances,
        noise=Noise(arrival_jitter_s=design.jitter_s, speed_sigma=design.speed_sigma),
    )
    plan = make_plan(trace, options.plan)
    arms = []
    for place, (label, slowdown) in enumerate((("A", 1.0), ("B", design.slowdown))):
        runs = []
        for repeat in range(design.runs):
            seed = 1_000 * number + 100 * place + repeat
            own = replace(options, seed=seed, slowdown=slowdown, label=label)
            runs.append(ArmRun(simulate(trace, own, make_routing(design.policy, {}), plan=plan).run))
        arms.append(ArmRuns(label, runs))
    [found] = compare_arms(
        arms,
        CompareOptions(
            resamples=design.resamples,
            seed=number,
            skip_first_s=None,
            skip_last_s=None,
            assumed_floor=design.assumed_floor,
            trace=trace,
        ),
    )
    return findings(found)


def findings(found: Comparison) -> list[MetricFinding]:
    """The parts of a comparison that are counted."""
    return [
        MetricFinding(
            metric=effect.metric,
            verdict=effect.verdict,
            change=effect.change,
            covered=effect.low <= 0 <= effect.high,
            smallest=effect.smallest_detectable,
            standard_error=effect.standard_error,
            degrees_of_freedom=effect.degrees_of_freedom,
            floor=effect.noise_floor if np.isfinite(effect.noise_floor) else 0.0,
            tests=found.family,
            lower_is_better=effect.lower_is_better,
        )
        for effect in found.effects
        if not effect.note
    ]


def wilson(count: int, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    share, spread = count / total, _Z**2 / total
    middle = share + spread / 2
    reach = _Z * sqrt(share * (1 - share) / total + spread / (4 * total))
    return max(0.0, (middle - reach) / (1 + spread)), min(1.0, (middle + reach) / (1 + spread))


def stated_power(same: Sequence[MetricFinding], true: float) -> float:
    """Expected probability of finding a true change of a time, from the standard errors of the experiments.

    Args:
        same: one metric in every experiment.
        true: the change, as a fraction.
    """
    return float(
        np.mean(
            [
                probability_found(
                    log1p(true), one.standard_error, one.degrees_of_freedom, tests=one.tests, floor=log1p(one.floor)
                )
                for one in same
                if one.standard_error > 0
            ]
        )
    )


def run_all(design: Design, numbers: Iterable[int], jobs: int) -> list[list[MetricFinding]]:
    """All experiments of one kind, in ``jobs`` processes."""
    one: Callable[[int], list[MetricFinding]] = partial(experiment, design)
    if jobs == 1:
        return [one(number) for number in numbers]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(one, numbers))


@app.command()
def main(
    experiments: Annotated[int, typer.Option(min=1, help="Simulated experiments of each kind.")] = 200,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each arm.")] = 3,
    requests: Annotated[int, typer.Option(min=20, help="Requests of each trace.")] = 400,
    instances: Annotated[int, typer.Option(min=1, help="Engines of each fleet.")] = 4,
    rate: Annotated[float, typer.Option(help="Mean arrivals per second.")] = 2.0,
    policy: Annotated[str, typer.Option(help="Routing policy of both arms.")] = "lmetric",
    jitter_s: Annotated[float, typer.Option(min=0, help="Shift of session arrivals, one standard deviation.")] = 1.0,
    speed_sigma: Annotated[
        float, typer.Option(min=0, help="Spread of the instances' speeds, standard deviation of the logarithm.")
    ] = 0.02,
    slowdown: Annotated[
        float, typer.Option(min=0, help="Injected effect: the candidate is slower by this share.")
    ] = 0.05,
    assumed_noise: Annotated[float, typer.Option(min=0, help="Option of `warmroute compare`.")] = 0.07,
    seed: Annotated[int, typer.Option(help="First experiment's number.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
) -> None:
    """Simulate A/A experiments and experiments with a slowdown, and print the rate of correct verdicts."""
    alike = Design(
        runs=runs,
        requests=requests,
        instances=instances,
        rate_per_s=rate,
        policy=policy,
        jitter_s=jitter_s,
        speed_sigma=speed_sigma,
        assumed_floor=assumed_noise,
    )
    slower = msgspec.structs.replace(alike, slowdown=1 + slowdown)
    numbers = range(seed, seed + experiments)
    console = Console(width=140)
    same = run_all(alike, numbers, jobs)
    silent = sum(not any(one.claimed for one in found) for found in same)
    console.print(f"{experiments} A/A experiments, {runs} runs an arm: no metric called different in")
    console.print(f"  {_share(silent, experiments)}")
    console.print(_table("A/A", by_metric(same), truth=None))
    if slowdown > 0:
        changed = run_all(slower, numbers, jobs)
        console.print(f"\n{experiments} experiments with the candidate {slowdown:.0%} slower")
        console.print(_table("slower", by_metric(changed), truth=by_metric(same)))


def by_metric(outcomes: Iterable[Iterable[MetricFinding]]) -> dict[str, list[MetricFinding]]:
    """The findings of each metric over all experiments."""
    found: dict[str, list[MetricFinding]] = {}
    for outcome in outcomes:
        for one in outcome:
            found.setdefault(one.metric, []).append(one)
    return found


def _table(title: str, found: dict[str, list[MetricFinding]], truth: dict[str, list[MetricFinding]] | None) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    names = ["metric", "judged in", "change, median", "smallest detectable, median", "called different"]
    for name in [*names, "interval holds 0" if truth is None else "expected"]:
        table.add_column(name, justify="left" if name == "metric" else "right")
    for metric, every in found.items():
        change = float(np.median([one.change for one in every]))
        if truth is None:
            last = _share(sum(one.covered for one in every), len(every))
        else:
            # A ratio's standard error is not that of a logarithm; its power is not computed here.
            last = f"{stated_power(every, change):.1%}" if every[0].lower_is_better else "–"
        table.add_row(
            metric,
            str(len(every)),
            f"{change:+.1%}",
            f"{np.median([one.smallest for one in every]):.1%}",
            _share(sum(one.claimed for one in every), len(every)),
            last,
        )
    return table


def _share(count: int, total: int) -> str:
    low, high = wilson(count, total)
    return f"{count}/{total} = {count / total:.1%} ({low:.1%} to {high:.1%})"


if __name__ == "__main__":
    app()
