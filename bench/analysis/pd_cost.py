"""Benefit of moving a prefill off a decoding instance, and cost of moving its KV cache.

``benefit = D * T_prefill * (1 - TPOT_base / TPOT_during)`` stream-seconds: D streams get tokens at TPOT_during instead
of TPOT_base for T_prefill seconds, so each loses that part of the time. It is a sum over the streams and does not
depend on the decode time of any one request; capping it at that time made a published cost model wrong by a factor of a
hundred.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec

from bench.analysis.output import AnalysisError
from policies.costs.formulas import TransferJob, transfer_formula
from policies.types import Transport
from sim.fit import model_prefill
from sim.hardware import HardwareProfile
from sim.points import InterferencePoint, Points


class CostRow(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt length, nothing of it cached, among ``streams`` decodes."""

    prompt_tokens: int
    streams: int
    measured: bool
    """Prefill and TPOT are measured points; else the profile's fitted model."""
    kv_bytes: float
    prefill_s: float
    tpot_base_s: float
    tpot_during_s: float
    stall_share: float
    """1 - base / during: the share of T_prefill that each stream loses."""
    benefit_stream_s: float
    """Summed over the streams."""
    stall_per_stream_s: float
    """Seconds that one stream loses."""
    capped_benefit_s: float
    """The incorrect model: at most one request's decode time."""
    transfer_idle_s: float
    transfer_loaded_s: float
    """Transfer seconds with as many streams decoding on both sides as on the instance that is relieved."""
    formula_idle_s: float | None
    """Seconds by the routing policies' transfer formula; None: it does not cover the transport."""
    formula_loaded_s: float | None
    gain_idle: float
    """Benefit over transfer."""
    gain_loaded: float
    break_even_streams: int
    """Fewest streams that make the loaded transfer pay, at this row's stall and transfer; 0: there is no stall."""
    pays: bool
    """True if the benefit exceeds the loaded transfer."""
    pays_if_capped: bool
    """The same by the incorrect model, against the idle transfer."""
    understated: float
    """Summed benefit over the capped one."""


class CostTable(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ``analyse pd-cost``."""

    profile: str
    source: str
    transport: str
    single_decode_s: float
    rows: list[CostRow]


def cost_table(
    profile: HardwareProfile,
    points: Points | None,
    *,
    tokens: Sequence[int],
    streams: Sequence[int],
    transport: str | None = None,
    single_decode_s: float = 0.2,
) -> CostTable:
    """Benefit and cost for every prompt length and number of decoding streams.

    Args:
        profile: Step times and transfer tables.
        points: Measured prefills among decodes, used where one matches exactly.
        tokens: Prompt lengths; no part of a prompt is cached on either side.
        streams: Decoding streams on the instance that the prefill is moved away from.
        transport: Of the profile; its default one if None.
        single_decode_s: One request's decode time, at which the incorrect model capped the benefit.

    Raises:
        ProfileError: the profile has no such transport.
    """
    name = profile.transport_name(transport)
    rows = [
        _row(profile, points, name, prompt, count, single_decode_s) for count in streams for prompt in tokens if prompt
    ]
    return CostTable(
        profile=profile.name,
        source=profile.source,
        transport=name,
        single_decode_s=single_decode_s,
        rows=rows,
    )


def _row(
    profile: HardwareProfile, points: Points | None, transport: str, prompt: int, streams: int, single_decode_s: float
) -> CostRow:
    table = profile.transport(transport)
    base_s, prefill_s, during_s, measured = _interference(profile, points, prompt, streams)
    share = max(0.0, 1 - base_s / during_s)
    size = prompt * profile.kv.bytes_per_token
    benefit_s = streams * prefill_s * share
    capped_s = min(benefit_s, single_decode_s)
    idle_s, loaded_s = table.rows[0].seconds(size), table.seconds(size, streams, 1)
    return CostRow(
        prompt_tokens=prompt,
        streams=streams,
        measured=measured,
        kv_bytes=size,
        prefill_s=prefill_s,
        tpot_base_s=base_s,
        tpot_during_s=during_s,
        stall_share=share,
        benefit_stream_s=benefit_s,
        stall_per_stream_s=prefill_s * share,
        capped_benefit_s=capped_s,
        transfer_idle_s=idle_s,
        transfer_loaded_s=loaded_s,
        formula_idle_s=_formula(transport, size, 0),
        formula_loaded_s=_formula(transport, size, streams),
        gain_idle=benefit_s / idle_s,
        gain_loaded=benefit_s / loaded_s,
        break_even_streams=ceil(loaded_s / (prefill_s * share)) if share else 0,
        pays=benefit_s > loaded_s,
        pays_if_capped=capped_s > idle_s,
        understated=benefit_s / capped_s if capped_s else 0.0,
    )


def _interference(
    profile: HardwareProfile, points: Points | None, prompt: int, streams: int
) -> tuple[float, float, float, bool]:
    """(TPOT before, T_prefill, TPOT during, in seconds; True if all are measured)"""
    point = _measured(points, prompt, streams)
    if points is not None and point is not None:
        before = [each for each in points.decode if each.streams == streams]
        if before:
            nearest = min(before, key=lambda each: abs(each.context - points.background_context_tokens))
            return nearest.seconds, point.ttft_s, point.tpot_s, True
    context = points.background_context_tokens if points is not None else 1024
    if streams >= profile.max_num_batched_tokens:
        raise AnalysisError(f"{streams} streams leave a step no room for a prefill; fewer --streams")
    model = model_prefill(profile.timing, prompt, 0, streams, context, profile.max_num_batched_tokens)
    return profile.timing.decode(streams, streams * context), model.ttft_s, model.tpot_s, False


def _measured(points: Points | None, prompt: int, streams: int) -> InterferencePoint | None:
    for each in points.interference if points is not None else ():
        if (each.prefill, each.streams) == (prompt, streams) and not each.skip:
            return each
    return None


def _formula(transport: str, size_bytes: float, streams: int) -> float | None:
    if transport not in tuple(Transport):
        return None
    return transfer_formula(TransferJob(("P", "D"), Transport(transport), size_bytes, streams, 0))
