"""Verdict of one candidate: its cells of the matrix, and everything in one sentence.

A cell repeats the verdict that `replayer.compare.effects.judge` reached and adds no judgement of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replayer.compare.statistics.tests import Effect, Verdict
from replayer.records.readable import format_factor, format_percent, format_points, format_seconds

RAISED, LOWERED, SAME, UNJUDGED = "▲", "▼", "≈", "–"


@dataclass(frozen=True, slots=True)
class VerdictCell:
    """One metric of one candidate, ready to print."""

    metric: str
    symbol: str
    """``▲`` or ``▼``: the direction of a difference that passed the test; ``≈``; ``–`` where nothing is judged."""
    change: str
    """Relative change in %, without the unit; signed where ``symbol`` does not show the direction."""
    word: str
    """"better", "worse", or empty."""
    interval: str
    """95 % interval in %, or "not judged"."""
    verdict: str
    note: str
    """Reason why the metric is not judged, or that the change is below the noise floor."""

    @property
    def head(self) -> str:
        """Symbol, change and word: "▼ 12 better", "≈ +1.3"."""
        return " ".join(part for part in (self.symbol, self.change, self.word) if part)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


def cell_of(effect: Effect) -> VerdictCell:
    """The cell of one effect."""
    note = effect.note or ("below the noise floor" if effect.below_floor else "")
    if effect.verdict is Verdict.NOT_JUDGED:
        symbol, word, interval = UNJUDGED, "", "not judged"
    else:
        symbol, word = SAME, ""
        interval = f"{format_points(effect.low)} … {format_points(effect.high)}"
    change = format_points(effect.change)
    if effect.verdict in (Verdict.BETTER, Verdict.WORSE):
        symbol, word = RAISED if effect.change > 0 else LOWERED, effect.verdict.value
        change = format_points(abs(effect.change), signed=False)
    return VerdictCell(effect.metric, symbol, change, word, interval, effect.verdict.value, note)


def baseline_value(effect: Effect) -> str:
    """The baseline's own value with its unit."""
    if effect.unit == "factor":
        return format_factor(effect.baseline)
    return format_seconds(effect.baseline) if effect.unit == "s" else format_percent(effect.baseline)


def verdict_sentence(baseline: str, candidate: str, effects: Sequence[Effect], *, noise_known: bool = True) -> str:
    """Metrics that are better and worse by how much, those not distinguishable, and those not judged.

    With ``noise_known`` False (no replicates), a claim states that run-to-run noise was not measured.

    "lmetric against linear: 3–9 % better on E2E p50, 1–2 % worse on TPOT p90; TTFT p90 not distinguishable."
    """
    claims = [
        f"{_extent(effect)} {verdict.value} on {effect.metric}"
        for verdict in (Verdict.BETTER, Verdict.WORSE)
        for effect in effects
        if effect.verdict is verdict
    ]
    same = [effect.metric for effect in effects if effect.verdict is Verdict.NOT_DISTINGUISHABLE]
    unjudged = [effect.metric for effect in effects if effect.verdict is Verdict.NOT_JUDGED]
    caveat = "" if noise_known else " (by one run of each; how much runs differ by chance was not measured)"
    parts = [", ".join(claims) + caveat] if claims else []
    if same and claims:
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
