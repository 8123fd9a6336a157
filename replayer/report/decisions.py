"""The router's decisions and their results: reasons, classes expected against computed, stages, outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from replayer.records.breakdown_rows import BreakdownRow
from replayer.records.classes import CLASSES, classify
from replayer.records.runs import RequestRecord
from replayer.records.summary import Quantiles, quantiles

NOT_REPORTED = "not reported"


@dataclass(frozen=True)
class ReasonRow:
    """Requests decided for one reason."""

    reason: str
    requests: int
    share: float
    ttft_s: Quantiles
    apc: float | None
    """Cached over prompt tokens, as the engines reported."""
    error_tokens: Quantiles
    """Predicted - actual cached tokens, with sign."""


@dataclass(frozen=True)
class ClassMatrix:
    """Class at the decision (by predicted cached tokens) against class by tokens really computed."""

    counts: dict[str, dict[str, int]]
    """Decided -> computed -> successful requests."""
    agreeing: float | None
    """Share of requests whose two classes agree."""


@dataclass(frozen=True)
class BreakdownSummary:
    """Figures from the proxy's breakdown rows."""

    rows: int
    retried: int
    outcomes: list[tuple[str, int]]
    stages: list[tuple[str, Quantiles]]
    """Wall milliseconds."""


def reasons(records: Sequence[RequestRecord]) -> list[ReasonRow]:
    """One row for each reason, the most frequent one first."""
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(record.reason or NOT_REPORTED, []).append(record)
    return [
        _reason(name, group, len(records))
        for name, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _reason(name: str, group: Sequence[RequestRecord], requests: int) -> ReasonRow:
    good = [record for record in group if record.ok]
    reported = [record for record in good if record.cached_tokens is not None and record.prompt_tokens]
    prompt = sum(record.prompt_tokens or 0 for record in reported)
    return ReasonRow(
        reason=name,
        requests=len(group),
        share=len(group) / requests,
        ttft_s=quantiles(record.ttft_s for record in good),
        apc=sum(record.cached_tokens or 0 for record in reported) / prompt if prompt else None,
        error_tokens=quantiles(
            record.predicted_cached_tokens - (record.cached_tokens or 0)
            for record in reported
            if record.predicted_cached_tokens is not None
        ),
    )


def class_matrix(records: Sequence[RequestRecord]) -> ClassMatrix | None:
    """None where no record has both classes."""
    counts: dict[str, dict[str, int]] = {name: dict.fromkeys(CLASSES, 0) for name in CLASSES}
    agreeing = known = 0
    for record in records:
        computed = classify(record.new_tokens)
        if not record.ok or record.request_class not in counts or computed not in CLASSES:
            continue
        counts[record.request_class][computed] += 1
        known += 1
        agreeing += record.request_class == computed
    return ClassMatrix(counts, agreeing / known) if known else None


def summarise_rows(rows: Sequence[BreakdownRow]) -> BreakdownSummary | None:
    """Outcomes, retries and where the time went inside the proxy; None without rows."""
    if not rows:
        return None
    stages: dict[str, list[float]] = {}
    for row in rows:
        for stage, ms in row.stages_ms.items():
            stages.setdefault(stage, []).append(ms)
    return BreakdownSummary(
        rows=len(rows),
        retried=sum(row.attempts > 0 for row in rows),
        outcomes=Counter(row.outcome for row in rows).most_common(),
        stages=[(stage, quantiles(values)) for stage, values in stages.items()],
    )
