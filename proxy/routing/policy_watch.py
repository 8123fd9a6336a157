"""Failures of policies and planners, and slow decisions: counted, reported in the log, and shown."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from policies.types import PolicyFailure, PolicyPart
from proxy.fleet.sliding_count import SlidingCount
from proxy.logs import LimitedLog

log = logging.getLogger("warmroute.policy")

RECENT_S = 300.0
"""Seconds for which a failure counts as current, and over which slow decisions are counted."""
MIN_SLOW = 5
"""Fewest slow decisions within ``RECENT_S`` that are a finding: one may be a pause of the machine."""
SLOW_SHARE = 0.01
"""Share of all decisions within ``RECENT_S`` from which on the slow ones are a finding."""


_INSTEAD = {PolicyPart.PLANNER: "the prefill was not offloaded", PolicyPart.ADMISSION: "it was sent at once"}
"""Effect of a failure on the request."""


@dataclass(slots=True)
class Trouble:
    """Failures, or slow decisions, of one policy or planner."""

    count: int = 0
    last_s: float = float("-inf")
    last: str = ""

    def recent(self, now_s: float) -> bool:
        """True if the last one was less than ``RECENT_S`` ago."""
        return now_s - self.last_s < RECENT_S

    def note(self, now_s: float, what: str) -> None:
        """Count one."""
        self.count, self.last_s, self.last = self.count + 1, now_s, what


class DecisionTimes:
    """Decisions of one policy within the last ``RECENT_S`` seconds, and the slow ones among them."""

    __slots__ = ("decided", "slow")

    def __init__(self) -> None:
        self.decided = SlidingCount(RECENT_S)
        self.slow = SlidingCount(RECENT_S)

    def lately(self, now_s: float) -> tuple[int, int]:
        """Slow decisions, and all."""
        return self.slow.total(now_s), self.decided.total(now_s)

    def too_slow(self, now_s: float) -> bool:
        """True if the slow ones are at least ``MIN_SLOW`` and at least ``SLOW_SHARE`` of all."""
        slow, decided = self.lately(now_s)
        return slow >= MIN_SLOW and slow >= SLOW_SHARE * decided


class PolicyWatch:
    """Counts of one router. Policies and planners are installed ones, so their names are a closed set."""

    def __init__(self) -> None:
        self.times: defaultdict[str, DecisionTimes] = defaultdict(DecisionTimes)
        """Recent decisions by the name of the policy."""
        self.failures: dict[tuple[PolicyPart, str], Trouble] = {}
        self.slow: dict[str, Trouble] = {}
        """Slow decisions by the name of the policy."""
        self._failure_log = LimitedLog(log)
        self._slow_log = LimitedLog(log, 60.0)

    def failed(self, failures: Sequence[PolicyFailure], decided_by: str) -> None:
        """Count failures; the first one of each policy and planner is logged with its calls."""
        for part, name, error, trace in failures:
            first = (part, name) not in self.failures
            self.failures.setdefault((part, name), Trouble()).note(time.monotonic(), error)
            instead = f"{decided_by} decided" if part is PolicyPart.POLICY else _INSTEAD[part]
            message = "the %s %r failed, for this request %s: %s"
            if first:
                log.warning(message + "; calls: %s", part.value, name, instead, error, " > ".join(trace))
            else:
                self._failure_log.warning(name, message, part.value, name, instead, error)

    def was_slow(self, policy: str, seconds: float, now_s: float) -> None:
        """Count a slow decision, which is in ``times[policy].decided`` too."""
        self.times[policy].slow.add(now_s)
        self.slow.setdefault(policy, Trouble()).note(time.monotonic(), f"{seconds * 1e3:.0f} ms")
        self._slow_log.warning(
            policy,
            "a routing decision of %r took %.0f ms (limits.slow_decision_s); no other request is served meanwhile",
            policy,
            seconds * 1e3,
        )

    def as_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {
            "failures": [
                {"part": part.value, "name": name, "count": trouble.count, "last": trouble.last}
                for (part, name), trouble in self.failures.items()
            ],
            "slow_decisions": {name: trouble.count for name, trouble in self.slow.items()},
        }
