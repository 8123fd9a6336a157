"""Order of the prefills that wait in an engine: each by a due time, which is much later for long ones.

vLLM with ``--scheduling-policy priority`` computes waiting prompts in the order of their requests' ``priority``. Here
that is the due time: the arrival plus ``slowdown`` times the square of the prefill's own seconds (`wait_s`). Short
prefills overtake long ones; those that arrive later than that overtake none, so nothing waits without end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.costs.formulas import PrefillModel
from policies.types import QueuedPrefill

SLOWDOWN = 10.0
"""Seconds for which a prefill of one second may be overtaken; 40 for one of two seconds."""
FIRST_S = -1e12
"""Due time of a request that cannot have a ``priority``: engines take it as 0, so it goes before all that have one.

Finite, since explanations have it in JSON."""


class PrefillOrder(NamedTuple):
    """The order at the time of one decision."""

    model: PrefillModel
    now_s: float
    """Monotonic or virtual time."""
    slowdown: float
    """0: the engines compute in order of arrival."""

    has_priority: bool = True
    """Of the request (`RequestView.has_priority`)."""

    def queued(self, new_tokens: int, cached_tokens: int, *, ordered: bool) -> QueuedPrefill | None:
        """The place of a prefill; None where its engine is not ``ordered``: it computes in order of arrival."""
        if not ordered or not self.slowdown:
            return None
        seconds = self.model.seconds(new_tokens, cached_tokens) if new_tokens else 0.0
        return QueuedPrefill(due_s(self.now_s, seconds, self.slowdown, self.has_priority), seconds)


def wait_s(seconds: float, slowdown: float) -> float:
    """Seconds for which later requests may overtake a prefill of ``seconds``."""
    return slowdown * seconds * seconds


def due_s(now_s: float, seconds: float, slowdown: float, has_priority: bool) -> float:
    """Due time of a prefill of ``seconds`` that arrives at ``now_s``."""
    return now_s + wait_s(seconds, slowdown) if has_priority else FIRST_S


def overtaken_share(queue: Sequence[QueuedPrefill], due_s: float) -> float:
    """Share, by time, of the queued prefills that one due at ``due_s`` overtakes.

    The first of ``queue`` is being computed: it cannot be overtaken, and half of it is left. O(n).
    """
    overtaken = sum([each.seconds for each in queue[1:] if each.due_s > due_s])
    return overtaken / (sum([each.seconds for each in queue]) - queue[0].seconds / 2) if overtaken else 0.0
