"""The reduced measurements of a calibration, as far as an engine's limits allow them."""

from __future__ import annotations

import msgspec

from bench.instruments.engine import InstrumentError
from bench.instruments.interference import InterferencePlan
from bench.instruments.steps import StepsPlan
from bench.instruments.transfer import TransferPlan

_NEW = (64, 256, 1_024, 4_096, 8_192, 16_384, 32_768, 65_536)
_AFTER_CACHED = (
    *((64, 8_192), (2_048, 8_192), (512, 32_768), (8_192, 32_768)),
    *((512, 65_536), (8_192, 65_536), (512, 131_072), (8_192, 131_072)),
)
"""(new, cached) tokens of later turns, also of sessions that are longer than the longest cold prompt."""
_DECODES = (
    *((1, 1_024), (2, 1_024), (4, 1_024), (8, 1_024), (16, 1_024), (32, 1_024)),
    *((1, 16_384), (4, 16_384), (16, 16_384), (1, 65_536), (4, 65_536)),
)
_AMONG = (4, 16)
_PREFILLS = (1_024, 8_192, 32_768)
_MOVED = (1_024, 4_096, 16_384, 65_536)
_LOADS = (0, 4, 12)
_AT_ONCE = (2, 4)
_POOL_SHARE = 0.8
"""Share of the KV pool that a measurement may fill: no request must wait for blocks or be preempted."""
_FEWEST = 3


class EngineLimits(msgspec.Struct, kw_only=True, frozen=True):
    """Limits of one engine and of the calibration's time."""

    max_model_len: int
    pool_tokens: int
    max_num_seqs: int
    largest_tokens: int = 65_536
    """Longest prompt that is measured cold; a smaller one scales every size down. Cached prefixes are up to twice
    as long."""


class CalibrationPlan(msgspec.Struct, kw_only=True):
    """Everything that a calibration measures on one engine."""

    steps: StepsPlan
    interference: InterferencePlan
    transfer: TransferPlan
    """Between the first engine and the second; unused without a second."""
    sharing: TransferPlan
    """The same, several hand-offs at a time."""


def reduced(limits: EngineLimits, repeats: int) -> CalibrationPlan:
    """The sizes that fit the limits. Engines with short prompts get the same numbers of points at smaller sizes.

    Raises:
        InstrumentError: too few sizes are left to fit anything.
    """
    room = int(limits.pool_tokens * _POOL_SHARE)
    longest = min(limits.max_model_len - 1, room, limits.largest_tokens)
    scale = min(1.0, longest / _NEW[-1])

    def scaled(tokens: int) -> int:
        return max(16, int(tokens * scale))

    prefills = list(dict.fromkeys((scaled(new), 0) for new in _NEW))
    deepest = min(limits.max_model_len - 1, room)
    prefills += [
        pair for pair in ((scaled(new), scaled(cached)) for new, cached in _AFTER_CACHED) if sum(pair) <= deepest
    ]
    decodes = [
        (streams, context)
        for streams, context in ((streams, scaled(context)) for streams, context in _DECODES)
        if streams <= limits.max_num_seqs and streams * (context + 256) <= room
    ]
    among = [streams for streams in _AMONG if streams < limits.max_num_seqs] or [max(1, limits.max_num_seqs - 1)]
    if len(prefills) < _FEWEST or len(decodes) < _FEWEST:
        raise InstrumentError(
            f"prompts of {longest:,} tokens and {limits.max_num_seqs} sequences are too few to calibrate with: raise "
            "max_model_len, the KV pool or --largest-tokens"
        )
    context = scaled(1_024)
    output = max(64, min(8_192, limits.max_model_len - context - 1, room // (max(among) + 1) - context))
    return CalibrationPlan(
        steps=StepsPlan(
            prefills=tuple(prefills),
            decodes=tuple(dict.fromkeys(decodes)),
            repeats=repeats,
            stream_tokens=min(8_192, limits.max_model_len - 1 - max(context for _, context in decodes)),
        ),
        interference=InterferencePlan(
            streams=tuple(among),
            prefill_tokens=tuple(scaled(tokens) for tokens in _PREFILLS),
            repeats=repeats,
            context_tokens=context,
            stream_tokens=output,
        ),
        transfer=_transfers(limits, scale, repeats, _MOVED, background=_LOADS),
        sharing=_transfers(limits, scale, repeats, _MOVED[2:3], concurrent=_AT_ONCE),
    )


def _transfers(
    limits: EngineLimits,
    scale: float,
    repeats: int,
    tokens: tuple[int, ...],
    concurrent: tuple[int, ...] = (1,),
    background: tuple[int, ...] = (0,),
) -> TransferPlan:
    """Hand-offs of whole blocks, with the background that the engine has room for."""
    output = max(64, min(8_192, limits.max_model_len // 2, limits.pool_tokens // (4 * max(_LOADS))))
    return TransferPlan(
        tokens=tuple(dict.fromkeys(max(128, int(each * scale) // 128 * 128) for each in tokens)),
        concurrent=concurrent,
        background=tuple(each for each in background if each < limits.max_num_seqs),
        background_tokens=max(16, int(1_024 * scale)),
        background_output=output,
        repeats=repeats,
    )
