"""One cell: the same requests once with each policy, and the ratios of their figures with intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.cells.arenas import prepared
from bench.cells.ratios import RESAMPLES, Interval, four_digits, interval
from bench.tournament.arena import FAILED_S, PreparedCell
from bench.tournament.results import GridCell
from policies.registry import make_routing
from policies.routing.base import RoutingPolicy
from policies.types import Role
from replayer.compare.statistics.bootstrap import BoolArray, FloatArray, IntArray, SessionBootstrap
from sim.offline.setup import parsed_params
from sim.offline.simulate import SimOptions, simulate

TRANSPORT = "nvlink"
BASELINE = "warm"


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


class JointRatios(msgspec.Struct, frozen=True, kw_only=True):
    """``joint`` divided by ``warm``; below 1: ``joint`` is better."""

    ttft_p90: Interval
    ttft_mean: Interval
    e2e_p50: Interval
    e2e_mean: Interval
    tpot_p90: Interval


class JointCell(msgspec.Struct, frozen=True, kw_only=True):
    """Both policies in one cell with one seed."""

    cell: GridCell
    seed: int
    sessions: int
    turns: int
    warm: PlacementFigures
    joint: PlacementFigures
    ratios: JointRatios


class JointWork(msgspec.Struct, frozen=True, kw_only=True):
    """One cell to run, as plain data for another process."""

    folder: str
    cell: GridCell
    seed: int
    params: list[str] = []
    """``KEY=VALUE``: parameters of ``joint``."""
    base_params: list[str] = []
    """Those of ``warm``."""
    profile: str = ""
    """Hardware profile of the engines; empty: that of the tournament's settings."""
    scheduling_policy: str = "fcfs"
    """Of the engines; ``priority``: they compute waiting prompts in the policies' order (`policies.costs.order`)."""


class PlacementArm(NamedTuple):
    """Judged turns of one run, and their figures."""

    figures: PlacementFigures
    ttft: FloatArray
    e2e: FloatArray
    tpot: FloatArray
    """NaN for turns with one token. All by judged turn, in one order for both policies."""
    handed_off: BoolArray
    """True for turns that were prefilled on another instance."""
    rows: list[dict[str, Any]]
    """Breakdown rows of all turns, judged or not; empty unless the options ask for decisions."""


def report(work: JointWork) -> JointCell:
    """Run one cell with both policies.

    Raises:
        TournamentError: no such trace, or no request to judge.
    """
    stage = prepared(work.folder, work.cell, work.seed, work.profile)
    options = replace(stage.options, role=Role.KV_BOTH, transport=TRANSPORT, scheduling_policy=work.scheduling_policy)
    session_of = judged_sessions(stage)
    warm = placement_arm(stage, options, make_routing(BASELINE, parsed_params(work.base_params)))
    joint = placement_arm(stage, options, make_routing("joint", parsed_params(work.params)))
    return JointCell(
        cell=stage.cell,
        seed=stage.seed,
        sessions=stage.sessions,
        turns=session_of.size,
        warm=warm.figures,
        joint=joint.figures,
        ratios=ratios_of(joint, warm, session_of, stage.seed),
    )


def judged_sessions(stage: PreparedCell) -> IntArray:
    """Number of each judged turn's session, in the order of the arms' turns."""
    numbers: dict[str, int] = {}
    sessions = [stage.workload.trace.requests[chat_id].session_id for chat_id in sorted(stage.workload.judged)]
    return np.array([numbers.setdefault(name, len(numbers)) for name in sessions], dtype=np.int64)


def placement_arm(stage: PreparedCell, options: SimOptions, policy: RoutingPolicy) -> PlacementArm:
    """The judged turns of a prepared cell under a policy."""
    result = simulate(stage.workload.trace, options, policy, plan=stage.plan)
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


def ratios_of(joint: PlacementArm, warm: PlacementArm, session_of: IntArray, seed: int) -> JointRatios:
    """Ratios with intervals: a paired bootstrap over sessions."""
    bootstrap = SessionBootstrap(session_of, int(session_of.max()) + 1, resamples=RESAMPLES, seed=seed)
    every = np.ones(session_of.size, dtype=np.bool_)

    def quantile(level: float, candidate: FloatArray, base: FloatArray) -> Interval:
        def resampled(values: FloatArray) -> FloatArray:
            return bootstrap.quantiles(values, ~np.isnan(values), np.array([level]))[:, 0]

        return _interval(lambda values: float(np.nanquantile(values, level)), resampled, candidate, base)

    def mean(candidate: FloatArray, base: FloatArray) -> Interval:
        return _interval(lambda values: float(values.mean()), lambda v: bootstrap.sums(v, every), candidate, base)

    return JointRatios(
        ttft_p90=quantile(0.9, joint.ttft, warm.ttft),
        ttft_mean=mean(joint.ttft, warm.ttft),
        e2e_p50=quantile(0.5, joint.e2e, warm.e2e),
        e2e_mean=mean(joint.e2e, warm.e2e),
        tpot_p90=quantile(0.9, joint.tpot, warm.tpot),
    )


def _interval(
    value: Callable[[FloatArray], float],
    resampled: Callable[[FloatArray], FloatArray],
    candidate: FloatArray,
    base: FloatArray,
) -> Interval:
    return interval(value(candidate) / value(base), resampled(candidate) / resampled(base))
