"""Calibration: measured points of one engine into a points file, a hardware profile and the cost models' constants.

The profile's step and transfer times are those of ``sim.fit``; the cost models' constants are fitted to the same
points, by least squares on the logarithm of formula / measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean, median

import msgspec
import yaml
from scipy.optimize import least_squares

from bench.instruments.facts import CalibratedEngine
from bench.instruments.interference import InterferenceRow, by_point
from bench.instruments.record import InstrumentRecord
from bench.instruments.steps import DecodeTime, PrefillTime
from bench.instruments.transfer import TransferRow
from bench.instruments.transfer_tables import by_load, typical
from policies.costs.constants import CostConstants, PrefillConstants
from policies.costs.formulas import PrefillModel, TransferJob, transfer_formula
from policies.costs.transfer_constants import TRANSFER_FORMULAS, TransferConstants, TransferFormula
from policies.types import Transport
from sim.fit import Fit, Residual, fit
from sim.hardware import HardwareProfile, KvPool
from sim.points import DecodePoint, InterferencePoint, Points, PrefillPoint, TransferPoint, TransportPoints

EXPERT_MISSES = (0.75, 0.875, 0.9375, 0.96875)
"""Shares of experts that one token leaves out, tried where the model is not known: top-k of 4k to 32k experts."""
_DENSE_ERROR = 0.02
"""Error of the decode points up to which a dense model explains them."""
_UNEVEN = 2.0
"""Ratio of the slowest to the fastest repeat, or to a longer prefill, from which an interference point is left out."""
_DIGITS = 5
_START = PrefillConstants(0.02, 2e-5, 1e-9)


class CalibrationRows(msgspec.Struct, kw_only=True, frozen=True):
    """Everything that a calibration measured."""

    prefills: list[PrefillTime]
    decodes: list[DecodeTime]
    interference: list[InterferenceRow]
    transfers: list[TransferRow] = []
    """By the transport of `CalibratedEngine`."""
    further_transfers: dict[str, list[TransferRow]] = {}
    """By other transports, from other records."""


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
    """Measured rows as the points that ``sim.fit`` takes: medians over the repeats.

    Interference whose repeats are far apart is marked as left out, and so is what took longer than a longer prefill.
    """
    rows = list(interference)
    combinations = by_point(rows)
    ttft_s = {key: median(row.ttft_s for row in found) for key, found in combinations.items()}
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
                ttft_s=_rounded(ttft_s[streams, tokens]),
                tpot_s=_rounded(median(row.during.tpot_s for row in found)),
                gap_s=_rounded(median(row.longest_gap_s for row in found)),
                skip=_uneven(found) or _beyond_longer(streams, tokens, ttft_s),
            )
            for (streams, tokens), found in combinations.items()
        ),
        default_transport=next(iter(transports), None),
        transports=transports,
    )


def calibrated(
    engine: CalibratedEngine,
    prefills: list[PrefillTime],
    decodes: list[DecodeTime],
    interference: list[InterferenceRow],
    transfers: Mapping[str, list[TransferRow]] | None = None,
) -> Calibrated:
    """Fit everything to the measured rows; ``transfers`` by transport, the profile's default first.

    The cost models' constants get those of a transfer only if they know the transport.
    """
    moved = {transport: rows for transport, rows in (transfers or {}).items() if rows}
    transports = {transport: transport_points(rows) for transport, rows in moved.items()}

    def fitted(miss: float) -> tuple[Points, Fit]:
        fixed = {"expert_miss": miss} if miss else {"expert_miss": 0.0, "decode_experts_s": 0.0}
        points = points_of(engine, prefills, decodes, interference, transports, fixed)
        return points, fit(points)

    points, best = fitted(engine.expert_miss or 0.0)
    if engine.expert_miss is None and _decode_error(best) > _DENSE_ERROR:
        tried = [(points, best), *(fitted(miss) for miss in EXPERT_MISSES)]
        points, best = min(tried, key=lambda each: _decode_error(each[1]))
    prefill, residuals = fit_prefill_constants(prefills)
    formulas = {}
    for transport, rows in moved.items():
        if transport in set(Transport):
            formulas[Transport(transport)], more = fit_transfer_formula(rows, Transport(transport))
            residuals += more
    costs = CostConstants(prefill, formulas, float(engine.kv_bytes_per_token))
    profile = best.profile.model_copy(update={"costs": costs.as_mapping()})
    return Calibrated(points=points, fit=best, profile=profile, costs=costs, cost_residuals=tuple(residuals))


def fit_record(record: InstrumentRecord) -> Calibrated:
    """Fit the record of a calibration, as it is in memory or read from its file.

    Raises:
        msgspec.ValidationError: not the record of a calibration.
    """
    measured = msgspec.convert(msgspec.to_builtins(record.rows), CalibrationRows)
    engine = msgspec.convert(msgspec.to_builtins(record.facts), CalibratedEngine)
    own = {} if engine.transport is None else {engine.transport: measured.transfers}
    return calibrated(
        engine, measured.prefills, measured.decodes, measured.interference, own | measured.further_transfers
    )


def _uneven(rows: list[InterferenceRow]) -> str | None:
    """The reason to leave a combination out; None if its repeats agree.

    The first prefill of a size may compile kernels, which took 20 times as long as the next one on H200s.
    """
    times = [row.ttft_s for row in rows]
    ratio = max(times) / min(times)
    return f"repeats differ {ratio:.0f} times, perhaps kernels were compiled" if ratio > _UNEVEN else None


def _beyond_longer(streams: int, tokens: int, ttft_s: Mapping[tuple[int, int], float]) -> str | None:
    """The reason to leave out a prefill that took far longer than a longer one; it needs no second repeat."""
    took_s = ttft_s[streams, tokens]
    for (others, longer), seconds in ttft_s.items():
        if others == streams and longer > tokens and took_s > _UNEVEN * seconds:
            return f"took {took_s / seconds:.0f} times as long as {longer:,} tokens, perhaps kernels were compiled"
    return None


def _decode_error(found: Fit) -> float:
    """Root mean square of the decode points' relative errors."""
    errors = [each.error for each in found.residuals if each.kind == "decode step"]
    return math.sqrt(fmean(error * error for error in errors))


