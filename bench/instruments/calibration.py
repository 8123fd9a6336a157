"""Calibration: measured points of one engine into a points file, a hardware profile and the cost models' constants.

The profile's step and transfer times are those of ``sim.fit``; the cost models' constants are fitted to the same
points, by least squares on the logarithm of formula / measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean, median

import msgspec
import yaml
from scipy.optimize import least_squares

from bench.instruments.interference import InterferenceRow, by_point
from bench.instruments.steps import DecodeTime, PrefillTime
from policies.costs.constants import CostConstants, PrefillConstants
from policies.costs.formulas import PrefillModel
from sim.fit import Fit, Residual, fit
from sim.hardware import HardwareProfile, KvPool
from sim.points import DecodePoint, InterferencePoint, Points, PrefillPoint, TransportPoints

EXPERT_MISSES = (0.75, 0.875, 0.9375, 0.96875)
"""Shares of experts that one token leaves out, tried where the model is not known: top-k of 4k to 32k experts."""
_DENSE_ERROR = 0.02
"""Error of the decode points up to which a dense model explains them."""
_DIGITS = 5
_START = PrefillConstants(0.02, 2e-5, 1e-9)


class CalibratedEngine(msgspec.Struct, kw_only=True, frozen=True):
    """What is known of the engine without measuring it."""

    name: str
    """Of the profile."""
    source: str
    pool_tokens: int
    kv_bytes_per_token: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    expert_miss: float | None = None
    """Share of its experts that one token leaves out; 0: dense; None: the points decide."""


class Calibrated(msgspec.Struct, kw_only=True):
    """The outcome of a calibration."""

    points: Points
    fit: Fit
    profile: HardwareProfile
    """The fitted profile with the cost models' constants."""
    costs: CostConstants
    cost_residuals: tuple[Residual, ...]


def points_of(
    engine: CalibratedEngine,
    prefills: Iterable[PrefillTime],
    decodes: Iterable[DecodeTime],
    interference: Iterable[InterferenceRow],
    transports: dict[str, TransportPoints],
    fixed: dict[str, float],
) -> Points:
    """Measured rows as the points that ``sim.fit`` takes: medians over the repeats."""
    rows = list(interference)
    return Points(
        name=engine.name,
        source=engine.source,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        kv=KvPool(pool_tokens=engine.pool_tokens, bytes_per_token=engine.kv_bytes_per_token, connector_fraction=0.0),
        fixed=fixed,
        background_context_tokens=round(fmean(row.context_tokens for row in rows)) if rows else 0,
        decode=tuple(
            DecodePoint(streams=each.streams, context=round(each.context_tokens), seconds=_rounded(each.step_s))
            for each in decodes
        ),
        prefill=tuple(
            PrefillPoint(new=each.new_tokens, cached=each.cached_tokens, seconds=_rounded(each.median_s))
            for each in prefills
        ),
        interference=tuple(
            InterferencePoint(
                streams=streams,
                prefill=tokens,
                ttft_s=_rounded(median(row.ttft_s for row in found)),
                tpot_s=_rounded(median(row.during.tpot_s for row in found)),
                gap_s=_rounded(median(row.longest_gap_s for row in found)),
            )
            for (streams, tokens), found in by_point(rows).items()
        ),
        default_transport=next(iter(transports), None),
        transports=transports,
    )


def calibrated(
    engine: CalibratedEngine,
    prefills: list[PrefillTime],
    decodes: list[DecodeTime],
    interference: list[InterferenceRow],
    transports: dict[str, TransportPoints] | None = None,
) -> Calibrated:
    """Fit everything to the measured rows."""

    def fitted(miss: float) -> tuple[Points, Fit]:
        fixed = {"expert_miss": miss} if miss else {"expert_miss": 0.0, "decode_experts_s": 0.0}
        points = points_of(engine, prefills, decodes, interference, transports or {}, fixed)
        return points, fit(points)

    points, best = fitted(engine.expert_miss or 0.0)
    if engine.expert_miss is None and _decode_error(best) > _DENSE_ERROR:
        tried = [(points, best), *(fitted(miss) for miss in EXPERT_MISSES)]
        points, best = min(tried, key=lambda each: _decode_error(each[1]))
    prefill, residuals = fit_prefill_constants(prefills)
    costs = CostConstants(prefill, {}, float(engine.kv_bytes_per_token))
    profile = best.profile.model_copy(update={"costs": costs.as_mapping()})
    return Calibrated(points=points, fit=best, profile=profile, costs=costs, cost_residuals=tuple(residuals))


def _decode_error(found: Fit) -> float:
    """Root mean square of the decode points' relative errors."""
    errors = [each.error for each in found.residuals if each.kind == "decode step"]
    return math.sqrt(fmean(error * error for error in errors))


def fit_prefill_constants(times: Iterable[PrefillTime]) -> tuple[PrefillConstants, list[Residual]]:
    """The constants of `policies.costs.formulas.PrefillModel`, and its error at each point that it is used for."""
    smallest = PrefillModel().smallest_tokens
    points = [each for each in times if each.new_tokens >= smallest] or list(times)

    def modelled(constants: PrefillConstants) -> list[float]:
        model = PrefillModel(*constants)
        return [model.seconds(each.new_tokens, each.cached_tokens) for each in points]

    def errors(logs: Iterable[float]) -> list[float]:
        model = modelled(PrefillConstants(*map(math.exp, logs)))
        return [math.log(seconds / each.median_s) for seconds, each in zip(model, points, strict=True)]

    result = least_squares(errors, [math.log(each) for each in _START], loss="soft_l1", f_scale=0.1)
    constants = PrefillConstants(*(_rounded(math.exp(log)) for log in result.x))
    residuals = [
        Residual(
            "cost model, prefill", f"{each.new_tokens:,} new + {each.cached_tokens:,} cached", each.median_s, seconds
        )
        for each, seconds in zip(points, modelled(constants), strict=True)
    ]
    return constants, residuals


def points_yaml(points: Points) -> str:
    """The points file, with a header that names how the profile is made from it."""
    header = (
        "# Measured by `warmroute calibrate`, which fitted the profile beside it. `warmroute sim fit NAME --points FILE`\n"
        "# fits the step and transfer times again, without the cost models' constants.\n"
    )
    return header + yaml.safe_dump(
        points.model_dump(mode="json", exclude_defaults=True), sort_keys=False, width=110, default_flow_style=None
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
