"""Times of whole sessions as columns over the common order of requests, one value at each session's first request.

A value at the first request makes a session one observation that belongs to its session: windows, resamples of
sessions and the rules about tails apply as they do to requests. A session is thus compared if it *began* in the window,
and followed to its end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from replayer.compare.statistics.bootstrap import FloatArray, IntArray
from replayer.records.idle import IdleCosts
from replayer.records.runs import Run
from replayer.records.sessions import session_clocks, whole_sessions_known


def session_columns(
    run: Run, planned_turns: Mapping[str, int], first: IntArray, size: int, costs: IdleCosts
) -> tuple[FloatArray, FloatArray]:
    """Completion times in seconds and slowdowns of a run's sessions, each of shape (size,).

    NaN except at the first request of a session that completed: it is known to be whole, and all its turns succeeded.

    Args:
        run: the run.
        planned_turns: session -> turns that it has in any of the compared runs, in the common order.
        first: shape (sessions,), place of each session's first request.
        size: requests in the common order.
        costs: for the idle times; equal for all runs, so that slowdowns differ by completion times only.
    """
    completion_s, slowdown = np.full(size, np.nan), np.full(size, np.nan)
    clocks = session_clocks(run, costs) if whole_sessions_known(run) else {}
    for place, (session_id, turns) in zip(first.tolist(), planned_turns.items(), strict=True):
        clock = clocks.get(session_id)
        if clock is None or clock.turns != turns or session_id == run.header.cut_session:
            continue
        for column, value in ((completion_s, clock.completion_s), (slowdown, clock.slowdown)):
            if value is not None:
                column[place] = value
    return completion_s, slowdown
