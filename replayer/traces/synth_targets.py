"""Published workload that synthetic traces imitate, and the comparison of a trace with it.

Targets: statistics of a two-hour production window of an agentic coder (GLM-5.1), as published by the operators of that
service; they are not measurements of this project. Some contradict each other; the table notes it:

- The class mix (WARM 23, MEDIUM 25, HEAVY 51 %) comes from a sample of 200 requests. It agrees with the distribution
  of *prompt lengths*, that is with cold caches. At an APC of 71 % the mean prompt has 9.7k new tokens, but 51 % of
  requests above 20k and 25 % above 5k would already make 11.5k: the two cannot be of one condition.
- Hits across sessions: 9 % of 71 % are 6.4 % of tokens; the source also says 4.8 %. Generated traces follow the 9 %.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from replayer.records.classes import CLASSES, HEAVY_FROM_TOKENS, WARM_BELOW_TOKENS, classify
from replayer.traces.ideal import cached_tokens, ideal
from replayer.traces.trace import Trace, TraceRequest

INPUT_MEAN_TOKENS = 33_600
INPUT_QUANTILES = {0.50: 20_000, 0.90: 88_000, 0.99: 125_000}
OUTPUT_MEAN_TOKENS = 445
OUTPUT_P50_TOKENS = 80
APC = 0.71
INTRA_SESSION_SHARE = 0.91
CROSS_SESSION_SHARE = 0.048
GAP_P50_REQUESTS, GAP_P90_REQUESTS = 2, 12
CLASS_MIX = {"WARM": 0.23, "MEDIUM": 0.25, "HEAVY": 0.51}


class TargetComparison(msgspec.Struct, frozen=True):
    """Target and value of one property of a trace."""

    name: str
    target: float
    value: float
    is_share: bool = False
    note: str = ""

    @property
    def deviation(self) -> float:
        """Relative for quantities, absolute (in points / 100) for shares."""
        return self.value - self.target if self.is_share else self.value / self.target - 1


def turn_gaps(requests: Sequence[TraceRequest]) -> list[int]:
    """Distance of every follow-up turn from the turn before it, in requests (1: the next)."""
    last: dict[str, int] = {}
    gaps = []
    for index, request in enumerate(requests):
        before = last.get(request.session_id)
        if before is not None:
            gaps.append(index - before)
        last[request.session_id] = index
    return gaps


def class_mix(new_tokens: Sequence[int], length_scale: float = 1.0) -> dict[str, float]:
    """Shares of WARM, MEDIUM and HEAVY, with the bounds scaled as the lengths are."""
    warm, heavy = round(WARM_BELOW_TOKENS * length_scale), round(HEAVY_FROM_TOKENS * length_scale)
    names = [classify(tokens, warm, heavy) for tokens in new_tokens]
    return {name: names.count(name) / max(len(names), 1) for name in CLASSES}


def compare_with_targets(trace: Trace, length_scale: float = 1.0, gap_scale: float = 1.0) -> list[TargetComparison]:
    """Compare every target with a trace whose lengths and gaps are scaled by these factors."""
    inputs = np.array([request.input_length for request in trace.requests], dtype=float)
    outputs = np.array([request.output_length for request in trace.requests], dtype=float)
    figures = ideal(trace)
    shared = cached_tokens(trace.requests, trace.block_tokens, lambda _index, _request: 0)
    new = [int(length) - hits for length, hits in zip(inputs, shared, strict=True)]
    gaps = turn_gaps(trace.requests) or [0]
    cold, warm = class_mix(inputs.astype(int).tolist(), length_scale), class_mix(new, length_scale)
    rows = [TargetComparison("input tokens, mean", INPUT_MEAN_TOKENS * length_scale, float(inputs.mean()))]
    rows += [
        TargetComparison(f"input tokens, p{share * 100:.0f}", tokens * length_scale, float(np.quantile(inputs, share)))
        for share, tokens in INPUT_QUANTILES.items()
    ]
    rows += [
        TargetComparison("output tokens, mean", OUTPUT_MEAN_TOKENS * length_scale, float(outputs.mean())),
        TargetComparison("output tokens, p50", OUTPUT_P50_TOKENS * length_scale, float(np.median(outputs))),
        TargetComparison("APC, one infinite cache", APC, figures.shared_apc, True),
        TargetComparison("intra-session share of hits", INTRA_SESSION_SHARE, figures.intra_session_share, True),
        TargetComparison(
            "cross-session hits, share of tokens",
            CROSS_SESSION_SHARE,
            figures.shared_apc * (1 - figures.intra_session_share),
            True,
            "conflicts with the two rows above, which make it 0.064",
        ),
        TargetComparison("gap between turns, requests, p50", GAP_P50_REQUESTS * gap_scale, float(np.median(gaps))),
        TargetComparison(
            "gap between turns, requests, p90", GAP_P90_REQUESTS * gap_scale, float(np.quantile(gaps, 0.9))
        ),
    ]
    for name, share in CLASS_MIX.items():
        note = f"cold caches; {warm[name]:.2f} with an infinite cache, where the mix contradicts the APC"
        rows.append(TargetComparison(f"class mix, {name}", share, cold[name], True, note))
    return rows
