"""Checks after a run, as a list of violations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from bench.soak.hostile import SILENT, HostileCounts
from bench.soak.load import Seen
from bench.soak.phases import SliceComparison
from bench.soak.plan import SoakPlan
from bench.soak.samples import ProcessSample, Trend, trend
from proxy.records.files import record_files

WRONG = ("wrong answer", "cut without an error event")
_SPARE_DESCRIPTORS = 8
"""Idle connections to engines that probes and pool may keep."""
_BAD_LINES = ("Traceback (most recent call last)", "was never retrieved", "was never awaited", " ERROR ", " CRITICAL ")


class SoakTrends(msgspec.Struct):
    """Trends over the measured window."""

    rss_mb: Trend
    rss_peak_mb: float
    descriptors: Trend
    threads: Trend
    descriptors_before: int
    descriptors_after: int
    threads_after: int
    cpu_s: float


def figures(samples: list[ProcessSample], before: ProcessSample, after: ProcessSample, plan: SoakPlan) -> SoakTrends:
    """``before`` the first and ``after`` the last request, both idle; ``samples`` of the time between."""
    measured = [sample for sample in samples if sample.at_s >= plan.warm_up_share * samples[-1].at_s]
    at_s = [sample.at_s for sample in measured]
    return SoakTrends(
        trend(at_s, [sample.rss_mb for sample in measured]),
        max(sample.rss_mb for sample in samples),
        trend(at_s, [float(sample.descriptors) for sample in measured]),
        trend(at_s, [float(sample.threads) for sample in measured]),
        before.descriptors,
        after.descriptors,
        after.threads,
        round(after.cpu_s - before.cpu_s, 2),
    )


def breakdown_ids(path: Path) -> Counter[str]:
    """Rows per request id in the proxy's records, rotated files included."""
    found: Counter[str] = Counter()
    for each in record_files(path):
        with each.open("rb") as lines:
            found.update(msgspec.json.decode(line)["request_id"] for line in lines)
    return found


def violations(
    seen: Seen, kills: int, stats: dict[str, Any], rows: Counter[str], measured: SoakTrends, plan: SoakPlan, log: str
) -> list[str]:
    """All violated checks; empty if there are none."""
    return [
        *_of_answers(seen, kills),
        *_of_ledger(stats),
        *_of_rows(seen, rows, plan),
        *_of_process(measured, plan),
        *_of_log(log),
    ]


def hostile_violations(hostile: HostileCounts, comparison: SliceComparison | None, plan: SoakPlan) -> list[str]:
    """Violated checks of a run with hostile clients; empty for one without."""
    found = []
    for kind, ends in hostile.items():
        if ends.get(SILENT):
            found.append(f"{ends[SILENT]} hostile clients ({kind}) were neither answered nor cut off in time")
        if ends.get("500"):
            found.append(f"{ends['500']} hostile clients ({kind}) were answered 500")
    if plan.hostile_share and not any(sum(ends.values()) for ends in hostile.values()):
        found.append("no hostile client attacked: the run is not valid")
    if comparison is not None and comparison.ttft_p99_ratio > plan.ttft_ratio:
        found.append(
            f"polite clients' TTFT p99 with hostile clients is {comparison.ttft_p99_ratio:.2f} times that without "
            f"({comparison.with_hostile.ttft_p99_ms:.0f} and {comparison.without.ttft_p99_ms:.0f} ms), "
            f"over {plan.ttft_ratio:g}"
        )
    return found


def _of_answers(seen: Seen, kills: int) -> Iterable[str]:
    for kind in WRONG:
        if seen.ends[kind]:
            yield f"{seen.ends[kind]} requests: {kind}; the first: {seen.wrong[0]}"
    if not seen.ends["ok"]:
        yield "no request was answered"
    if not kills:
        yield "no engine was killed: the run is not valid"


def _of_ledger(stats: dict[str, Any]) -> Iterable[str]:
    for name in ("in_flight", "abandoned_pulls"):
        if stats["requests"][name]:
            yield f"{stats['requests'][name]} requests {name} after all have ended"
    for name, value in stats["ledger"].items():
        if value:
            yield f"the ledger's {name} is {value}, not 0"


def _of_rows(seen: Seen, rows: Counter[str], plan: SoakPlan) -> Iterable[str]:
    if plan.hostile_share:  # hostile clients' requests have ids of the proxy's or of their own choice
        rows = Counter({each: count for each, count in rows.items() if each.startswith(plan.polite_prefix)})
    several = [request_id for request_id, count in rows.items() if count > 1]
    missing = seen.finished_ids - rows.keys()
    unknown = rows.keys() - seen.finished_ids - seen.left_ids
    for what, ids in (("more than one row", several), ("no row", missing), ("a row but were not sent", unknown)):
        if ids:
            yield f"{len(ids)} requests have {what}: {sorted(ids)[:5]}"


def _of_process(measured: SoakTrends, plan: SoakPlan) -> Iterable[str]:
    if measured.rss_mb.over_window > plan.rss_growth_mb:
        yield (
            f"memory grew by {measured.rss_mb.over_window:.1f} MB over the measured window "
            f"({measured.rss_mb.per_hour:.0f} MB/h), over {plan.rss_growth_mb:g}"
        )
    if measured.descriptors_after > measured.descriptors_before + _SPARE_DESCRIPTORS:
        yield f"{measured.descriptors_after} file descriptors when idle again, {measured.descriptors_before} at first"


def _of_log(log: str) -> Iterable[str]:
    bad = [line for line in log.splitlines() if any(mark in line for mark in _BAD_LINES)]
    if bad:
        yield f"{len(bad)} bad lines in the proxy's log; the first: {bad[0][:300]}"
