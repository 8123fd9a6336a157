"""Offloaded prefills: how many and why not, what each leg took against its prediction, what became of the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replayer.compare.statistics.tests import FloatArray
from replayer.records.breakdown_rows import BreakdownRow
from replayer.records.runs import RequestRecord
from replayer.records.summary import Quantiles, quantiles

FALL_BACK = "fell_back"
"""Prefix of the reasons of hand-offs that failed."""
LEGS = {
    "prefill": "P leg: prefill on P, until its answer",
    "transfer": "D leg: pull and first token on D",
    "first_token": "co-located: until the first token",
}


@dataclass(frozen=True)
class LegSummary:
    """One kind of leg; engine seconds."""

    leg: str
    meaning: str
    predicted_s: FloatArray
    actual_s: FloatArray

    @property
    def predicted(self) -> Quantiles:
        """Of the predictions."""
        return quantiles(self.predicted_s.tolist())

    @property
    def actual(self) -> Quantiles:
        """Of what it took."""
        return quantiles(self.actual_s.tolist())

    @property
    def ratio(self) -> Quantiles:
        """Actual over predicted: 1 is right, 2 took twice as long."""
        sensible = self.predicted_s > 0
        return quantiles((self.actual_s[sensible] / self.predicted_s[sensible]).tolist())


@dataclass(frozen=True)
class Offloads:
    """An arm's offloads."""

    requests: int
    offloaded: int
    """Requests whose prompt another instance computed."""
    reasons: list[tuple[str, int]]
    """The planner's reasons, most frequent first; fall-backs are in `fallbacks`."""
    fallbacks: list[tuple[str, int]]
    legs: list[LegSummary]
    ttft_offloaded_s: Quantiles
    ttft_colocated_s: Quantiles
    from_rows: bool
    """False without the proxy's rows: then there are neither reasons nor legs."""

    @property
    def tried(self) -> bool:
        """True if any offload was tried: else there is nothing to show."""
        return bool(self.offloaded or self.fallbacks)


def offloads(records: Sequence[RequestRecord], rows: Sequence[BreakdownRow], clock_scale: float) -> Offloads:
    """The offloads of one arm.

    Args:
        records: of all its runs.
        rows: the proxy's, times in wall seconds; empty where they were not collected.
        clock_scale: of the runs, which makes engine seconds of wall seconds.
    """
    counts = Counter(row.offload_reason for row in rows if row.offload_reason)
    by_leg: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, leg in row.legs.items():
            by_leg.setdefault(name, []).append((leg.predicted_s, leg.actual_s))
    good = [record for record in records if record.ok]
    return Offloads(
        requests=len(records),
        offloaded=sum(record.prefill_instance is not None for record in records),
        reasons=[(name, count) for name, count in counts.most_common() if not name.startswith(FALL_BACK)],
        fallbacks=[(name, count) for name, count in counts.most_common() if name.startswith(FALL_BACK)],
        legs=[_leg(name, by_leg[name], clock_scale) for name in sorted(by_leg, key=_place)],
        ttft_offloaded_s=quantiles(record.ttft_s for record in good if record.prefill_instance is not None),
        ttft_colocated_s=quantiles(record.ttft_s for record in good if record.prefill_instance is None),
        from_rows=bool(rows),
    )


def _leg(name: str, times: Sequence[tuple[float, float]], clock_scale: float) -> LegSummary:
    predicted, actual = np.array(times, dtype=np.float64).T * clock_scale
    return LegSummary(name, LEGS.get(name, name), predicted, actual)


def _place(name: str) -> tuple[int, str]:
    names = list(LEGS)
    return (names.index(name) if name in names else len(names), name)
