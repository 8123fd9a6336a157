"""Summary of a run: latencies, classes by computed tokens, sessions, cache hits, prediction error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from replayer.records.classes import CLASSES, HEAVY_FROM_TOKENS, WARM_BELOW_TOKENS, classify
from replayer.records.runs import RequestRecord, Run
from replayer.records.sessions import SessionFigures, SessionTally, session_tally

ERROR_KEY_CHARACTERS = 60
"""Errors that agree in so many characters differ in detail only and count as one."""
ERROR_CHARACTERS = 300
"""Longest error in a summary."""


class Quantiles(msgspec.Struct, frozen=True):
    """p50, p90 and p99 (linear between order statistics) of ``n`` values; None without values."""

    n: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class ClassSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One class of requests (or all)."""

    name: str
    requests: int
    ok: int
    ttft_s: Quantiles
    ttft_scheduled_s: Quantiles
    tpot_s: Quantiles
    e2e_s: Quantiles
    e2e_scheduled_s: Quantiles
    new_tokens: Quantiles


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run. Latencies are of requests that succeeded, in engine seconds."""

    label: str
    complete: bool
    incomplete: str
    """Reason why the file does not hold the whole run; empty if it does."""
    resumable: bool
    """The run was interrupted, and ``--resume`` continues it."""
    resumed_after: int | None
    """Requests recorded when the run was resumed; None if it was not."""
    planned: int | None
    requests: int
    ok: int
    total: ClassSummary
    classes: list[ClassSummary]
    """WARM, MEDIUM, HEAVY by new tokens (prompt - cached actual), then UNKNOWN where the engine did not report them."""
    sessions: SessionFigures
    """Completion times and slowdowns of whole sessions (`replayer.records.sessions`)."""
    apc: float | None
    """Actual: sum of cached tokens / sum of prompt tokens, over requests whose engine reported both."""
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    predicted_requests: int
    """Requests with a predicted and an actual number of cached tokens."""
    predicted_error_tokens: Quantiles
    """|predicted - actual| cached tokens."""
    predicted_bias_tokens: float | None
    """Mean of predicted - actual."""
    offloaded: int
    short_outputs: int
    """Successful requests with fewer output tokens than requested."""
    span_s: float
    requests_per_s: float
    send_lag_s: Quantiles
    """Sent - scheduled: waiting for a session slot, and the client's own lateness."""
    errors: dict[str, int]
    """Failed requests by reason; those whose errors begin alike are counted under the first one's."""


def quantiles(values: Iterable[float | None]) -> Quantiles:
    """Quantiles of the values that are not None."""
    present = np.array([value for value in values if value is not None], dtype=float)
    if len(present) == 0:
        return Quantiles(0, None, None, None, None)
    p50, p90, p99 = (float(value) for value in np.quantile(present, [0.5, 0.9, 0.99]))
    return Quantiles(len(present), float(present.mean()), p50, p90, p99)


def _class_summary(name: str, records: Sequence[RequestRecord]) -> ClassSummary:
    good = [record for record in records if record.ok]
    return ClassSummary(
        name=name,
        requests=len(records),
        ok=len(good),
        ttft_s=quantiles(record.ttft_s for record in good),
        ttft_scheduled_s=quantiles(record.ttft_scheduled_s for record in good),
        tpot_s=quantiles(record.tpot_s for record in good),
        e2e_s=quantiles(record.e2e_s for record in good),
        e2e_scheduled_s=quantiles(record.e2e_scheduled_s for record in good),
        new_tokens=quantiles(record.new_tokens for record in good),
    )


def failures(records: Iterable[RequestRecord]) -> dict[str, int]:
    """Failed requests by reason, most frequent first: the first error of those that begin alike -> their number."""
    counts: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for record in records:
        if not record.ok:
            error = record.error or "unknown"
            beginning = error[:ERROR_KEY_CHARACTERS]
            counts[beginning] += 1
            cut = len(error) > ERROR_CHARACTERS
            reasons.setdefault(beginning, error[: ERROR_CHARACTERS - 1] + "…" if cut else error)
    return {reasons[beginning]: count for beginning, count in counts.most_common()}


def summarise(
    run: Run,
    *,
    warm_below: int = WARM_BELOW_TOKENS,
    heavy_from: int = HEAVY_FROM_TOKENS,
    sessions: SessionTally | None = None,
) -> Summary:
    """Summarise a run.

    Args:
        run: run with its records.
        warm_below: WARM means fewer new tokens than this.
        heavy_from: HEAVY means at least this many new tokens.
        sessions: of the runs that ``run`` pools; None: of ``run``, a single one.
    """
    records = run.records
    good = [record for record in records if record.ok]
    by_class: dict[str, list[RequestRecord]] = {name: [] for name in CLASSES}
    for record in records:
        by_class.setdefault(classify(record.new_tokens, warm_below, heavy_from), []).append(record)
    reported = [record for record in good if record.prompt_tokens is not None and record.cached_tokens is not None]
    prompt = sum(record.prompt_tokens or 0 for record in reported)
    cached = sum(record.cached_tokens or 0 for record in reported)
    errors = [
        record.predicted_cached_tokens - record.cached_tokens
        for record in good
        if record.predicted_cached_tokens is not None and record.cached_tokens is not None
    ]
    starts = [record.scheduled_s for record in records]
    ends = [record.finished_s for record in records if record.finished_s is not None]
    span_s = max(ends) - min(starts) if ends else 0.0
    planned = run.header.offered.get("requests")
    return Summary(
        label=run.header.label,
        complete=not run.incomplete,
        incomplete=run.incomplete,
        resumed_after=run.resumed_after,
        resumable=run.end is None,
        planned=planned if isinstance(planned, int) else None,
        requests=len(records),
        ok=len(good),
        total=_class_summary("ALL", records),
        classes=[_class_summary(name, group) for name, group in by_class.items()],
        sessions=(sessions or session_tally([run])).figures(),
        apc=cached / prompt if prompt else None,
        prompt_tokens=sum(record.prompt_tokens or 0 for record in good),
        cached_tokens=cached if reported else None,
        completion_tokens=sum(record.completion_tokens or 0 for record in good),
        predicted_requests=len(errors),
        predicted_error_tokens=quantiles(abs(error) for error in errors),
        predicted_bias_tokens=sum(errors) / len(errors) if errors else None,
        offloaded=sum(record.prefill_instance is not None for record in records),
        short_outputs=sum((record.completion_tokens or 0) < record.output_length for record in good),
        span_s=span_s,
        requests_per_s=len(good) / span_s if span_s > 0 else 0.0,
        send_lag_s=quantiles(r.sent_s - r.scheduled_s for r in records if r.sent_s is not None),
        errors=failures(records),
    )


def summary_dict(summary: Summary) -> dict[str, Any]:
    """The summary as plain data (JSON-ready)."""
    plain: dict[str, Any] = msgspec.to_builtins(summary)
    return plain
