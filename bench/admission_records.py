"""Kept records of admission rules on real engines, and their comparison."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np

from replayer.compare.statistics.bootstrap import FloatArray
from replayer.records.runs import RequestRecord, read_run

ARM_FILE = "arm.json"
RUN_FILE = "run.jsonl"
RESAMPLES = 2000


class NoArmError(ValueError):
    """The folder lacks the arm that others are compared with."""


class RuleArmNote(msgspec.Struct, kw_only=True):
    """Observations beside the records of one arm."""

    label: str
    repeat: int
    trace: str
    started_unix_s: float
    wall_s: float
    counters: dict[str, int]
    """Increase of the engines' counters over the arm, summed over engines."""
    timeline: list[dict[str, float]]
    """Every second: values of the proxy's gauges, and the engines' hits and queries so far."""


class _Figures(msgspec.Struct):
    e2e: dict[str, list[float]]
    """By session: E2E of its turns from when they were due, seconds."""
    ttft: list[float]
    completion: dict[str, float]
    makespan_s: float
    hit_rate: float
    """Cached tokens over prompt tokens, as the engines reported them with each answer. Their counters are no measure of
    it: a request that waits for room is looked up, and counted, at every step.
    """
    failed: int


def _figures(records: Sequence[RequestRecord]) -> _Figures:
    e2e: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    ttft = []
    for each in records:
        if each.e2e_scheduled_s is None:
            continue
        e2e.setdefault(each.session_id, []).append(each.e2e_scheduled_s)
        first[each.session_id] = min(first.get(each.session_id, np.inf), each.scheduled_s)
        last[each.session_id] = max(last.get(each.session_id, 0.0), each.scheduled_s + each.e2e_scheduled_s)
        if each.ttft_scheduled_s is not None:
            ttft.append(each.ttft_scheduled_s)
    return _Figures(
        e2e,
        ttft,
        {name: last[name] - first[name] for name in first},
        max(last.values()) - min(first.values()),
        sum(each.cached_tokens or 0 for each in records) / max(1, sum(each.prompt_tokens or 0 for each in records)),
        sum(not each.ok for each in records),
    )


def records_of(packed: Path) -> list[RequestRecord]:
    """Records of a run that is kept compressed."""
    with TemporaryDirectory() as folder:
        unpacked = Path(folder) / RUN_FILE
        unpacked.write_bytes(gzip.decompress(packed.read_bytes()))
        return read_run(unpacked).records


def lines_of(folder: Path, base: str) -> Iterator[str]:
    """A Markdown table, a row per rule: means over repeats, paired bootstrap intervals over sessions.

    Raises:
        NoArmError: no arm ``base`` was kept.
    """
    arms: dict[str, list[tuple[RuleArmNote, _Figures]]] = {}
    for path in sorted(folder.glob(f"*/{ARM_FILE}")):
        note = msgspec.json.decode(path.read_bytes(), type=RuleArmNote)
        arms.setdefault(note.label, []).append((note, _figures(records_of(path.parent / f"{RUN_FILE}.gz"))))
    if base not in arms:
        raise NoArmError(f"no arm {base} in {folder}; found: {', '.join(arms) or 'none'}")
    yield (
        "| rule | runs | failed | mean E2E s | p50, p90 | mean TTFT s | session completion s: mean, p90 | makespan s "
        "| hit rate | E2E against base | completion against base |"
    )
    yield "| --- | ---: | ---: | --- | --- | --- | --- | --- | --- | --- | --- |"
    for label in [base, *sorted(set(arms) - {base})]:
        runs = arms[label]
        e2e = [np.concatenate([np.array(turns) for turns in figures.e2e.values()]) for _, figures in runs]
        every = np.concatenate(e2e)
        completion = np.concatenate([np.array(list(figures.completion.values())) for _, figures in runs])
        hits = [figures.hit_rate for _, figures in runs]
        against = "– | –"
        if label != base:
            against = (
                f"{_against(_by_session(runs), _by_session(arms[base]))} "
                f"| {_against(_completions(runs), _completions(arms[base]))}"
            )
        yield (
            f"| {label} | {len(runs)} | {sum(figures.failed for _, figures in runs)} "
            f"| {_listed([float(each.mean()) for each in e2e])} "
            f"| {np.quantile(every, 0.5):.2f}, {np.quantile(every, 0.9):.2f} "
            f"| {_listed([float(np.mean(figures.ttft)) for _, figures in runs])} "
            f"| {completion.mean():.1f}, {np.quantile(completion, 0.9):.1f} "
            f"| {_listed([figures.makespan_s for _, figures in runs], 0)} | {_listed(hits)} | {against} |"
        )


def _listed(values: Sequence[float], digits: int = 2) -> str:
    return f"{np.mean(values):.{digits}f} ({', '.join(f'{value:.{digits}f}' for value in values)})"


def _by_session(runs: Sequence[tuple[RuleArmNote, _Figures]]) -> dict[str, float]:
    """Mean over the repeats of the sum of a session's E2E, seconds."""
    sums: dict[str, list[float]] = {}
    for _, figures in runs:
        for name, turns in figures.e2e.items():
            sums.setdefault(name, []).append(sum(turns))
    return {name: float(np.mean(values)) for name, values in sums.items()}


def _completions(runs: Sequence[tuple[RuleArmNote, _Figures]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for _, figures in runs:
        for name, seconds in figures.completion.items():
            found.setdefault(name, []).append(seconds)
    return {name: float(np.mean(values)) for name, values in found.items()}


def _against(candidate: dict[str, float], base: dict[str, float]) -> str:
    """Ratio of means over the sessions of both, with its 95 % bootstrap interval."""
    names = sorted(set(candidate) & set(base))
    ours: FloatArray = np.array([candidate[name] for name in names])
    theirs: FloatArray = np.array([base[name] for name in names])
    draw = np.random.default_rng(0).integers(0, len(names), size=(RESAMPLES, len(names)))
    low, high = np.quantile(ours[draw].sum(axis=1) / theirs[draw].sum(axis=1), (0.025, 0.975))
    return f"{ours.sum() / theirs.sum():.2f} ({low:.2f}–{high:.2f})"
