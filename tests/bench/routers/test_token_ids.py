"""Sentences of docs/head-to-head.md and docs/figures.md on the runs with token ids on H200s, from their records."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from bench.routers.records import read_records
from replayer.records.classes import PlannedClass, planned_class
from replayer.records.runs import RequestRecord

_ROOT = Path(__file__).parents[3]
_PAGE = (_ROOT / "docs" / "head-to-head.md").read_text(encoding="utf-8")
_FIGURES = " ".join((_ROOT / "docs" / "figures.md").read_text(encoding="utf-8").split())


@cache
def _every(folder: str) -> dict[str, list[RequestRecord]]:
    found: dict[str, list[RequestRecord]] = {}
    for run in read_records(_ROOT / "docs" / "results" / folder).values():
        found.setdefault(run.label, []).extend(each.record() for each in run.requests)
    return found


def _mean(records: list[RequestRecord], metric: str) -> str:
    return f"{float(np.mean([getattr(each, metric) for each in records])):.1f}"


def _p90(records: list[RequestRecord]) -> str:
    times = [each.ttft_scheduled_s for each in records if each.ttft_scheduled_s is not None]
    return f"{float(np.quantile(times, 0.9)):.1f}"


def _judged(folder: str, since_s: float, *labels: str, only: PlannedClass | None = None) -> list[list[RequestRecord]]:
    return [
        [
            each
            for each in _every(folder)[label]
            if each.trace_timestamp_s >= since_s and only in (None, planned_class(each))
        ]
        for label in labels
    ]


def test_the_second_stretch_of_chat() -> None:
    arms = ("warm", "session_sticky", "vllm:cache_aware")
    folder = "routers-chat-h200-second"
    warm, sticky, vllm = (_mean(each, "e2e_scheduled_s") for each in _judged(folder, 34.8, *arms))
    assert f"mean E2E is {warm} s, {sticky} and {vllm} s with the other two" in _PAGE
    assert f"[{warm} s](head-to-head.md#a-stretch-that-nothing-was-chosen-on) beside {sticky} and {vllm} s" in _FIGURES
    waits = [_p90(each) for each in _judged(folder, 34.8, *arms)]
    assert f"TTFT p90 is {waits[0]} s, {waits[1]} and {waits[2]} s, both surely more" in _PAGE
    short = [_mean(each, "e2e_scheduled_s") for each in _judged(folder, 34.8, *arms, only=PlannedClass.WARM)]
    assert f"{short[0]} s instead of {short[1]} and {short[2]} s (`--class WARM`)" in _PAGE
    long = _judged(folder, 34.8, *arms, only=PlannedClass.HEAVY)
    first = [_mean(each, "ttft_scheduled_s") for each in long]
    assert f"The {len(long[0])} HEAVY prompts" in _PAGE
    assert f"{first[0]} s to their first token, {first[1]} and {first[2]} s with the others (`--class HEAVY`)" in _PAGE
    _all_answered(folder)


def test_agents_on_two_gpus() -> None:
    folder = "routers-agents-h200-2x"
    warm, vllm, lmetric = _judged(folder, 46.6, "warm", "vllm:cache_aware", "lmetric")
    assert f"its TTFT p90 is {_p90(vllm)} s, with `warm` {_p90(warm)} s, surely more" in _PAGE
    assert f"TTFT p90 is {_p90(warm)} instead of {_p90(vllm)} s" in _FIGURES
    whole = [_mean(each, "e2e_scheduled_s") for each in (vllm, warm, lmetric)]
    assert f"(mean E2E {whole[0]} and {whole[1]} s)" in _PAGE
    assert f"(mean E2E {whole[2]} s, E2E p50 +50 % [31, 72])" in _PAGE
    _all_answered(folder)


def test_agents_beside_session_sticky() -> None:
    folder = "routers-agents-h200-2x-second"
    pair = _judged(folder, 46.6, "warm", "session_sticky")
    longest, half = (
        [f"{float(np.quantile([each.e2e_scheduled_s for each in arm], share)):.1f}" for arm in pair]
        for share in (0.9, 0.5)
    )
    assert f"E2E p90 is {longest[0]} s, with `session_sticky` {longest[1]} s (its interval lies above zero" in _PAGE
    assert f"(E2E p50 {half[0]} and {half[1]} s)" in _PAGE
    whole, waits = [_mean(each, "e2e_scheduled_s") for each in pair], [_p90(each) for each in pair]
    assert f"mean E2E {whole[0]} and {whole[1]} s, TTFT p90 {waits[0]} and\n{waits[1]} s." in _PAGE
    assert f"than with `session_sticky` ({waits[0]} and {waits[1]} s)" in _FIGURES
    rates = {
        run.label: sum(each.hit_tokens for each in run.counters) / sum(each.lookup_tokens for each in run.counters)
        for run in read_records(_ROOT / "docs" / "results" / folder).values()
    }
    assert f"hit rate, {rates['session_sticky']:.3f} beside {rates['warm']:.3f}" in _PAGE
    [before] = _judged("routers-agents-h200-2x", 46.6, "warm")
    assert f"`warm` itself took {_mean(before, 'e2e_scheduled_s')} s on\nthe other machine" in _PAGE
    _all_answered(folder)


def _all_answered(folder: str) -> None:
    sent = [each for records in _every(folder).values() for each in records]
    assert all(each.ok for each in sent)
    assert f"All {len(sent):,} requests were answered" in _PAGE
