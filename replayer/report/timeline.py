"""One session's turns on a time axis: waiting in the client, until the first token, decoding; where, and how warm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from replayer.records.runs import RequestRecord, Run

MAX_TURNS = 26
"""More turns than fit a page are cut, with a remark on the page."""


@dataclass(frozen=True, slots=True)
class Span:
    """One request; engine seconds from the moment the session's first request was due."""

    turn: int
    scheduled_s: float
    """Due time by the plan, or the end of the turn before plus think time."""
    sent_s: float
    first_token_s: float | None
    finished_s: float
    instance: str
    prefill_instance: str | None
    cached_share: float | None
    """Cached over prompt tokens, as the engine reported."""
    prompt_tokens: int
    ok: bool


def choose_session(runs: Sequence[Run]) -> str | None:
    """The session to draw: most turns among those that succeeded throughout in every run; ties go to the first id."""
    turns: Counter[str] = Counter()
    failed: set[str] = set()
    for run in runs:
        for record in run.records:
            turns[record.session_id] += 1
            if not record.ok:
                failed.add(record.session_id)
    candidates = {session: count for session, count in turns.items() if session not in failed} or dict(turns)
    return min(candidates, key=lambda session: (-candidates[session], session), default=None)


def spans(run: Run, session: str | None) -> list[Span]:
    """The session's requests in the order in which they were sent; those never sent are left out."""
    records = [
        record
        for record in run.records
        if record.session_id == session and record.sent_s is not None and record.finished_s is not None
    ]
    start = min((record.scheduled_s for record in records), default=0.0)
    return sorted((_span(record, start) for record in records), key=lambda span: (span.sent_s, span.turn))


def _span(record: RequestRecord, start_s: float) -> Span:
    assert record.sent_s is not None
    assert record.finished_s is not None
    share = None
    if record.prompt_tokens and record.cached_tokens is not None:
        share = record.cached_tokens / record.prompt_tokens
    return Span(
        turn=record.turn,
        scheduled_s=min(record.scheduled_s, record.sent_s) - start_s,
        sent_s=record.sent_s - start_s,
        first_token_s=None if record.first_token_s is None else record.first_token_s - start_s,
        finished_s=record.finished_s - start_s,
        instance=record.instance or "",
        prefill_instance=record.prefill_instance,
        cached_share=share,
        prompt_tokens=record.prompt_tokens or record.input_length,
        ok=record.ok,
    )
