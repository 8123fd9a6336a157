"""Failures of policies and planners, and slow decisions: counted, reported in the log, and shown."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from policies.types import PolicyFailure, PolicyPart
from proxy.logs import LimitedLog

log = logging.getLogger("warmroute.policy")

RECENT_S = 300.0
"""Seconds for which a failure or slow decision counts as current."""


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


class PolicyWatch:
    """Counts of one router. Policies and planners are installed ones, so their names are a closed set."""

    def __init__(self) -> None:
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

    def was_slow(self, policy: str, seconds: float) -> None:
        """Count a slow decision."""
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
