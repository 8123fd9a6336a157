"""The verdict in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from replayer.compare.statistics.tests import Effect, Verdict


def verdict_sentence(baseline: str, candidate: str, effects: Sequence[Effect], *, noise_known: bool = True) -> str:
    """What is better and worse by how much, what cannot be told apart, what was not judged.

    Where nothing is known of how runs of the same thing differ, a claim says so itself.

    "lmetric against linear: 3–9 % better on E2E p50, 1–2 % worse on TPOT p90; TTFT p90 not distinguishable."
    """
    told = [
        f"{_extent(effect)} {verdict.value} on {effect.metric}"
        for verdict in (Verdict.BETTER, Verdict.WORSE)
        for effect in effects
        if effect.verdict is verdict
    ]
    same = [effect.metric for effect in effects if effect.verdict is Verdict.NOT_DISTINGUISHABLE]
    unjudged = [effect.metric for effect in effects if effect.verdict is Verdict.NOT_JUDGED]
    caveat = "" if noise_known else " (by one run of each; how much runs differ by chance was not measured)"
    parts = [", ".join(told) + caveat] if told else []
    if same and told:
        parts.append(f"{', '.join(same)} not distinguishable")
    elif same:
        parts.append(
            "not distinguishable on any metric" if not unjudged else f"not distinguishable ({', '.join(same)})"
        )
    if unjudged:
        parts.append(f"not judged: {', '.join(unjudged)}")
    return f"{candidate} against {baseline}: {'; '.join(parts)}."


def _extent(effect: Effect) -> str:
    """The interval's two ends as "3–9 %"; where it passes zero, the near end is 0."""
    low, high = sorted((abs(effect.low) * 100, abs(effect.high) * 100))
    if effect.low * effect.high < 0:
        low = 0.0
        high = abs(effect.low if effect.change < 0 else effect.high) * 100
    near, far = (f"{bound:.0f}" if bound >= 1 or bound == 0 else f"{bound:.1f}" for bound in (low, high))
    return f"{near} %" if near == far else f"{near}–{far} %"
