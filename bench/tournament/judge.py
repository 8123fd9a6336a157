"""Best policy of a cell, policies tied with it, and the ratios of all others to it.

A policy's figure in a cell is the geometric mean over the seeds of its quantile (TTFT p90, E2E p50). The best has the
lowest. The interval of a policy's ratio to the best is a paired bootstrap: in each resample the seeds are drawn with
replacement, and of each drawn seed the sessions, the same for both policies (their resampled quantiles are in the
results); the ratio is taken in each. The interval thus covers the effect of other sessions and other runs.

*Tied for best*: the 95 % interval of the ratio to the best includes 1. *Behind the best*: the plain ratio less one.
No correction for the number of policies or cells is made: a correction would only widen the intervals and let more
policies pass as tied, so a claim to be tied is stricter without it. The best of many is the best partly by chance,
which puts all other policies at the same disadvantage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.tournament.results import EntrantResult, GridCell, MetricSample
from bench.tournament.settings import TournamentError

TTFT, E2E = "TTFT p90", "E2E p50"
METRICS = (TTFT, E2E)
LEVEL = 0.95
_SEED_OF_SEEDS = 0

FloatArray = NDArray[np.float64]


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in one cell on one metric, against the best of the field."""

    value: float
    """Geometric mean over seeds, seconds."""
    ratio: float
    """Ratio to the best's value; 1 for the best itself."""
    low: float
    high: float
    """95 % interval of the ratio."""

    @property
    def tied(self) -> bool:
        """True for the best, or if the interval includes a ratio of 1."""
        return self.low <= 1.0


class CellStanding(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in one cell: its standing on every metric."""

    cell: GridCell
    label: str
    metrics: dict[str, Standing]
    failed: int
    """Judged requests that failed, over all seeds."""

    @property
    def tied(self) -> bool:
        """True if best or tied for best on all metrics."""
        return all(each.tied for each in self.metrics.values())

    @property
    def worst(self) -> float:
        """The larger ratio to the best."""
        return max(each.ratio for each in self.metrics.values())


class CellFigures:
    """All results of one cell, ready to be compared."""

    def __init__(self, cell: GridCell, results: Iterable[EntrantResult]) -> None:
        self.cell = cell
        by_label: dict[str, dict[int, EntrantResult]] = {}
        for result in results:
            by_label.setdefault(result.label, {})[result.seed] = result
        self._results = {label: by_label[label] for label in sorted(by_label)}
        seeds = {tuple(sorted(each)) for each in by_label.values()}
        if len(seeds) != 1:
            raise TournamentError(f"{cell}: not every policy has every seed; run the tournament again to fill it in")
        self.seeds = next(iter(seeds))
        resamples = {len(each.ttft_p90.resampled) for found in by_label.values() for each in found.values()}
        if len(resamples) != 1:
            raise TournamentError(f"{cell}: results have different numbers of resamples; run with one setting")
        generator = np.random.default_rng(_SEED_OF_SEEDS)
        self._drawn = generator.integers(len(self.seeds), size=(next(iter(resamples)), len(self.seeds)))
        self._logs = {
            (label, metric): self._combined(found, metric)
            for label, found in self._results.items()
            for metric in METRICS
        }

    @property
    def labels(self) -> list[str]:
        """Policies with results here."""
        return list(self._results)

    def results(self, label: str) -> list[EntrantResult]:
        """Results of one policy, by seed."""
        return [self._results[label][seed] for seed in self.seeds]

    def _combined(self, found: Mapping[int, EntrantResult], metric: str) -> tuple[float, FloatArray]:
        """Logarithm of the figure, and of the figure in every resample."""
        samples = [_sample(found[seed], metric) for seed in self.seeds]
        value = math.fsum(math.log(sample.value) for sample in samples) / len(samples)
        resampled = np.log(np.array([sample.resampled for sample in samples]))
        rows = np.arange(self._drawn.shape[0])[:, None]
        return value, np.asarray(resampled[self._drawn, rows].mean(axis=1), dtype=np.float64)

    def compare(self, label: str, other: str, metric: str) -> Standing:
        """A policy's ratio to another."""
        value, resampled = self._logs[label, metric]
        base, base_resampled = self._logs[other, metric]
        tail = (1 - LEVEL) / 2
        low, high = np.quantile(resampled - base_resampled, [tail, 1 - tail]) if label != other else (0.0, 0.0)
        return Standing(
            value=math.exp(value), ratio=math.exp(value - base), low=math.exp(float(low)), high=math.exp(float(high))
        )

    def best(self, field: Sequence[str], metric: str) -> str:
        """The policy of the field with the lowest figure; by name where two are equal."""
        return min(field, key=lambda label: (self._logs[label, metric][0], label))

    def judge(self, field: Sequence[str]) -> list[CellStanding]:
        """Every policy of the field against the best of the field."""
        best = {metric: self.best(field, metric) for metric in METRICS}
        return [
            CellStanding(
                cell=self.cell,
                label=label,
                metrics={metric: self.compare(label, best[metric], metric) for metric in METRICS},
                failed=sum(result.failed for result in self.results(label)),
            )
            for label in field
        ]


def _sample(result: EntrantResult, metric: str) -> MetricSample:
    return result.ttft_p90 if metric == TTFT else result.e2e_p50
