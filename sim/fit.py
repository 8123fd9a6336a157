"""Fits a hardware profile to measured points, by least squares on the logarithm of model / measured.

The model of a prefill among decodes is the one the engine follows: the front end's time, during which decodes continue
undisturbed, then one mixed step per chunk. A robust loss (soft L1) keeps single bad points from bending the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple

from scipy.optimize import least_squares

from policies.costs.published import RDMA_SLOWDOWNS, RDMA_STEADY_BYTES, RDMA_TRANSFERS
from sim.core.timing import StepTiming
from sim.hardware import HardwareProfile, LoadedTransferRow, SpreadPoint, StepCosts, TransportProfile
from sim.points import DecodePoint, InterferencePoint, Points, PrefillPoint, TransferPoint, TransportPoints

_DECODE_START = {"decode_s": 8e-3, "decode_experts_s": 1e-2, "decode_context_s": 2e-8}
_PREFILL_START = {
    "frontend_s": 0.03,
    "frontend_token_s": 1e-6,
    "prefill_s": 5e-3,
    "prefill_token_s": 2e-5,
    "prefill_context_s": 2e-9,
    "prefill_floor_s": 0.03,
    "mixed_stream_s": 5e-4,
}
_SIGNIFICANT = 5


class Residual(NamedTuple):
    """One measured value against the model's."""

    kind: str
    label: str
    measured_s: float
    model_s: float
    note: str = ""
    """Reason for which the point does not count in the fit's error figures; empty if it counts."""

    @property
    def error(self) -> float:
        """Relative error of the model, signed."""
        return self.model_s / self.measured_s - 1


class Fit(NamedTuple):
    """A fitted profile and its error at each point."""

    profile: HardwareProfile
    residuals: tuple[Residual, ...]

    @property
    def median_error(self) -> float:
        """Median of the absolute relative errors of the points that count."""
        return median(abs(each.error) for each in self.residuals if not each.note)

    @property
    def worst(self) -> Residual:
        """The point that counts with the largest absolute relative error."""
        return max((each for each in self.residuals if not each.note), key=lambda each: abs(each.error))


class Prefill(NamedTuple):
    """Model times of one prefill on an otherwise steady instance."""

    frontend_s: float
    steps_s: tuple[float, ...]
    decode_s: float
    """A decode step of the streams without the prefill; 0 without streams."""

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.frontend_s + sum(self.steps_s)

    @property
    def tpot_s(self) -> float:
        """Burst average of the streams: time over the tokens each got, which are one per step."""
        return self.ttft_s / (self.frontend_s / self.decode_s + len(self.steps_s))


def model_prefill(
    timing: StepTiming, new: int, cached: int, streams: int, stream_context: int, max_batched: int
) -> Prefill:
    """The steps of a prefill of ``new`` tokens after ``cached`` ones while ``streams`` decode."""
    steps = []
    done = 0
    context = streams * stream_context
    while done < new:
        count = min(max_batched - streams, new - done)
        if count == 1:
            steps.append(timing.decode(streams + 1, context + cached + done + 1))
        else:
            steps.append(timing.mixed(timing.chunk(count, cached + done), streams, context))
        done += count
    decode_s = timing.decode(streams, context) if streams else 0.0
    return Prefill(timing.frontend(new + cached), tuple(steps), decode_s)


def _timing(values: dict[str, float]) -> StepTiming:
    return StepTiming(**{name: values.get(name, 0.0) for name in StepTiming._fields})


def _fit(
    start: dict[str, float], known: dict[str, float], residuals: Callable[[StepTiming], list[Residual]], scale: float
) -> dict[str, float]:
    """The values of ``start``'s coefficients (all positive) that bring the residuals closest to none."""
    names = [name for name in start if name not in known]

    def errors(logs: Iterable[float]) -> list[float]:
        values = known | dict(zip(names, map(math.exp, logs), strict=True))
        return [math.log(each.model_s / each.measured_s) for each in residuals(_timing(values)) if not each.note]

    result = least_squares(
        errors, [math.log(start[name]) for name in names], loss="soft_l1", f_scale=scale, xtol=1e-12, ftol=1e-12
    )
    return known | {name: _rounded(math.exp(log)) for name, log in zip(names, result.x, strict=True)}


def _rounded(value: float) -> float:
    return float(f"{value:.{_SIGNIFICANT}g}")


def _decode_residuals(timing: StepTiming, points: Iterable[DecodePoint]) -> list[Residual]:
    return [
        Residual(
            "decode step",
            f"{point.streams} x {point.context:,}",
            point.seconds,
            timing.decode(point.streams, point.streams * point.context),
        )
        for point in points
    ]


def _prefill_residuals(timing: StepTiming, points: Iterable[PrefillPoint], max_batched: int) -> list[Residual]:
    return [
        Residual(
            "prefill TTFT",
            f"{point.new:,} new + {point.cached:,} cached",
            point.seconds,
            model_prefill(timing, point.new, point.cached, 0, 0, max_batched).ttft_s,
        )
        for point in points
    ]


def _interference_residuals(
    timing: StepTiming, points: Iterable[InterferencePoint], context: int, max_batched: int
) -> list[Residual]:
    found = []
    for point in points:
        model = model_prefill(timing, point.prefill, 0, point.streams, context, max_batched)
        label = f"{point.prefill:,} among {point.streams}"
        note = f"left out: {point.skip}" if point.skip else ""
        found.append(Residual("busy TTFT", label, point.ttft_s, model.ttft_s, note))
        found.append(Residual("TPOT during", label, point.tpot_s, model.tpot_s, note))
        if point.gap_s is not None:
            found.append(Residual("longest gap", label, point.gap_s, max(model.steps_s), note))
    return found


