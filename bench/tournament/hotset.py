"""The hot set: the KV of the sessions alive at one instant, and the pool sizes derived from it.

At an instant of the nominal time line (`bench.tournament.timeline`) a session is alive from the due time of its first
turn to the end of its last one, thinking included. Its blocks are the full blocks of the last turn due by then. The hot
set is the number of *distinct* tokens in the blocks of all sessions alive, the mean over instants of one period. It is
taken at 0.8 of saturation whatever the load of a cell, because a pool does not grow when fewer requests come. At lower
loads fewer sessions are alive and a pool of one hot set has spare room; above saturation sessions accumulate. It is
counted for 8 instances and stated per instance: it grows with the fleet, because the number of sessions does.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from bench.tournament.timeline import NominalSession, Timeline

REFERENCE_LOAD = 0.8
"""Share of saturation at which the hot set is counted."""
REFERENCE_INSTANCES = 8
"""Instances for which it is counted."""
INSTANTS = 8
"""Instants of a period at which it is counted."""
HEADROOM = 1.02
"""A pool holds at least this much of the largest request, prompt and output."""


def hot_set_tokens(line: Timeline, saturation: float) -> float:
    """Hot set of one instance: mean distinct tokens in the KV of the sessions alive, over the instances.

    Args:
        line: The trace at the pace of `REFERENCE_LOAD`.
        saturation: Requests per second and instance at saturation.
    """
    cycle_s = line.cycle_s(REFERENCE_LOAD * saturation * REFERENCE_INSTANCES)
    counts = [_blocks_alive(line, cycle_s, cycle_s * (instant + 0.5) / INSTANTS) for instant in range(INSTANTS)]
    return line.block_tokens * float(np.mean(counts)) / REFERENCE_INSTANCES


def pool_tokens(factor: float, hot_set: float, line: Timeline) -> tuple[int, bool]:
    """KV pool of an instance in whole blocks; True if it is larger than requested so that every request fits.

    Args:
        factor: Pool over hot set.
        hot_set: Hot set of one instance in tokens.
        line: The trace.
    """
    largest = max(
        turn.request.input_length + max(turn.request.output_length, 1) for each in line.sessions for turn in each.turns
    )
    floor = HEADROOM * largest + line.block_tokens
    blocks = math.ceil(max(factor * hot_set, floor) / line.block_tokens)
    return blocks * line.block_tokens, floor > factor * hot_set


def _blocks_alive(line: Timeline, cycle_s: float, now_s: float) -> int:
    scale = line.period_s / cycle_s
    chunks: list[NDArray[np.int64]] = []
    for session in line.sessions:
        start_s = session.start_s / scale
        repetition = math.floor((now_s - start_s) / cycle_s)
        while (age_s := now_s - start_s - repetition * cycle_s) < session.end_s:
            chunks.append(_blocks(session, age_s, -repetition * line.distinct_blocks, line.block_tokens))
            repetition -= 1
    return int(np.unique(np.concatenate(chunks)).size) if chunks else 0


def _blocks(session: NominalSession, age_s: float, offset: int, block_tokens: int) -> NDArray[np.int64]:
    """Full blocks of the last turn due at an age; another repetition has its own blocks except the common ones."""
    turn = max((each for each in session.turns if each.due_s <= age_s), key=lambda each: each.due_s)
    full = min(turn.request.input_length // block_tokens, len(turn.ids))
    ids = np.array(turn.ids[:full], dtype=np.int64)
    ids[turn.common :] += offset
    return ids
