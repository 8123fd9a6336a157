"""Tables of a comparison of routers, made from its kept records only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from bench.routers.arms import ALL_ARMS
from bench.routers.handed_over import hand_off_lines
from bench.routers.records import RouterRecord, RouterRecordError, totals_of
from replayer.compare.arms import ArmRun, ArmRuns
from replayer.compare.comparison import Comparison
from replayer.compare.runs import CompareOptions, ComparisonError, compare_arms
from replayer.compare.statistics.tests import Effect, Verdict
from replayer.compare.window import planned_times
from replayer.records.classes import PlannedClass, planned_class
from replayer.records.readable import MOST_POINTS, format_points
from replayer.records.runs import RequestRecord

METRICS = ("TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90", "E2E p50", "E2E p90", "session time mean")
"""Those compared, by their names in `replayer.compare`."""
RESAMPLES = 4000
_MARKS = {Verdict.BETTER: " **better**", Verdict.WORSE: " **worse**"}


def lines_of(
    records: Sequence[RouterRecord],
    base: str,
    skip_first_s: float | None = None,
    only_class: PlannedClass | None = None,
) -> Iterator[str]:
    """Markdown: for each kind of prompt and load what was measured, and differences from the base with intervals.

    Args:
        records: those of all runs.
        base: the arm that others are compared with.
        skip_first_s: only requests planned this many engine seconds after the first one or later count; None: all are
            shown, and compared without the cold start.
        only_class: only requests of this class, by their new tokens in the trace, count; None: all.

    Raises:
        RouterRecordError: there is no record of ``base`` at any load, or no request of ``only_class``.
    """
    labels = Counter(record.label for record in records)
    if base not in labels:
        raise RouterRecordError(f"no record of {base}; found: {', '.join(labels) or 'none'}")
    if only_class is not None:
        _refuse_class(records, only_class)
    for mode, load in sorted({(record.conditions.prompt_mode, record.load) for record in records}):
        chosen = [each for each in records if each.conditions.prompt_mode == mode and each.load == load]
        yield from _section(mode, load, chosen, base, skip_first_s, only_class)
        yield ""


def by_arm(records: Sequence[RouterRecord], base: str) -> dict[str, list[RouterRecord]]:
    """Records by arm, the base first, then as in the list of arms; repeats in order."""
    known = [base, *ALL_ARMS]
    labels = sorted(
        {record.label for record in records},
        key=lambda label: (known.index(label) if label in known else len(known), label),
    )
    ordered = sorted(records, key=lambda record: record.repeat)
    return {label: [record for record in ordered if record.label == label] for label in labels}


def _refuse_class(records: Sequence[RouterRecord], only: PlannedClass) -> None:
    """Raise RouterRecordError if no request is of the class, or records do not have it."""
    classes = Counter(planned_class(each.record()) for record in records for each in record.requests)
    if classes[None]:
        raise RouterRecordError(
            f"--class needs the new tokens of each request by the trace, and {classes[None]:,} of "
            f"{classes.total():,} in the records lack own_prefix_tokens: make the runs again, or leave --class out"
        )
    if not classes[only]:
        found = ", ".join(f"{classes[each]:,} {each}" for each in PlannedClass if classes[each])
        raise RouterRecordError(f"no request is of class {only} ({only.tokens}); found: {found or 'none'}")


def _section(
    mode: str,
    load: float,
    records: Sequence[RouterRecord],
    base: str,
    skip_first_s: float | None,
    only: PlannedClass | None,
) -> Iterator[str]:
    arms = by_arm(records, base)
    counted = arms if skip_first_s is None else _later(arms, skip_first_s)
    if only is not None:
        counted = _of_class(counted, only)
    first = records[0]
    offered = first.header.offered
    hardware = sorted({record.hardware for record in records if record.hardware})
    versions = sorted({version for record in records for version in record.engine_versions if version})
    pools = sorted({tokens for record in records for tokens in record.pool_tokens})
    yield (
        f"**{first.header.trace}, {load:g} x its speed, {mode} prompts**: {offered.get('requests')} requests of "
        f"{offered.get('sessions')} sessions, mean prompt {offered.get('input_mean_tokens', 0):,.0f} tokens; "
        f"{first.conditions.engines} engines ({', '.join(versions) or 'version unknown'}; "
        f"{', '.join(hardware) or 'hardware not stated'}), "
        f"pools of {' or '.join(f'{tokens:,}' for tokens in pools)} tokens. Times from when a request was due, all "
        f"runs together; means of single runs in parentheses{_restriction(skip_first_s, only)}."
    )
    yield ""
    yield (
        "| router | runs | ok | TTFT p50, p90, s | TTFT mean, s | TPOT p50, p90, ms | E2E p50, p90, s | E2E mean, s "
        "| hit rate by engines' counters | by answers | router CPU, ms/request | handed over |"
    )
    yield "| --- | ---: | ---: | --- | --- | --- | --- | --- | --- | ---: | ---: | ---: |"
    for label, runs in arms.items():
        yield _measured(label, runs, counted[label])
    yield ""
    yield from _compared(arms, base, skip_first_s, only)
    yield from _notes(arms)
    yield from hand_off_lines(counted, base)


def _restriction(skip_first_s: float | None, only: PlannedClass | None) -> str:
    if skip_first_s is None and only is None:
        return ""
    of_class = f" of class {only} ({only.tokens})" if only else ""
    later = "" if skip_first_s is None else f" planned after the first {skip_first_s:g} s"
    return f". Only requests{of_class}{later} are shown and compared; hit rates by counters and CPU are of all"


def _later(arms: Mapping[str, Sequence[RouterRecord]], skip_first_s: float) -> dict[str, list[RouterRecord]]:
    """The same runs without what was planned in the first seconds."""
    kept: dict[str, list[RouterRecord]] = {}
    for label, runs in arms.items():
        kept[label] = []
        for run in runs:
            times_s = np.array([each.trace_timestamp_s for each in run.requests])
            later = planned_times(times_s, run.header.time_scale) >= skip_first_s
            requests = [each for each, counts in zip(run.requests, later, strict=True) if counts]
            planned = run.planned - len(run.requests) + len(requests)
            kept[label].append(msgspec.structs.replace(run, requests=requests, planned=planned))
    return kept


def _of_class(arms: Mapping[str, Sequence[RouterRecord]], only: PlannedClass) -> dict[str, list[RouterRecord]]:
    """The same runs with one class of requests; planned are those that any run has, as one that was cut lacks some."""
    kept = {
        label: [[each for each in run.requests if planned_class(each.record()) is only] for run in runs]
        for label, runs in arms.items()
    }
    planned = len({each.request_id for runs in kept.values() for requests in runs for each in requests})
    return {
        label: [
            msgspec.structs.replace(run, requests=requests, planned=planned)
            for run, requests in zip(runs, kept[label], strict=True)
        ]
        for label, runs in arms.items()
    }


def _measured(label: str, runs: Sequence[RouterRecord], counted: Sequence[RouterRecord]) -> str:
    per_run = [[request.record() for request in run.requests] for run in counted]
    good = [[each for each in records if each.ok] for records in per_run]
    every = [each for records in good for each in records]
    sent = sum(len(run.requests) for run in runs)
    cached, prompt = (sum(getattr(each, name) or 0 for each in every) for name in ("cached_tokens", "prompt_tokens"))
    cpu_s = sum(run.router_cpu_s for run in runs)
    handed = sum(each.prefill_instance is not None for each in every)
    return (
        f"| `{label}` | {len(runs)} | {len(every)}/{sum(run.planned for run in counted)} "
        f"| {_quantiles(_values(every, 'ttft_scheduled_s'), 3)} | {_means(good, 'ttft_scheduled_s')} "
        f"| {_quantiles(1e3 * _values(every, 'tpot_s'), 1)} | {_quantiles(_values(every, 'e2e_scheduled_s'), 2)} "
        f"| {_means(good, 'e2e_scheduled_s')} | {_listed([totals_of(run.counters).hit_rate for run in runs], 3)} "
        f"| {cached / max(1, prompt):.3f} | {1e3 * cpu_s / max(1, sent):.1f} | {handed} |"
    )


def _compared(
    arms: Mapping[str, Sequence[RouterRecord]], base: str, skip_first_s: float | None, only: PlannedClass | None
) -> Iterator[str]:
    if base not in arms or len(arms) < 2:
        yield f"Nothing to compare with `{base}` at this load."
        return
    sides = [
        ArmRuns(label, [ArmRun(run.run(), repeat=f"r{run.repeat}") for run in runs]) for label, runs in arms.items()
    ]
    cut = any(run.cut for runs in arms.values() for run in runs)
    # Times count from when a request was due, as a router's queue counts; the window is that of `warmroute compare`.
    options = CompareOptions(
        resamples=RESAMPLES,
        skip_first_s=skip_first_s,
        skip_last_s=None,
        clock="scheduled",
        force=cut,
        only_class=only,
    )
    try:
        comparisons = compare_arms(sides, options)
    except ComparisonError as error:
        yield f"Not compared: {error}"
        return
    known = {effect.metric for effect in comparisons[0].effects}
    metrics = [name for name in METRICS if name in known]
    yield f"| against `{base}` | requests | " + " | ".join(metrics) + " |"
    yield "| --- | ---: |" + " ---: |" * len(metrics)
    for each in comparisons:
        yield _difference(each, metrics)
    yield ""
    window = comparisons[0].window
    yield (
        f"Left out of every arm by the plan: {window.cold} requests of the cold start, {window.drain} of the drain"
        f"{', of all classes' if only else ''}. "
        "Intervals: 95 %, paired by request, bootstrap over sessions; better, worse: after correction for all metrics."
    )
    for warning in dict.fromkeys(warning for each in comparisons for warning in each.warnings):
        yield f"- {warning}"


def _difference(comparison: Comparison, metrics: Sequence[str]) -> str:
    effects = {effect.metric: effect for effect in comparison.effects}
    cells = " | ".join(_change(effects[name]) for name in metrics)
    return f"| `{comparison.candidate_label}` | {len(comparison.pairing.keys)} | {cells} |"


def _change(effect: Effect) -> str:
    if not np.isfinite([effect.change, effect.low, effect.high]).all():
        return "–"
    change, low, high = (100 * value for value in (effect.change, effect.low, effect.high))
    top = f"{high:+.0f}" if high <= MOST_POINTS else format_points(effect.high)
    return f"{change:+.0f} % [{low:+.0f}, {top}]{_MARKS.get(effect.verdict, '')}"


def _notes(arms: Mapping[str, Sequence[RouterRecord]]) -> Iterator[str]:
    yield ""
    for label, runs in arms.items():
        yield f"- `{label}`: {'; '.join(dict.fromkeys(run.router for run in runs))}."
        for run in runs:
            if run.cut:
                yield (
                    f"- `{label}`, repeat {run.repeat}: cut off after {len(run.requests)} of {run.planned} requests; "
                    "the slowest are missing from its times."
                )
            errors = Counter(request.error for request in run.requests if request.error)
            for reason, count in errors.most_common(3):
                yield f"- `{label}`, repeat {run.repeat}: {count} failed: {reason[:120]}"


def _values(records: Sequence[RequestRecord], name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    found = [getattr(each, name) for each in records]
    return np.array([value for value in found if value is not None], dtype=np.float64)


def _quantiles(values: np.ndarray[tuple[int], np.dtype[np.float64]], digits: int) -> str:
    if not values.size:
        return "–"
    low, high = np.quantile(values, (0.5, 0.9))
    return f"{low:.{digits}f}, {high:.{digits}f}"


def _means(runs: Sequence[Sequence[RequestRecord]], name: str) -> str:
    values = [_values(records, name) for records in runs]
    return _listed([float(each.mean()) for each in values if each.size], 2)


def _listed(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({', '.join(f'{value:.{digits}f}' for value in values)})"
