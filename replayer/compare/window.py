"""The compared part of a run: the start with cold caches and the tail of a draining fleet are left out by rule.

The rule looks at the plan only, never at an outcome, so that it is the same for every run of every arm: a request's
*planned time* is its time in the trace, from the first request on, divided by ``time_scale``. (When a later turn was
really due depends on how fast the turn before it was answered, hence on the arm.)

The automatic rule:

- cold start: everything planned before `COLD_SHARE` of the plan's prompt tokens was due. A fleet starts with empty
  caches, so its first requests miss whatever the policy does;
- drain: everything planned after the last session arrived, when nothing new comes and the load only falls, but never
  more than the last `DRAIN_SHARE` of the requests (where all sessions arrive at once, nearly everything comes after).

Where only one class of requests is compared (`in_class`), the window is still that of the whole plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replayer.compare.statistics.bootstrap import BoolArray, FloatArray, IntArray
from replayer.records.classes import PlannedClass
from replayer.records.counted import counted

COLD_SHARE = 0.1
"""Share of the plan's prompt tokens that fill the caches before anything counts."""
DRAIN_SHARE = 0.1
"""Largest share of the requests that may be left out at the end."""


@dataclass(frozen=True, slots=True)
class Window:
    """The planned times that count: from ``first_s`` to ``last_s``, both included, in engine seconds."""

    first_s: float
    last_s: float
    span_s: float
    """Planned time of the last request."""
    kept: int
    cold: int
    """Requests left out at the start."""
    drain: int
    """Requests left out at the end."""
    automatic: bool
    """True if the automatic rule set either end."""

    def describe(self) -> str:
        """One sentence on what was left out; empty when nothing was."""
        if not self.cold and not self.drain:
            return ""
        parts = []
        if self.cold:
            parts.append(f"{counted(self.cold, 'request')} planned in the first {self.first_s:.1f} s")
        if self.drain:
            parts.append(f"{self.drain} planned in the last {self.span_s - self.last_s:.1f} s")
        rule = "cold start and drain, by the plan" if self.automatic else "as asked"
        return f"left out of every arm ({rule}): {' and '.join(parts)}; --keep-all keeps them"


def planned_times(trace_timestamps_s: FloatArray, time_scale: float) -> FloatArray:
    """Planned times in engine seconds from the first request on: shape (N,) in, shape (N,) out."""
    if trace_timestamps_s.size == 0:
        return trace_timestamps_s
    return np.asarray((trace_timestamps_s - trace_timestamps_s.min()) / time_scale, dtype=np.float64)


def choose_window(
    planned_s: FloatArray,
    prompt_tokens: FloatArray,
    session_of: IntArray,
    *,
    skip_first_s: float | None,
    skip_last_s: float | None,
) -> tuple[Window, BoolArray]:
    """The window, and which requests are in it.

    Args:
        planned_s: shape (N,), see `planned_times`.
        prompt_tokens: shape (N,), as the trace asks for.
        session_of: shape (N,), session of each request.
        skip_first_s: engine seconds to leave out at the start; None: the automatic rule.
        skip_last_s: engine seconds to leave out before the last planned time; None: the automatic rule.

    Returns:
        The window and shape (N,) booleans.
    """
    span_s = float(planned_s.max())
    first_s = _cold_until(planned_s, prompt_tokens) if skip_first_s is None else skip_first_s
    last_s = _drain_from(planned_s, session_of) if skip_last_s is None else span_s - skip_last_s
    cold = planned_s < first_s
    drain = (planned_s > last_s) & ~cold
    inside = ~cold & ~drain
    automatic = skip_first_s is None or skip_last_s is None
    return Window(first_s, last_s, span_s, int(inside.sum()), int(cold.sum()), int(drain.sum()), automatic), inside


def in_class(classes: Sequence[PlannedClass | None], only: PlannedClass | None) -> BoolArray:
    """Requests of one class, or all for None: shape (N,)."""
    return np.array([only is None or each is only for each in classes], dtype=np.bool_)


def _cold_until(planned_s: FloatArray, prompt_tokens: FloatArray) -> float:
    order = np.argsort(planned_s, kind="stable")
    due = np.cumsum(prompt_tokens[order])
    if due[-1] <= 0:
        return 0.0
    return float(planned_s[order[np.searchsorted(due, COLD_SHARE * due[-1])]])


def _drain_from(planned_s: FloatArray, session_of: IntArray) -> float:
    arrivals = np.full(int(session_of.max()) + 1, np.inf)
    np.minimum.at(arrivals, session_of, planned_s)
    last_arrival_s = float(arrivals[np.isfinite(arrivals)].max())
    # The planned time at and below which all but the last tenth of the requests lie.
    allowed = float(np.sort(planned_s)[int(np.ceil((1 - DRAIN_SHARE) * planned_s.size)) - 1])
    return max(last_arrival_s, allowed)
