"""Recorded against simulated latencies: quantiles and errors of single requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim.fidelity.recording import Recording
from sim.fidelity.resimulate import ResimulatedRequest

QUANTILES = (0.5, 0.9, 0.99)
METRICS = ("ttft", "tpot", "e2e")


class LatencyComparison(NamedTuple):
    """One latency metric, measured and simulated, in seconds."""

    metric: str
    requests: int
    measured_s: tuple[float, ...]
    """Measured times at ``QUANTILES``."""
    simulated_s: tuple[float, ...]
    typical_factor: float
    """Half of the requests are simulated within this factor (above 1) of the measured time."""
    rank_correlation: float
    """Spearman's, over requests: 1 if the simulation orders requests by latency as measured."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """Simulated over measured, at ``QUANTILES``."""
        return tuple(there / here for here, there in zip(self.measured_s, self.simulated_s, strict=True))


class Fidelity(NamedTuple):
    """One recording against its simulation."""

    name: str
    requests: int
    """Compared requests: answered, and sent after the seconds that are left out."""
    failed: int
    metrics: list[LatencyComparison]
    cache_requests: int
    """Of these, requests whose engine reported cached tokens and whose prefill was not offloaded."""
    cache_equal: int
    measured_hit_rate: float
    """Cached over all prompt tokens of these requests."""
    simulated_hit_rate: float


def compare(recording: Recording, outcomes: dict[str, ResimulatedRequest]) -> Fidelity:
    """Compare a recording with its simulation, over the requests that are marked for comparison."""
    pairs = [(each, outcomes[each.record.request_id]) for each in recording.sent if each.compared]
    metrics = []
    for name in METRICS:
        both = [(getattr(sent.record, f"{name}_s"), getattr(outcome.latencies, f"{name}_s")) for sent, outcome in pairs]
        values = np.array([each for each in both if None not in each], dtype=float)
        if len(values):
            metrics.append(_metric(name, values[:, 0], values[:, 1]))
    known = [
        (sent.record.cached_tokens, outcome.cached_tokens, sent.prompt_tokens)
        for sent, outcome in pairs
        if sent.record.cached_tokens is not None and sent.record.prefill_instance is None
    ]
    prompt = sum(tokens for _, _, tokens in known)
    return Fidelity(
        recording.name,
        len(pairs),
        recording.failed,
        metrics,
        len(known),
        sum(measured == simulated for measured, simulated, _ in known),
        sum(measured for measured, _, _ in known) / prompt if prompt else 0.0,
        sum(simulated for _, simulated, _ in known) / prompt if prompt else 0.0,
    )


def _metric(name: str, measured: np.ndarray, simulated: np.ndarray) -> LatencyComparison:
    from scipy import stats  # takes most of a second to import

    off = np.abs(np.log(simulated / measured))
    same = len(measured) < 3 or np.ptp(measured) == 0 or np.ptp(simulated) == 0
    return LatencyComparison(
        name,
        len(measured),
        tuple(np.quantile(measured, QUANTILES).tolist()),
        tuple(np.quantile(simulated, QUANTILES).tolist()),
        float(np.exp(np.median(off))),
        float("nan") if same else float(stats.spearmanr(measured, simulated).statistic),
    )


HEADER = (
    "| recording | requests | metric | p50 measured / simulated | p90 measured / simulated | p99 measured / simulated "
    "| half within | rank |\n| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |"
)
CACHE_HEADER = (
    "| recording | requests | cached tokens equal | hit rate measured / simulated |\n| --- | ---: | ---: | ---: |"
)


def markdown(fidelities: list[Fidelity]) -> str:
    """Two Markdown tables: latencies and cached tokens."""
    lines = [HEADER]
    for each in fidelities:
        for metric in each.metrics:
            cells = [_cell(metric, place) for place in range(len(QUANTILES))]
            lines.append(
                f"| {each.name} | {metric.requests} | {metric.metric.upper()} | {' | '.join(cells)} "
                f"| x {metric.typical_factor:.2f} | {metric.rank_correlation:.2f} |"
            )
    lines += ["", CACHE_HEADER]
    lines += [
        f"| {each.name} | {each.cache_requests} | {each.cache_equal} "
        f"| {each.measured_hit_rate:.3f} / {each.simulated_hit_rate:.3f} |"
        for each in fidelities
    ]
    return "\n".join(lines)


def _cell(metric: LatencyComparison, place: int) -> str:
    scale, unit = (1e3, "ms") if metric.metric == "tpot" else (1.0, "s")
    digits = 1 if unit == "ms" else 2
    measured, simulated = metric.measured_s[place] * scale, metric.simulated_s[place] * scale
    return f"{measured:.{digits}f} / {simulated:.{digits}f} {unit} ({metric.ratios[place] - 1:+.0%})"
