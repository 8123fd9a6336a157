"""Results over staleness: a curve for each policy, and the tables of docs/staleness.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from bench.staleness.cells import POLICIES, StalenessReport, StaleVariant, variants_of

_DOCS = Path(__file__).parents[2] / "docs"
RESULTS = _DOCS / "results" / "staleness.json"
PAGE = _DOCS / "staleness.md"
_T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantiles of Student's t for this many seeds."""


def mean(figures: Iterable[float]) -> float:
    """Mean over seeds."""
    return float(np.mean(list(figures)))


def change(after: Sequence[float], before: Sequence[float]) -> tuple[float, float, float]:
    """Factor between two figures that have the same seeds, and its 95 % interval (t on the logarithms, paired)."""
    logs = np.log(np.asarray(after) / np.asarray(before))
    middle = float(logs.mean())
    half = _T_95.get(len(logs), math.inf) * float(logs.std(ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


class Curve:
    """Figures of one policy over staleness.

    Args:
        report: all figures.
        policy: its name.
        variant: of the replicas.
    """

    def __init__(self, report: StalenessReport, policy: str, variant: StaleVariant) -> None:
        self.policy, self.variant = policy, variant
        own = sorted((each for each in report.figures if each.cell.policy == policy), key=lambda each: each.cell.seed)
        self.alone = [each for each in own if each.cell.replicas == 1]
        several = [each for each in own if each.cell.replicas > 1 and (each.cell.events, each.cell.parts) == variant]
        self.delays_s = sorted({each.cell.staleness_s for each in several})
        self.at = {delay_s: [each for each in several if each.cell.staleness_s == delay_s] for delay_s in self.delays_s}

    @property
    def title(self) -> str:
        """First cell of its row, in Markdown."""
        return f"`{self.policy}`{self.variant.words}"

    @property
    def seeds(self) -> int:
        """Number of seeds at every age."""
        return min(len(each) for each in self.at.values())

    def factor(self, delay_s: float, figure: str) -> tuple[float, float, float]:
        """A figure at a staleness over that behind one replica, with its interval."""
        seeds = {each.cell.seed for each in self.at[delay_s]}
        before = [getattr(each, figure) for each in self.alone if each.cell.seed in seeds]
        return change([getattr(each, figure) for each in self.at[delay_s]], before)


def curves(report: StalenessReport) -> list[Curve]:
    """All curves with figures, by policy in the order of ``POLICIES``."""
    made = [Curve(report, policy, variant) for policy in POLICIES for variant in variants_of(policy)]
    return [curve for curve in made if curve.alone and curve.delays_s]


def table(report: StalenessReport) -> list[str]:
    """Markdown: TTFT p90, mean E2E and hit rate behind one replica and at every staleness, means over seeds."""
    made = curves(report)
    delays = sorted({delay_s for curve in made for delay_s in curve.delays_s})
    heads = " | ".join(f"{delay_s:g} s" for delay_s in delays)
    lines = [f"| | policy | seeds | 1 replica | {heads} |", f"| --- | --- |{' ---: |' * (len(delays) + 2)}"]
    for title, figure, unit in (
        ("TTFT p90, s", "ttft_p90_s", "{:.1f}"),
        ("mean E2E, s", "e2e_mean_s", "{:.1f}"),
        ("hit rate", "hit_rate", "{:.1%}"),
    ):
        for curve in made:
            groups = [curve.alone, *[curve.at.get(delay_s, []) for delay_s in delays]]
            row = [unit.format(mean(getattr(each, figure) for each in group)) if group else "" for group in groups]
            lines.append(f"| {title} | {curve.title} | {curve.seeds} | {' | '.join(row)} |")
    return lines


def factors(report: StalenessReport, figure: str = "e2e_mean_s") -> list[str]:
    """Markdown: a figure over that of the same policy behind one replica, with 95 % intervals where there are seeds."""
    made = curves(report)
    delays = sorted({delay_s for curve in made for delay_s in curve.delays_s})
    heads = " | ".join(f"{delay_s:g} s" for delay_s in delays)
    lines = [f"| policy | seeds | {heads} |", f"| --- |{' ---: |' * (len(delays) + 1)}"]
    for curve in made:
        row = []
        for delay_s in delays:
            middle, low, high = curve.factor(delay_s, figure) if delay_s in curve.at else (0.0, 0.0, 0.0)
            interval = f" [{low:.2f}, {high:.2f}]" if low < high else ""
            row.append(f"{middle:.2f}{interval}" if middle else "")
        lines.append(f"| {curve.title} | {curve.seeds} | {' | '.join(row)} |")
    return lines


def read(path: Path = RESULTS) -> StalenessReport:
    """Read a results file. Raises OSError, msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=StalenessReport)


def written(page: str, report: StalenessReport) -> str:
    """The page with the report's tables in place of those between its markers."""
    for name, lines in (("factors", factors(report)), ("all figures", table(report))):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        page = "".join((before, begin, "\n", "\n".join(lines), "\n", end, rest.partition(end)[2]))
    return page
