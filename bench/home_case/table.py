"""Markdown of a sustained run, made from its files only."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.home_case.record import SustainedRecord, SustainedRun
from bench.routers.records import totals_of
from replayer.records.breakdown_rows import rows_of
from replayer.records.classes import CLASSES
from replayer.records.readable import DASH, format_number
from replayer.records.runs import RequestRecord
from replayer.records.summary import Quantiles, quantiles, summarise
from replayer.report.decisions import class_matrix
from replayer.report.offloads import LegSummary, offloads
from replayer.report.page import Row

_MIB = 2**20
_RETRIES = ("warmroute_retries_total", "warmroute_resumes_total", "warmroute_queue_refused_total")


def lines_of(found: SustainedRun) -> Iterator[str]:
    """Lines of Markdown: conditions, latencies by class, and figures of proxy, hand-offs and GPUs."""
    yield _conditions(found)
    yield ""
    yield (
        "| requests | ok | TTFT p50 / p90 / p99, s | mean | TPOT p50 / p90 / p99, ms | mean "
        "| E2E p50 / p90 / p99, s | mean |"
    )
    yield "| --- | ---: | --- | ---: | --- | ---: | --- | ---: |"
    yield from _latencies(found)
    yield ""
    yield "| quantity | value |"
    yield "| --- | --- |"
    for name, value in _figures(found):
        yield f"| {name} | {value} |"
    if found.record.problems:
        yield ""
        yield from (f"- {problem}" for problem in found.record.problems)


def _conditions(found: SustainedRun) -> str:
    record, header = found.record, found.run.header
    offered, proxy = header.offered, record.proxy
    engines = record.engines
    versions = ", ".join(sorted({each.version for each in engines if each.version})) or "version unknown"
    kinds = ", ".join(sorted({each.kind for each in engines}))
    pools = " or ".join(f"{tokens:,}" for tokens in sorted({each.pool_tokens for each in engines}))
    roles = ", ".join(f"{count} {role}" for role, count in Counter(each.role for each in engines).items())
    transports = ", ".join(sorted({each.transport for each in engines if each.transport}))
    scale = "" if header.clock_scale == 1 else f", engines at {header.clock_scale:g} x real time"
    return (
        f"**{header.trace}, arrivals {header.time_scale:g} x, think times {header.think_scale:g} x** (at most "
        f"{header.options.get('idle_gap_cap_s')} s): {offered.get('requests')} requests of {offered.get('sessions')} "
        f"sessions, mean prompt {format_number(offered.get('input_mean_tokens'))} tokens. Fleet `{record.fleet}`: "
        f"{len(engines)} engines ({kinds} {versions}; role {roles}"
        f"{f'; KV over {transports}' if transports else ''}; {_hardware(record)}), model {record.model}, pools of "
        f"{pools} tokens{scale}. warmroute {proxy.version} with policy `{proxy.policy.get('name')}`, planner "
        f"`{proxy.policy.get('planner')}`, admission `{proxy.admission.get('name')}`. Replayed for "
        f"{record.replay_s:.0f} s{', cut off by the limit' if record.cut else ''}. Times from when a request was due."
    )


def _hardware(record: SustainedRecord) -> str:
    names = Counter(gpu.name for gpu in record.gpus.gpus)
    return record.hardware or ", ".join(f"{count} x {name}" for name, count in names.items()) or "hardware not stated"


def _latencies(found: SustainedRun) -> Iterator[str]:
    yield _latency("all", found.run.records, int(found.run.header.offered.get("requests", len(found.run.records))))
    decided = {row.get("request_id"): row.get("class") for row in found.rows}
    by_class: dict[str, list[RequestRecord]] = {name: [] for name in CLASSES}
    for each in found.run.records:
        by_class.setdefault(decided.get(each.request_id) or each.request_class or "no class", []).append(each)
    for name, records in by_class.items():
        yield _latency(name, records, len(records))


def _latency(name: str, records: Sequence[RequestRecord], planned: int) -> str:
    good = [each for each in records if each.ok]
    cells = []
    for attribute, unit, digits in (("ttft_scheduled_s", 1.0, 3), ("tpot_s", 1e3, 1), ("e2e_scheduled_s", 1.0, 2)):
        values = quantiles(getattr(each, attribute) for each in good)
        cells += [_three(values, digits, unit), format_number(_scaled(values.mean, unit), digits)]
    return f"| {name} | {len(good)}/{planned} | {' | '.join(cells)} |"


def _three(values: Quantiles, digits: int, unit: float = 1.0) -> str:
    each = (values.p50, values.p90, values.p99)
    return DASH if values.p50 is None else " / ".join(format_number(_scaled(value, unit), digits) for value in each)


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _figures(found: SustainedRun) -> Iterator[tuple[str, str]]:
    record, records, proxy = found.record, found.run.records, found.record.proxy
    summary = summarise(found.run)
    planned = int(found.run.header.offered.get("requests", len(records)))
    failed = ", ".join(f"{count} {reason}" for reason, count in summary.errors.items())
    not_ended = f"; {planned - len(records)} not ended at the limit" if planned > len(records) else ""
    yield "succeeded", f"{summary.ok} of {planned} ({failed or 'none failed'}{not_ended})"
    yield "requests a second", f"{summary.requests_per_s:.2f}"
    yield "sent late by the client, p50 / p90 / p99, s", _three(summary.send_lag_s, 3)
    totals = totals_of([each.counters for each in record.engines])
    yield "hit rate by the engines' counters", f"{totals.hit_rate:.3f}" if totals.prompt else DASH
    yield "hit rate by answers", format_number(summary.apc, 3)
    yield (
        "cached tokens predicted wrongly, mean / p90",
        f"{format_number(summary.predicted_error_tokens.mean)} / {format_number(summary.predicted_error_tokens.p90)}",
    )
    if matrix := class_matrix(records):
        yield "class at the decision as computed", f"{format_number(100 * (matrix.agreeing or 0.0), 1)} %"
    yield from _predictions(found)
    yield from _hand_offs(found)
    yield from _held(found.rows)
    yield "preemptions", format_number(sum(each.counters.preemptions for each in record.engines))
    cpu_s = proxy.cpu_s
    yield "router CPU, ms/request", DASH if cpu_s is None else f"{1e3 * cpu_s / max(1, len(records)):.1f}"
    yield from _memory(record)
    yield "idle after the last request, s", DASH if record.idle_after_s is None else f"{record.idle_after_s:.1f}"
    yield "leaks", "; ".join(record.leaks) or "none"
    yield from _gpus(found.telemetry, record.telemetry)


def _predictions(found: SustainedRun) -> Iterator[tuple[str, str]]:
    for leg in offloads(found.run.records, rows_of(found.rows), found.run.header.clock_scale).legs:
        yield f"{leg.meaning}: predicted within a factor of", _factors(leg)


def _factors(leg: LegSummary) -> str:
    sensible = (leg.predicted_s > 0) & (leg.actual_s > 0)
    logs = np.log(leg.actual_s[sensible] / leg.predicted_s[sensible])
    if not logs.size:
        return DASH
    half, most = np.exp(np.quantile(np.abs(logs), (0.5, 0.9)))
    return (
        f"{half:.2f} in half, {most:.2f} in 90 % of {logs.size} (median {format_number(leg.actual.p50, 3)} s, "
        f"predicted {format_number(leg.predicted.p50, 3)} s; actual / predicted {np.exp(np.median(logs)):.2f})"
    )


def _hand_offs(found: SustainedRun) -> Iterator[tuple[str, str]]:
    handed = offloads(found.run.records, rows_of(found.rows), found.run.header.clock_scale)
    yield "handed off", f"{handed.offloaded} of {handed.requests}"
    yield "planner's reasons", _counts(dict(handed.reasons))
    yield "fallbacks", _counts(dict(handed.fallbacks))
    failed = sum(bool(row.get("attempts")) for row in found.rows)
    counted = {
        name.removeprefix("warmroute_").replace("_total", ""): value
        for name, value in found.record.proxy.counters.items()
        if name.split("{")[0] in _RETRIES
    }
    yield "requests with a failed attempt", str(failed)
    yield "retries, resumes, refusals", _counts(counted)
    yield "reasons of routing", _counts(Counter(str(row["reason"]) for row in found.rows if row.get("reason")))


def _held(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    held = [float(row["held_s"]) for row in rows if row.get("held_s")]
    text = f"{len(held)} of {len(rows)}"
    if held:
        text += (
            f" for {sum(held):.1f} s in all; p50 / p90 / p99 {_three(quantiles(held), 2)} s, longest {max(held):.2f} s"
        )
    yield "held by admission (wall time)", text
    yield "admitted because", _counts(Counter(str(row["admission"]) for row in rows if row.get("admission")))


def _memory(record: SustainedRecord) -> Iterator[tuple[str, str]]:
    proxy = record.proxy
    if not proxy.samples:
        return
    first, last = proxy.samples[0], proxy.samples[-1]
    start, end, most = (value / _MIB for value in (first.rss_bytes, last.rss_bytes, proxy.rss_most_bytes))
    yield "memory of the proxy, start / end / most, MiB", f"{start:.1f} / {end:.1f} / {most:.1f}"
    yield (
        "descriptors of the proxy, start / end / most",
        f"{first.descriptors} / {last.descriptors} / {proxy.descriptors_most}",
    )
    flights = [each.in_flight for each in proxy.samples if each.in_flight is not None]
    waiting = [each.held for each in proxy.samples if each.held is not None]
    yield "in flight, mean / most", f"{np.mean(flights):.1f} / {max(flights):g}" if flights else DASH
    yield "held at once, most", f"{max(waiting):g}" if waiting else DASH


def _gpus(telemetry: str | None, reason: str) -> Iterator[tuple[str, str]]:
    if telemetry is None:
        yield "GPUs", f"no telemetry: {reason}" if reason else "no telemetry"
        return
    by_gpu: dict[str, list[dict[str, Any]]] = {}
    for sample in csv.DictReader(io.StringIO(telemetry)):
        by_gpu.setdefault(sample["gpu"], []).append(sample)
    columns = (("utilisation_percent", 1.0, "%"), ("power_w", 1.0, "W"), ("memory_used_bytes", 2**-30, "GiB"))
    for gpu, samples in sorted(by_gpu.items()):
        parts = []
        for name, unit, suffix in columns:
            values = [float(sample[name]) * unit for sample in samples if sample.get(name)]
            if values:
                parts.append(f"{np.mean(values):.1f} {suffix}")
        yield f"GPU {gpu}, mean utilisation, power, memory", f"{', '.join(parts) or DASH} ({len(samples)} samples)"
    if reason:
        yield "GPU telemetry incomplete", reason


def _counts(counts: dict[str, Any] | Counter[str]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{value:g} {name}" for name, value in ordered) or "none"
