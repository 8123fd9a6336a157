"""Held-out families: choose a variant of a policy on all other families, report its standing on the one held out.

For every family of traces, the variant of the subject with the best standing on all *other* families is chosen, and its
standing on this family is reported. A variant takes the subject's place among the other policies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from bench.tournament.judge import METRICS, CellFigures, CellStanding, Standing
from bench.tournament.ranking import Rank, rank


class Fold(msgspec.Struct, frozen=True, kw_only=True):
    """One family held out."""

    family: str
    chosen: str
    """The variant with the best standing on the other families."""
    elsewhere: Rank
    """Its standing on the other families."""
    held_out: Rank
    """Its standing on this family."""


def in_place(figures: Sequence[CellFigures], field: Sequence[str], variant: str, subject: str) -> list[CellStanding]:
    """A variant's verdicts in every cell that has it, in the subject's place."""
    others = [label for label in field if label != subject]
    found = []
    for each in figures:
        if variant in each.labels:
            verdicts = each.judge([*others, variant])
            found.append(next(verdict for verdict in verdicts if verdict.label == variant))
    return found


def folds(verdicts: Mapping[str, Sequence[CellStanding]], families: Mapping[str, str]) -> list[Fold]:
    """Leave one family out: choose among variants on the others, report on it.

    Args:
        verdicts: Verdicts of every variant, over the same cells.
        families: Family of every trace.
    """
    names = sorted({families[verdict.cell.trace] for found in verdicts.values() for verdict in found})
    made = []
    for family in names if len(names) > 1 else []:
        elsewhere, here = {}, {}
        for variant, found in verdicts.items():
            elsewhere[variant] = rank([each for each in found if families[each.cell.trace] != family])
            here[variant] = rank([each for each in found if families[each.cell.trace] == family])
        chosen = min(sorted(elsewhere), key=lambda name: (-elsewhere[name].tied, elsewhere[name].overall, name))
        made.append(Fold(family=family, chosen=chosen, elsewhere=elsewhere[chosen], held_out=here[chosen]))
    return made


class Ablation(msgspec.Struct, frozen=True, kw_only=True):
    """The subject without one idea."""

    idea: str
    rank: Rank
    """Its standing in the subject's place."""
    ratio: dict[str, float]
    """Geometric mean over cells of its figure over the subject's, for each metric."""
    worse: dict[str, int]
    """Cells where it is worse than the subject with the whole interval."""
    better: dict[str, int]
    cells: int


def ablation(
    figures: Sequence[CellFigures], field: Sequence[str], idea: str, variant: str, subject: str
) -> Ablation | None:
    """Contribution of an idea; None if the variant was not simulated."""
    verdicts = in_place(figures, field, variant, subject)
    if not verdicts:
        return None
    against: dict[str, list[Standing]] = {
        metric: [
            each.compare(variant, subject, metric)
            for each in figures
            if variant in each.labels and subject in each.labels
        ]
        for metric in METRICS
    }
    return Ablation(
        idea=idea,
        rank=rank(verdicts),
        ratio={metric: _mean(found) for metric, found in against.items()},
        worse={metric: sum(each.low > 1 for each in found) for metric, found in against.items()},
        better={metric: sum(each.high < 1 for each in found) for metric, found in against.items()},
        cells=len(verdicts),
    )


def _mean(found: Sequence[Standing]) -> float:
    product = 1.0
    for each in found:
        product *= each.ratio ** (1 / len(found))
    return product
