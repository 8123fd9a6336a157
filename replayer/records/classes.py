"""Classes of requests by new tokens, with the thresholds of the router's defaults.

Imports no numpy: the command line has the classes as choices.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replayer.records.runs import RequestRecord

WARM_BELOW_TOKENS = 5_000
HEAVY_FROM_TOKENS = 20_000


class PlannedClass(StrEnum):
    """Class of a request by its new tokens in the trace: the same in every arm, whatever its caches held."""

    WARM = "WARM"
    MEDIUM = "MEDIUM"
    HEAVY = "HEAVY"

    @property
    def tokens(self) -> str:
        """Its new tokens in words."""
        return {
            PlannedClass.WARM: f"fewer than {WARM_BELOW_TOKENS:,} new tokens by the trace",
            PlannedClass.MEDIUM: f"{WARM_BELOW_TOKENS:,} to {HEAVY_FROM_TOKENS - 1:,} new tokens by the trace",
            PlannedClass.HEAVY: f"{HEAVY_FROM_TOKENS:,} new tokens or more by the trace",
        }[self]


CLASSES = tuple(each.value for each in PlannedClass)


def classify(new_tokens: int | None, warm_below: int = WARM_BELOW_TOKENS, heavy_from: int = HEAVY_FROM_TOKENS) -> str:
    """The router's classes: WARM below 5k new tokens, HEAVY from 20k; UNKNOWN without a report of the engine."""
    if new_tokens is None:
        return "UNKNOWN"
    if new_tokens < warm_below:
        return "WARM"
    return "MEDIUM" if new_tokens < heavy_from else "HEAVY"


def planned_class(record: RequestRecord) -> PlannedClass | None:
    """Class by the prompt tokens that do not repeat the session's previous prompt; None in older files."""
    if record.own_prefix_tokens is None:
        return None
    return PlannedClass(classify(record.input_length - record.own_prefix_tokens))
