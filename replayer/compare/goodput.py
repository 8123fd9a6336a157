"""Goodput: requests that meet every objective, as a share of all requests and per second.

A request counts when it succeeded and met *all* objectives that are set; one that failed, or that was never sent,
does not (Zhong et al., "DistServe", OSDI 2024, where goodput is the rate of requests that attain their objectives;
the benchmarks of vLLM and GenAI-Perf count the same way).

The TTFT objective may grow with the length of the prompt, ``a + b x tokens``, because the prefill that it waits for
does: one limit for all lengths is either meaningless for short prompts or unreachable for long ones. Objectives of
this form are in use as intercept and slope (for example 4 s + 1 s for each 8,000 prompt tokens, aituner), and as a
multiple of the unloaded latency of the same request (Qin et al., "Mooncake", FAST 2025: ten times for TTFT).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replayer.compare.statistics.bootstrap import BoolArray, FloatArray


class SloTokens(StrEnum):
    """Which tokens the length-scaled TTFT objective counts."""

    PROMPT = "prompt"
    NEW = "new"
    """Tokens that the client adds to the turn before, by the trace (`replayer.compare.pairing`): equal in both arms.
    Tokens that an engine had to compute would excuse an arm's own cache misses."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives of one request; None where there is none. Times in engine seconds."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    ttft_base_s: float | None = None
    """Length-scaled TTFT: the part that does not grow (a)."""
    ttft_per_1k_tokens_s: float | None = None
    """Length-scaled TTFT: what each 1,000 tokens add (1000 b)."""
    tokens: SloTokens = SloTokens.PROMPT

    @property
    def fixed(self) -> bool:
        """True if any objective is the same for all requests."""
        return any(limit is not None for limit in (self.ttft_s, self.tpot_s, self.e2e_s))

    @property
    def scaled(self) -> bool:
        """True if TTFT is also judged by length."""
        return self.ttft_base_s is not None or self.ttft_per_1k_tokens_s is not None

    def describe_fixed(self) -> str:
        """The fixed objectives in words."""
        named = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("E2E", self.e2e_s))
        return ", ".join(f"{name} ≤ {limit:g} s" for name, limit in named if limit is not None)

    def describe_scaled(self) -> str:
        """The objectives of which TTFT grows with length, in words."""
        base_s, per_1k_s = self.ttft_base_s or 0.0, self.ttft_per_1k_tokens_s or 0.0
        scaled = f"TTFT ≤ {base_s:g} s + {per_1k_s:g} s per 1,000 {self.tokens.value} tokens"
        others = Slo(tpot_s=self.tpot_s, e2e_s=self.e2e_s).describe_fixed()
        return f"{scaled}, {others}" if others else scaled

    def check(self) -> None:
        """Refuse limits that cannot be meant.

        Raises:
            ValueError: a limit is not above 0 (base and slope may be 0, but not both).
        """
        for name, limit in (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("e2e", self.e2e_s)):
            if limit is not None and not limit > 0:
                raise ValueError(f"--slo-{name}-s must be above 0, not {limit:g}")
        if self.scaled:
            base_s, per_1k_s = self.ttft_base_s or 0.0, self.ttft_per_1k_tokens_s or 0.0
            if base_s < 0 or per_1k_s < 0 or base_s + per_1k_s == 0:
                raise ValueError("--slo-ttft-base-s and --slo-ttft-per-1k-tokens-s must not be below 0, nor both 0")


def meets_fixed(slo: Slo, ok: BoolArray, ttft_s: FloatArray, tpot_s: FloatArray, e2e_s: FloatArray) -> BoolArray:
    """Which requests met all fixed objectives.

    Args:
        slo: the objectives.
        ok: shape (N,), whether the request succeeded.
        ttft_s: shape (N,), NaN where unknown (then not met).
        tpot_s: shape (N,), NaN for an answer of one token (then met: there is no gap to be late in).
        e2e_s: shape (N,), NaN where unknown (then not met).
    """
    met = ok.copy()
    if slo.ttft_s is not None:
        met &= ttft_s <= slo.ttft_s
    return met & _meets_rest(slo, tpot_s, e2e_s)


def meets_scaled(
    slo: Slo, ok: BoolArray, ttft_s: FloatArray, tpot_s: FloatArray, e2e_s: FloatArray, tokens: FloatArray
) -> BoolArray:
    """Which requests met the length-scaled TTFT objective and the fixed ones of TPOT and E2E; see `meets_fixed`.

    Args:
        tokens: shape (N,), the tokens that `Slo.tokens` names.
    """
    limit_s = (slo.ttft_base_s or 0.0) + (slo.ttft_per_1k_tokens_s or 0.0) * tokens / 1000
    import numpy as np  # here, not above: the command line reads its options from this module without numpy

    return np.asarray(ok & (ttft_s <= limit_s) & _meets_rest(slo, tpot_s, e2e_s))


def _meets_rest(slo: Slo, tpot_s: FloatArray, e2e_s: FloatArray) -> BoolArray:
    import numpy as np

    met = np.ones(tpot_s.shape, dtype=np.bool_)
    if slo.tpot_s is not None:
        met &= ~(tpot_s > slo.tpot_s)
    if slo.e2e_s is not None:
        met &= e2e_s <= slo.e2e_s
    return met