def fit_prefill_constants(times: Iterable[PrefillTime]) -> tuple[PrefillConstants, list[Residual]]:
    """The constants of `policies.costs.formulas.PrefillModel`, and its error at each point that it is used for."""
    smallest = PrefillModel().smallest_tokens
    measured = list(times)
    points = [each for each in measured if each.new_tokens >= smallest]
    if len(points) <= len(_START):
        points = measured

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


def transport_points(rows: Iterable[TransferRow]) -> TransportPoints:
    """Measured hand-offs as the D legs that ``sim.fit`` takes: medians, stalls left out.

    The bandwidth that no transfer's time may exceed is the best that was seen.
    """
    groups = by_load([row for row in rows if row.background_kind == "decode" or not row.background])
    steady = {key: typical(found) for key, found in groups.items()}
    seen = [median(row.transfer_s for row in found) for found in steady.values()]
    rates = [found[0].size_bytes / each for found, each in zip(steady.values(), seen, strict=True) if each > 0]
    legs = tuple(
        TransferPoint(
            tokens=key.tokens,
            streams=key.background,
            transfers=key.concurrent,
            seconds=_rounded(median(row.d_leg_s for row in found)),
        )
        for key, found in steady.items()
    )
    return TransportPoints(legs=legs, raw_gb_per_s=_rounded(max(rates, default=1e12) / 1e9))


def fit_transfer_formula(rows: Iterable[TransferRow], transport: Transport) -> tuple[TransferFormula, list[Residual]]:
    """The constants of `policies.costs.transfer_constants.TransferFormula`, and its error at each point.

    What the rows do not show stays as published: without background streams their effect, without concurrent
    transfers that of sharing.
    """
    groups = by_load([row for row in rows if row.background_kind == "decode" or not row.background])
    points = [
        (key, found[0].size_bytes, median(row.d_leg_s for row in typical(found))) for key, found in groups.items()
    ]
    start = TRANSFER_FORMULAS[transport]
    fitted = ["setup_s", "bytes_per_s"]
    if any(key.background for key, _, _ in points):
        fitted += ["stream_setup_s", "slowdown"]
    if any(key.concurrent > 1 for key, _, _ in points):
        fitted.append("crowd")

    def modelled(formula: TransferFormula) -> list[float]:
        constants = TransferConstants({transport: formula}, {})
        return [
            transfer_formula(TransferJob(("", ""), transport, size, key.background, key.concurrent - 1), constants)
            for key, size, _ in points
        ]

    def formula_of(logs: Iterable[float]) -> TransferFormula:
        return start._replace(**dict(zip(fitted, map(math.exp, logs), strict=True)))

    def errors(logs: Iterable[float]) -> list[float]:
        model = modelled(formula_of(logs))
        return [math.log(seconds / measured) for seconds, (_, _, measured) in zip(model, points, strict=True)]

    result = least_squares(errors, [math.log(getattr(start, name)) for name in fitted], loss="soft_l1", f_scale=0.1)
    formula = TransferFormula(*map(_rounded, formula_of(result.x)))
    return formula, [
        Residual(
            f"cost model, {transport.value}",
            f"{key.tokens:,}, {key.background} streams, {key.concurrent} at a time",
            measured,
            seconds,
        )
        for (key, _, measured), seconds in zip(points, modelled(formula), strict=True)
    ]


def points_yaml(points: Points) -> str:
    """The points file, with a header that names how the profile is made from it."""
    header = (
        "# Measured by `warmroute calibrate`, which fitted the profile beside it. `warmroute sim fit` fits it again,\n"
        "# but without the cost models' constants.\n"
    )
    return header + yaml.safe_dump(
        points.model_dump(mode="json", exclude_defaults=True), sort_keys=False, width=110, default_flow_style=None
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