def _leg_overhead(timing: StepTiming, point: TransferPoint, context: int) -> float:
    """Seconds of a D leg that are not transfer: the front end and the step that makes the token."""
    return timing.frontend(point.tokens) + timing.decode(point.streams + 1, point.tokens + point.streams * context)


def _published_transport(contention: float, bytes_per_token: int) -> TransportProfile:
    def row(streams: float, factor: float) -> LoadedTransferRow:
        times = [(float(each.tokens * bytes_per_token), _rounded(each.median_s * factor)) for each in RDMA_TRANSFERS]
        return LoadedTransferRow(streams=streams, points=tuple(times))

    spread = [SpreadPoint(size_bytes=RDMA_STEADY_BYTES, fastest=1.0, slowest=1.0)]
    for each in RDMA_TRANSFERS:
        if each.range_s is not None:
            fastest, slowest = (_rounded(bound_s / each.median_s) for bound_s in each.range_s)
            spread.append(SpreadPoint(size_bytes=each.size_bytes, fastest=fastest, slowest=slowest))
    loaded = [row(each.streams, each.factor) for each in RDMA_SLOWDOWNS]
    return TransportProfile(contention=contention, rows=(row(0, 1.0), *loaded), spread=tuple(spread))


def _fit_transport(timing: StepTiming, points: TransportPoints, bytes_per_token: int, context: int) -> TransportProfile:
    if points.published:
        return _published_transport(points.contention or 0.0, bytes_per_token)
    if points.transfers:
        idle = tuple((float(each.tokens * bytes_per_token), each.seconds) for each in points.transfers)
        rows = [LoadedTransferRow(streams=0, points=idle)]
        for load in points.load_factors:
            loaded = tuple((size, _rounded(seconds * load.factor)) for size, seconds in idle)
            rows.append(LoadedTransferRow(streams=load.streams, points=loaded))
        return TransportProfile(contention=points.contention or 0.0, rows=tuple(rows))
    table: dict[int, list[tuple[float, float]]] = {}
    shared = []
    raw_bytes_per_s = (points.raw_gb_per_s or math.inf) * 1e9
    for leg in points.legs:
        if leg.transfers > 1:
            shared.append(leg)
            continue
        size = float(leg.tokens * bytes_per_token)
        seconds = max(leg.seconds - _leg_overhead(timing, leg, context), size / raw_bytes_per_s)
        table.setdefault(leg.streams, []).append((size, _rounded(seconds)))
    fitted_rows = tuple(LoadedTransferRow(streams=streams, points=tuple(row)) for streams, row in sorted(table.items()))
    if points.contention is not None or not shared:
        return TransportProfile(contention=points.contention or 0.0, rows=fitted_rows)

    def errors(logs: Iterable[float]) -> list[float]:
        (contention,) = map(math.exp, logs)
        trial = TransportProfile(contention=contention, rows=fitted_rows)
        return [math.log(_leg_model(timing, trial, leg, bytes_per_token, context) / leg.seconds) for leg in shared]

    result = least_squares(errors, [0.0], xtol=1e-12, ftol=1e-12)
    return TransportProfile(contention=_rounded(math.exp(result.x[0])), rows=fitted_rows)


def _leg_model(
    timing: StepTiming, transport: TransportProfile, leg: TransferPoint, bytes_per_token: int, context: int
) -> float:
    moved = transport.seconds(leg.tokens * bytes_per_token, leg.streams, leg.transfers)
    return _leg_overhead(timing, leg, context) + moved


def _leg_residuals(timing: StepTiming, name: str, transport: TransportProfile, points: Points) -> list[Residual]:
    size, context = points.kv.bytes_per_token, points.background_context_tokens
    return [
        Residual(
            f"D leg, {name}",
            f"{leg.tokens:,}, {leg.streams} streams, {leg.transfers} at a time",
            leg.seconds,
            _leg_model(timing, transport, leg, size, context),
            "contention fitted to these" if leg.transfers > 1 else "interpolated, not fitted",
        )
        for leg in points.transports[name].legs
    ]


def fit(points: Points) -> Fit:
    """Fit a profile: decode coefficients from the decode points alone, the others from prefill and interference."""
    context, max_batched = points.background_context_tokens, points.max_num_batched_tokens

    def step_residuals(timing: StepTiming) -> list[Residual]:
        return _prefill_residuals(timing, points.prefill, max_batched) + _interference_residuals(
            timing, points.interference, context, max_batched
        )

    values = _fit(_DECODE_START, dict(points.fixed), lambda timing: _decode_residuals(timing, points.decode), 0.05)
    values = _fit(_PREFILL_START, values, step_residuals, 0.1)
    timing = _timing(values)
    transports = {
        name: _fit_transport(timing, each, points.kv.bytes_per_token, context)
        for name, each in points.transports.items()
    }
    residuals = _decode_residuals(timing, points.decode) + step_residuals(timing)
    for name, transport in transports.items():
        residuals += _leg_residuals(timing, name, transport, points)
    profile = HardwareProfile(
        name=points.name,
        source=points.source,
        max_num_batched_tokens=max_batched,
        max_num_seqs=points.max_num_seqs,
        max_model_len=points.max_model_len,
        step=StepCosts(**values),
        kv=points.kv,
        default_transport=points.default_transport,
        transports=transports,
    )
    return Fit(profile, tuple(residuals))
