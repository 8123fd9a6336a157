"""The judged turns of one run, their figures, and the ratios of two runs with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.cells.ratios import BEYOND, RESAMPLES, Interval, four_digits, geometric_mean, interval
from bench.tournament.arena import FAILED_S, PreparedCell
from policies.admission.base import AdmissionRule
from policies.routing.base import RoutingPolicy
from replayer.compare.statistics.bootstrap import BoolArray, FloatArray, IntArray, SessionBootstrap
from sim.offline.simulate import SimOptions, simulate


class PlacementFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Judged turns of one run; seconds from when they were due."""

    ttft_p90_s: float
    ttft_mean_s: float
    e2e_p50_s: float
    e2e_mean_s: float
    tpot_p90_s: float
    hit_rate: float
    handed_off: int
    """Turns that were prefilled on another instance."""
    failed: int


class PlacementRatios(msgspec.Struct, frozen=True, kw_only=True):
    """An arm divided by the base; below 1: the arm is better."""

    ttft_p90: Interval
    ttft_mean: Interval
    e2e_p50: Interval
    e2e_mean: Interval
    tpot_p90: Interval


METRICS: dict[str, Callable[[PlacementRatios], Interval]] = {
    "TTFT p90": lambda ratios: ratios.ttft_p90,
    "mean TTFT": lambda ratios: ratios.ttft_mean,
    "E2E p50": lambda ratios: ratios.e2e_p50,
    "mean E2E": lambda ratios: ratios.e2e_mean,
    "TPOT p90": lambda ratios: ratios.tpot_p90,
}


class PlacementArm(NamedTuple):
    """Judged turns of one run, and their figures."""

    figures: PlacementFigures
    ttft: FloatArray
    e2e: FloatArray
    tpot: FloatArray
    """NaN for turns with one token. All by judged turn, in one order for all arms."""
    handed_off: BoolArray
    """True for turns that were prefilled on another instance."""
    rows: list[dict[str, Any]]
    """Breakdown rows of all turns, judged or not; empty unless the options ask for decisions."""


def judged_sessions(stage: PreparedCell) -> IntArray:
    """Number of each judged turn's session, in the order of the arms' turns."""
    numbers: dict[str, int] = {}
    sessions = [stage.workload.trace.requests[chat_id].session_id for chat_id in sorted(stage.workload.judged)]
    return np.array([numbers.setdefault(name, len(numbers)) for name in sessions], dtype=np.int64)


def placement_arm(
    stage: PreparedCell, options: SimOptions, policy: RoutingPolicy, admission: AdmissionRule | None = None
) -> PlacementArm:
    """The judged turns of a prepared cell under a policy and an admission rule; None: everything is sent at once."""
    result = simulate(stage.workload.trace, options, policy, plan=stage.plan, admission=admission)
    order = sorted(stage.workload.judged)
    place = {chat_id: number for number, chat_id in enumerate(order)}
    handed_off = np.zeros(len(order), dtype=np.bool_)
    ttft, e2e, tpot = np.full(len(order), FAILED_S), np.full(len(order), FAILED_S), np.full(len(order), np.nan)
    prompt = cached = failed = 0
    for record in result.run.records:
        at = place.get(record.chat_id)
        if at is None:
            continue
        if not record.ok or record.ttft_scheduled_s is None or record.e2e_scheduled_s is None:
            failed += 1
            continue
        ttft[at], e2e[at] = record.ttft_scheduled_s, record.e2e_scheduled_s
        if record.tpot_s is not None:
            tpot[at] = record.tpot_s
        prompt += record.prompt_tokens or 0
        cached += record.cached_tokens or 0
        handed_off[at] = record.prefill_instance is not None
    figures = PlacementFigures(
        ttft_p90_s=four_digits(float(np.quantile(ttft, 0.9))),
        ttft_mean_s=four_digits(float(ttft.mean())),
        e2e_p50_s=four_digits(float(np.median(e2e))),
        e2e_mean_s=four_digits(float(e2e.mean())),
        tpot_p90_s=four_digits(float(np.nanquantile(tpot, 0.9))),
        hit_rate=four_digits(cached / prompt) if prompt else 0.0,
        handed_off=int(handed_off.sum()),
        failed=failed,
    )
    return PlacementArm(figures, ttft, e2e, tpot, handed_off, result.decisions)


def ratios_of(arm: PlacementArm, base: PlacementArm, session_of: IntArray, seed: int) -> PlacementRatios:
    """Ratios with intervals: a paired bootstrap over sessions."""
    bootstrap = SessionBootstrap(session_of, int(session_of.max()) + 1, resamples=RESAMPLES, seed=seed)
    every = np.ones(session_of.size, dtype=np.bool_)

    def quantile(level: float, candidate: FloatArray, base: FloatArray) -> Interval:
        def resampled(values: FloatArray) -> FloatArray:
            return bootstrap.quantiles(values, ~np.isnan(values), np.array([level]))[:, 0]

        return _interval(lambda values: float(np.nanquantile(values, level)), resampled, candidate, base)

    def mean(candidate: FloatArray, base: FloatArray) -> Interval:
        return _interval(lambda values: float(values.mean()), lambda v: bootstrap.sums(v, every), candidate, base)

    return PlacementRatios(
        ttft_p90=quantile(0.9, arm.ttft, base.ttft),
        ttft_mean=mean(arm.ttft, base.ttft),
        e2e_p50=quantile(0.5, arm.e2e, base.e2e),
        e2e_mean=mean(arm.e2e, base.e2e),
        tpot_p90=quantile(0.9, arm.tpot, base.tpot),
    )


def beyond(ratios: Iterable[PlacementRatios]) -> tuple[int, int]:
    """Figures whose interval excludes 1 by more than 3 %: better, worse."""
    found = [read(each) for each in ratios for read in METRICS.values()]
    return sum(high < 1 / BEYOND for _, _, high in found), sum(low > BEYOND for _, low, _ in found)


def means_of(ratios: Sequence[PlacementRatios]) -> str:
    """Geometric mean of each figure, as cells of a table's row."""
    return " | ".join(geometric_mean([read(each)[0] for each in ratios]) for read in METRICS.values())


def _interval(
    value: Callable[[FloatArray], float],
    resampled: Callable[[FloatArray], FloatArray],
    candidate: FloatArray,
    base: FloatArray,
) -> Interval:
    return interval(value(candidate) / value(base), resampled(candidate) / resampled(base))
