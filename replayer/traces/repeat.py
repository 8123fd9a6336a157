"""Repetition of a trace: the same sessions several times, each time as new sessions with their own blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from replayer.traces.trace import Trace, TraceError, TraceRequest


def repeated(trace: Trace, times: int) -> Iterator[TraceRequest]:
    """The trace ``times`` times, one after the other in time, one request in memory at a time.

    Every repetition begins a mean gap between arrivals after the last arrival of the one before. Its sessions are new
    and so are their blocks, except those that several sessions of the trace share (system prompts): these stay
    shared. The first repetition is the trace itself, with its block ids numbered from 0. Texts are left out, as those
    of all repetitions would share a cache.

    Raises:
        TraceError: fewer than one repetition, or an empty trace.
    """
    if times < 1:
        raise TraceError("--times must be at least 1")
    if not trace.requests:
        raise TraceError(f"{trace.name}: no requests to repeat")
    numbers, blocks, shared = _numbering(trace)
    count = len(trace.requests)
    span_s = trace.duration_s * count / (count - 1) if count > 1 else 1.0
    chat_ids = max(request.chat_id for request in trace.requests) + 1
    own = blocks - shared
    for number in range(times):
        suffix = f"/{number}" if number else ""
        for request, ids in zip(trace.requests, numbers, strict=True):
            moved = np.where(ids < shared, ids, ids + number * own)
            child = request.parent_chat_id != -1
            yield msgspec.structs.replace(
                request,
                chat_id=request.chat_id + number * chat_ids,
                parent_chat_id=request.parent_chat_id + number * chat_ids if child else -1,
                session_id=request.session_id + suffix,
                timestamp_s=round(request.timestamp_s + number * span_s, 6),
                hash_ids=array("q", moved.tobytes()),
                text=None,
            )


def _numbering(trace: Trace) -> tuple[list[npt.NDArray[np.int64]], int, int]:
    """Every request's ids numbered from 0, the number of blocks, and the number shared by sessions (numbered first)."""
    sessions = {session: place for place, session in enumerate(trace.sessions())}
    lengths = [len(request.hash_ids) for request in trace.requests]
    ids = np.concatenate([np.asarray(request.hash_ids, dtype=np.int64) for request in trace.requests])
    owners = np.repeat([sessions[request.session_id] for request in trace.requests], lengths)
    known, places = np.unique(ids, return_inverse=True)
    first, last = np.full(len(known), len(sessions)), np.full(len(known), -1)
    np.minimum.at(first, places, owners)
    np.maximum.at(last, places, owners)
    is_shared = first != last
    shared = int(is_shared.sum())
    numbers = np.empty(len(known), dtype=np.int64)
    numbers[is_shared] = np.arange(shared)
    numbers[~is_shared] = np.arange(shared, len(known))
    return np.split(numbers[places], np.cumsum(lengths)[:-1]), len(known), shared
