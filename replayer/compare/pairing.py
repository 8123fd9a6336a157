"""Requests of several runs of one trace, side by side: matched by key, as columns over one common order.

A request is matched by (session_id, turn, chat_id); a key that occurs several times is matched in order of occurrence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from replayer.compare.statistics.bootstrap import BoolArray, FloatArray, IntArray
from replayer.compare.window import planned_times
from replayer.records.classes import PlannedClass, planned_class
from replayer.records.idle import IdleCosts
from replayer.records.runs import RequestRecord, Run
from replayer.records.sessions import session_clocks, whole_sessions_known

Key = tuple[str, int, int, int]
"""(session_id, turn, chat_id, occurrence)."""
CLOCKS = ("sent", "scheduled")
"""Start of TTFT and E2E: when the client sent the request, or when it was due by the plan."""


@dataclass(frozen=True, eq=False)
class Columns:
    """One run's requests, every array of shape (N,) over the common order; NaN where unknown or absent."""

    present: BoolArray
    ok: BoolArray
    """Present and succeeded."""
    ttft_s: FloatArray
    tpot_s: FloatArray
    e2e_s: FloatArray
    cached_tokens: FloatArray
    prompt_tokens: FloatArray
    scheduled_s: FloatArray
    finished_s: FloatArray
    session_s: FloatArray
    """Completion time of the session at its first request, NaN elsewhere and for sessions without one."""
    session_slowdown: FloatArray
    """Likewise, completion time over idle time."""


@dataclass(frozen=True, eq=False)
class Requests:
    """Every request of any of the runs, in the order of the keys, with its plan: shape (N,) each."""

    keys: list[Key]
    session_of: IntArray
    sessions: int
    first_of_session: BoolArray
    """True at the first turn of each session."""
    planned_s: FloatArray
    input_tokens: FloatArray
    added_tokens: FloatArray
    """Tokens that the client adds to the turn before, by the trace: input - (input + output of that turn), or the whole
    input for a first turn and where the prompt does not hold its history."""
    classes: list[PlannedClass | None]
    """By the trace; None in older files."""


def keyed(run: Run) -> dict[Key, RequestRecord]:
    """Records by key."""
    seen: dict[tuple[str, int, int], int] = {}
    result: dict[Key, RequestRecord] = {}
    for record in run.records:
        key = (record.session_id, record.turn, record.chat_id)
        occurrence = seen.get(key, 0)
        seen[key] = occurrence + 1
        result[(*key, occurrence)] = record
    return result


