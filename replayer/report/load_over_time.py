"""Load of every instance over time, reconstructed from a run's records, and its imbalance.

A request is in flight on its instance from sent to finished. Its new tokens (prompt - reported cached) are
pending from sent to first token, on the instance that computed them: P where the prefill was offloaded. The client's
clock is used, so the way there and back is included; work the engine had from elsewhere is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from replayer.compare.statistics.tests import FloatArray
from replayer.records.runs import RequestRecord

BINS = 120

Span = tuple[float, float, float]
"""Begin and end in seconds, and height."""


@dataclass(frozen=True)
class LoadOverTime:
    """Means over equal bins of time. Arrays are (instances, bins)."""

    instances: list[str]
    edges_s: FloatArray
    """Shape (bins + 1,), engine seconds from the start of the run."""
    requests: FloatArray
    """Requests in flight."""
    pending_tokens: FloatArray
    """New tokens whose first output token is still to come."""

    @property
    def bin_s(self) -> float:
        """Width of a bin."""
        return float(self.edges_s[1] - self.edges_s[0])


@dataclass(frozen=True)
class Imbalance:
    """Imbalance of a load over the whole run: moments weighted by the load of the fleet at that moment."""

    largest_over_mean: float
    """1 is even; the number of instances is the worst."""
    coefficient_of_variation: float
    """Standard deviation over mean, across instances."""


def load_over_time(
    records: Sequence[RequestRecord], *, instances: Iterable[str] = (), bins: int = BINS
) -> LoadOverTime | None:
    """Load of every instance; None when no record has times and instance.

    Args:
        records: requests of one run; failed ones count for as long as they were in flight.
        instances: names of instances, those that served nothing included.
        bins: how many bins the run is divided into.
    """
    flights: dict[str, list[Span]] = {name: [] for name in instances}
    pending: dict[str, list[Span]] = {name: [] for name in flights}
    for record in records:
        if record.instance is None or record.sent_s is None or record.finished_s is None:
            continue
        flights.setdefault(record.instance, []).append((record.sent_s, record.finished_s, 1.0))
        if record.new_tokens is not None and record.first_token_s is not None:
            computed_on = record.prefill_instance or record.instance
            span = (record.sent_s, record.first_token_s, float(record.new_tokens))
            pending.setdefault(computed_on, []).append(span)
    placed = [span for spans in flights.values() for span in spans]
    if not placed:
        return None
    begin, end = min(span[0] for span in placed), max(span[1] for span in placed)
    edges = np.linspace(begin, max(end, begin + 1e-9), bins + 1)
    names = list(dict.fromkeys([*flights, *pending]))
    return LoadOverTime(
        instances=names,
        edges_s=edges,
        requests=np.stack([mean_level(flights.get(name, []), edges) for name in names]),
        pending_tokens=np.stack([mean_level(pending.get(name, []), edges) for name in names]),
    )


def mean_level(spans: Sequence[Span], edges: FloatArray) -> FloatArray:
    """Mean over each bin of the sum of ``height`` over the spans that are open: shape (bins,)."""
    if not spans:
        return np.zeros(len(edges) - 1)
    begins, ends, heights = np.array(spans, dtype=np.float64).T
    area = _area_since(begins, heights, edges) - _area_since(np.maximum(begins, ends), heights, edges)
    return np.maximum(np.diff(area) / np.diff(edges), 0.0)


def _area_since(starts: FloatArray, heights: FloatArray, edges: FloatArray) -> FloatArray:
    """Sum of height x max(0, edge - start) at each edge."""
    order = np.argsort(starts)
    starts, heights = starts[order], heights[order]
    height = np.concatenate(([0.0], np.cumsum(heights)))
    moment = np.concatenate(([0.0], np.cumsum(heights * starts)))
    passed = np.searchsorted(starts, edges, side="right")
    return np.asarray(height[passed] * edges - moment[passed], dtype=np.float64)


def over_time(load: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(largest over mean, coefficient of variation) across instances in each bin: shape (bins,); NaN without load."""
    mean = load.mean(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        largest, variation = load.max(axis=0) / mean, load.std(axis=0) / mean
    idle = mean <= 1e-9
    return np.where(idle, np.nan, largest), np.where(idle, np.nan, variation)


def imbalance(load: FloatArray) -> Imbalance:
    """Over the whole run: mean of each bin's figure, weighted by the fleet's load in it; NaN without load."""
    largest, variation = over_time(load)
    weights = load.mean(axis=0)
    known = np.isfinite(largest)
    if not known.any():
        return Imbalance(float("nan"), float("nan"))
    weights = weights[known]
    return Imbalance(
        float(np.average(largest[known], weights=weights)), float(np.average(variation[known], weights=weights))
    )
