"""Picks whole sessions of a trace, keeping their order in time, and says what that did to the trace."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from replayer.traces.ideal import ideal
from replayer.traces.trace import Trace, TraceError, TraceRequest


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A trace in a few numbers."""

    requests: int
    sessions: int
    duration_s: float
    requests_per_s: float
    turns_mean: float
    turns_p50: float
    turns_p90: float
    input_mean: float
    input_p50: float
    input_p90: float
    input_p99: float
    output_mean: float
    output_p50: float
    output_p90: float
    shared_apc: float
    round_robin_apc: float
    sticky_apc: float
    intra_session_share: float


def profile(trace: Trace, instances: int = 8) -> Profile:
    """Lengths, turns and ideal cache figures of a trace.

    Raises:
        TraceError: the trace is empty.
    """
    if not trace.requests:
        raise TraceError(f"{trace.name}: no requests")
    inputs = np.array([request.input_length for request in trace.requests])
    outputs = np.array([request.output_length for request in trace.requests])
    turns = np.array([len(turns) for turns in trace.sessions().values()])
    figures = ideal(trace, instances)

    def quantile(values: npt.NDArray[np.int64], share: float) -> float:
        return float(np.quantile(values, share))

    return Profile(
        requests=len(inputs),
        sessions=len(turns),
        duration_s=trace.duration_s,
        requests_per_s=len(inputs) / trace.duration_s if trace.duration_s > 0 else float(len(inputs)),
        turns_mean=float(turns.mean()),
        turns_p50=quantile(turns, 0.5),
        turns_p90=quantile(turns, 0.9),
        input_mean=float(inputs.mean()),
        input_p50=quantile(inputs, 0.5),
        input_p90=quantile(inputs, 0.9),
        input_p99=quantile(inputs, 0.99),
        output_mean=float(outputs.mean()),
        output_p50=quantile(outputs, 0.5),
        output_p90=quantile(outputs, 0.9),
        shared_apc=figures.shared_apc,
        round_robin_apc=figures.round_robin_apc,
        sticky_apc=figures.sticky_apc,
        intra_session_share=figures.intra_session_share,
    )


def _rank(seed: int, session_id: str) -> bytes:
    """A session's place in the draw: depends on the seed and its name only, so samples of one seed are nested."""
    return hashlib.sha256(f"{seed}:{session_id}".encode()).digest()


def sample(trace: Trace, target_requests: int, seed: int = 0, *, rebase: bool = True) -> Trace:
    """Whole sessions, drawn at random, until the target is reached as nearly as whole sessions allow.

    Args:
        trace: Where from.
        target_requests: About how many requests to keep.
        seed: Another seed draws other sessions; a larger target of the same seed keeps most of the smaller's.
        rebase: Let time start at 0.

    Returns:
        A new trace; chat ids, session ids and hash ids stay those of the original, so the requests can be found there.

    Raises:
        TraceError: the target is below 1.
    """
    if target_requests < 1:
        raise TraceError("--target-requests must be at least 1")
    sessions = trace.sessions()
    kept: set[str] = set()
    count = 0
    for name in sorted(sessions, key=lambda name: _rank(seed, name)):
        size = len(sessions[name])
        # Past the target only when that ends nearer to it, and never nothing at all.
        if kept and count + size - target_requests > max(target_requests - count, 0):
            continue
        kept.add(name)
        count += size
        if count >= target_requests:
            break
    requests = [request for request in trace.requests if request.session_id in kept]
    return Trace(
        requests=_rebased(requests) if rebase else requests,
        block_tokens=trace.block_tokens,
        tail=trace.tail,
        name=f"{trace.name} (sample of {count}, seed {seed})",
        notes=[*trace.notes, f"{len(kept)} of {len(sessions)} sessions"],
    )


def _rebased(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    start_s = requests[0].timestamp_s if requests else 0.0
    return [
        msgspec.structs.replace(request, timestamp_s=round(request.timestamp_s - start_s, 6)) for request in requests
    ]