def silence_as_zero(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The records with unknown cached tokens as 0, provided the engines reported them for some request.

    vLLM up to 0.18 leaves zero out of its usage; otherwise misses would drop out of every hit rate.
    """
    if all(record.cached_tokens is None for record in records):
        return list(records)
    return [
        msgspec.structs.replace(record, cached_tokens=0) if record.ok and record.cached_tokens is None else record
        for record in records
    ]


def align(runs: Sequence[Run], *, clock: str) -> tuple[Requests, list[Columns]]:
    """All requests of the runs, and each run's own columns.

    Args:
        runs: at least one, each with at least one record.
        clock: one of `CLOCKS`.
    """
    by_run = [keyed(run._replace(records=silence_as_zero(run.records))) for run in runs]
    keys = sorted(set().union(*by_run))
    # The plan is the same in every run: take it from the first that has the request.
    planned: dict[Key, RequestRecord] = {}
    for records in reversed(by_run):
        planned.update(records)
    ordered = [planned[key] for key in keys]
    sessions, session_of = np.unique([key[0] for key in keys], return_inverse=True)
    session_of = session_of.astype(np.int64)
    # Keys are in order, so the first one of a session is its first turn.
    first = np.diff(session_of, prepend=-1) > 0
    timestamps_s = np.array([record.trace_timestamp_s for record in ordered])
    requests = Requests(
        keys=keys,
        session_of=session_of,
        sessions=len(sessions),
        first_of_session=first,
        planned_s=planned_times(timestamps_s, runs[0].header.time_scale),
        input_tokens=np.array([record.input_length for record in ordered], dtype=np.float64),
        added_tokens=_added(ordered),
        classes=[planned_class(record) for record in ordered],
    )
    costs = runs[0].header.idle_costs
    turns = np.bincount(session_of, minlength=len(sessions)).tolist()
    planned_turns = dict(zip(sessions.tolist(), turns, strict=True))
    columns = []
    for run, records in zip(runs, by_run, strict=True):
        times = _session_columns(run, planned_turns, np.flatnonzero(first), len(keys), costs)
        columns.append(_columns([records.get(key) for key in keys], clock, times))
    return requests, columns


def _added(records: Sequence[RequestRecord]) -> FloatArray:
    added = np.array([record.input_length for record in records], dtype=np.float64)
    for index in range(1, len(records)):
        before, record = records[index - 1], records[index]
        history = before.input_length + before.output_length
        if before.session_id == record.session_id and history <= record.input_length:
            added[index] = record.input_length - history
    return added


def _columns(records: Sequence[RequestRecord | None], clock: str, sessions: tuple[FloatArray, FloatArray]) -> Columns:
    ttft, e2e = ("ttft_scheduled_s", "e2e_scheduled_s") if clock == "scheduled" else ("ttft_s", "e2e_s")

    def column(name: str) -> FloatArray:
        # numpy turns None into NaN.
        return np.array([None if record is None else getattr(record, name) for record in records], dtype=np.float64)

    return Columns(
        present=np.array([record is not None for record in records], dtype=np.bool_),
        ok=np.array([record is not None and record.ok for record in records], dtype=np.bool_),
        ttft_s=column(ttft),
        tpot_s=column("tpot_s"),
        e2e_s=column(e2e),
        cached_tokens=column("cached_tokens"),
        prompt_tokens=column("prompt_tokens"),
        scheduled_s=column("scheduled_s"),
        finished_s=column("finished_s"),
        session_s=sessions[0],
        session_slowdown=sessions[1],
    )


def _session_columns(
    run: Run, planned_turns: Mapping[str, int], first: IntArray, size: int, costs: IdleCosts
) -> tuple[FloatArray, FloatArray]:
    """Completion times in seconds and slowdowns of a run's sessions, each of shape (size,).

    The value lies at the session's first request, NaN elsewhere: each session is one observation, to which windows,
    resamples of sessions and the rules about tails apply as they do to requests, and it is compared if it *began* in
    the window. NaN too for a session that did not complete: one that is not known to be whole, or with a failed turn.

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


@dataclass(frozen=True)
class Pairing:
    """Requests present in every run of both arms and in the window, and what was left over.

    Where one class is compared, all counts but ``other_classes`` are of it only.
    """

    keys: list[Key]
    unmatched_baseline: int
    """Requests of the baseline's runs that some run of the pair lacks."""
    unmatched_candidate: int
    skipped: int
    """Matched requests that the window left out."""
    failed_baseline: int
    """Matched requests in the window that failed, over all runs of the baseline."""
    failed_candidate: int
    both_ok: int
    """Matched requests that succeeded in every run of both arms: what the times are compared over."""
    other_classes: int
    """Matched requests in the window that are not of the compared class."""


def pair(
    requests: Requests,
    baseline: Sequence[Columns],
    candidate: Sequence[Columns],
    inside: BoolArray,
    of_class: BoolArray,
) -> tuple[Pairing, BoolArray]:
    """Match two arms.

    Args:
        requests: the common order.
        baseline: the baseline's runs.
        candidate: the candidate's runs.
        inside: shape (N,), which requests the window keeps.
        of_class: shape (N,), which requests are of the compared class.

    Returns:
        The counts, and shape (N,): which requests are compared.
    """
    matched = np.logical_and.reduce([run.present for run in (*baseline, *candidate)])
    unmatched = of_class & ~matched
    kept = matched & inside & of_class
    both_ok = np.logical_and.reduce([run.ok for run in (*baseline, *candidate)]) & kept
    return (
        Pairing(
            keys=[requests.keys[index] for index in np.flatnonzero(kept)],
            unmatched_baseline=sum(int((run.present & unmatched).sum()) for run in baseline),
            unmatched_candidate=sum(int((run.present & unmatched).sum()) for run in candidate),
            skipped=int((matched & ~inside & of_class).sum()),
            failed_baseline=sum(int((kept & ~run.ok).sum()) for run in baseline),
            failed_candidate=sum(int((kept & ~run.ok).sum()) for run in candidate),
            both_ok=int(both_ok.sum()),
            other_classes=int((matched & inside & ~of_class).sum()),
        ),
        kept,
    )
