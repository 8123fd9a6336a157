"""Order of the prefills that wait in an engine: each by a due time, which is much later for long ones.

vLLM with ``--scheduling-policy priority`` computes waiting prompts in the order of their requests' ``priority``. Here
that is the due time: the arrival plus ``slowdown`` times the square of the prefill's own seconds (`wait_s`). Short
prefills overtake long ones; those that arrive later than that overtake none, so nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from policies.costs.formulas import PrefillModel
from policies.types import QueuedPrefill
from policies.views import KnownInstance

SLOWDOWN = 20.0
"""Seconds of waiting per second of its own after which a prefill is not overtaken any more."""


class PrefillOrder(NamedTuple):
    """The order at the time of one decision."""

    instances: Mapping[str, KnownInstance]
    model: PrefillModel
    now_s: float
    """Monotonic or virtual time."""
    slowdown: float
    """0: the engines compute in order of arrival."""

    def queued(self, instance: str, new_tokens: int, cached_tokens: int) -> QueuedPrefill | None:
        """The place of a prefill on an instance; None where its engine computes in order of arrival."""
        if not self.slowdown or not self.instances[instance].ordered:
            return None
        seconds = self.model.seconds(new_tokens, cached_tokens) if new_tokens else 0.0
        return QueuedPrefill(self.now_s + wait_s(seconds, self.slowdown), seconds)


def wait_s(seconds: float, slowdown: float) -> float:
    """Seconds for which later requests may overtake a prefill of ``seconds``."""
    return slowdown * seconds * seconds


def overtaken_share(queue: Collection[QueuedPrefill], due_s: float) -> float:
    """Share, by time, of the queued prefills that one due at ``due_s`` overtakes.

    The one that is due first is being computed: it cannot be overtaken, and half of it is left. O(n).
    """
    behind = [each for each in queue if each.due_s > due_s]
    if not behind:
        return 0.0
    seconds = sum([each.seconds for each in behind])
    first_s = min(queue).seconds
    if len(behind) == len(queue):
        seconds -= first_s
    return seconds / (sum([each.seconds for each in queue]) - first_s / 2) if seconds else 0.0
