"""Sentences of docs/head-to-head.md and docs/figures.md on short prompts on one H200, computed from their records."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bench.routers.records import read_records
from replayer.records.runs import RequestRecord

_ROOT = Path(__file__).parents[3]
_PAGE = (_ROOT / "docs" / "head-to-head.md").read_text(encoding="utf-8")
_FIGURES = (_ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
_SECTION = _PAGE.partition("### Short prompts, on one H200")[2].partition("<!-- short prompts, first: begin -->")[0]
_FOLDERS = ("routers-azure-h200-first", "routers-azure-h200", "routers-rag-h200")


@cache
def _runs(folder: str) -> list[tuple[str, float, list[RequestRecord]]]:
    """Label, load, and requests of each kept run."""
    kept = read_records(_ROOT / "docs" / "results" / folder).values()
    return [(run.label, run.load, [each.record() for each in run.requests]) for run in kept]


def _judged(folder: str, label: str, load: float, since_s: float) -> list[RequestRecord]:
    return [
        each
        for ran, at, records in _runs(folder)
        for each in records
        if (ran, at) == (label, load) and each.trace_timestamp_s >= since_s * load
    ]


def _mean_e2e(records: list[RequestRecord]) -> str:
    return f"{np.mean([each.e2e_scheduled_s for each in records]):.2f}"


def _first_ms(records: list[RequestRecord], share: float) -> str:
    waits = [each.ttft_scheduled_s for each in records if each.ttft_scheduled_s is not None]
    return f"{1000 * float(np.quantile(waits, share)):.0f}"


_ARMS = ("warm", "llmd_affinity", "vllm:cache_aware")


def test_retrieval() -> None:
    warm, llmd, vllm = (_judged("routers-rag-h200", label, 2.0, 5.3) for label in _ARMS)
    assert f"TTFT p90 is {_first_ms(warm, 0.9)} ms, with `llmd_affinity` {_first_ms(llmd, 0.9)} and with" in _SECTION
    assert f"vLLM Router's `cache_aware` {_first_ms(vllm, 0.9)} ms, both surely less" in _SECTION
    assert f"(mean {_mean_e2e(warm)}, {_mean_e2e(llmd)} and {_mean_e2e(vllm)} s)" in _SECTION
    assert f"(TTFT p90 of retrieval {_first_ms(warm, 0.9)} instead of {_first_ms(llmd, 0.9)} ms)" in _FIGURES
    alone = _judged("routers-rag-h200", "warm,step_s=0", 2.0, 5.3)
    assert f"TTFT p90 of retrieval is {_first_ms(alone, 0.9)} ms, surely less" in _SECTION


@pytest.mark.parametrize(
    ("sentence", "folder", "load", "since_s", "share"),
    [
        ("load TTFT p90 is {}, {} and {} ms, surely less too", "routers-azure-h200-first", 1.0, 19.1, 0.9),
        ("at 1.5 times TTFT p50 is {}, {} and {} ms", "routers-azure-h200", 1.5, 11.6, 0.5),
    ],
)
def test_conversations(sentence: str, folder: str, load: float, since_s: float, share: float) -> None:
    waits = [_first_ms(_judged(folder, label, load, since_s), share) for label in _ARMS]
    assert sentence.format(*waits) in _SECTION


def test_conversations_without_shared_steps() -> None:
    alone = _judged("routers-azure-h200", "warm,step_s=0", 1.5, 11.6)
    assert f"is {_first_ms(alone, 0.5)} ms (-47 % [-52, -42])" in _SECTION.replace("\n", " ")


def test_a_gpu_each() -> None:
    section = _PAGE.partition("### Short prompts, with a GPU each")[2].partition("<!-- ")[0].replace("\n", " ")
    conversations, retrieval = (
        [_judged(folder, label, 1.0, since_s) for label in ("warm,step_s=0", "warm")]
        for folder, since_s in (("routers-azure-h200-2x", 28.8), ("routers-rag-h200-2x", 23.7))
    )
    first = [_first_ms(arm, 0.5) for arm in (*conversations, *retrieval)]
    assert f"(TTFT p50 {first[0]} instead of {first[1]} ms for conversations, {first[2]} instead of" in section
    assert f"instead of {first[3]} ms for retrieval)" in section
    whole = [_mean_e2e(arm) for arm in (*conversations, *retrieval)]
    assert f"(mean E2E {whole[0]} instead of {whole[1]} s, {whole[2]} instead of {whole[3]} s)" in section
    sent = [each for name in ("azure", "rag") for run in _runs(f"routers-{name}-h200-2x") for each in run[2]]
    assert all(each.ok for each in sent)
    assert f"All {len(sent):,} requests were answered" in section
    rows = [_row(f"short prompts, own GPUs{name}", 1, "warm,step_s=0") for name in ("", ", retrieval")]
    for metric, place in (("TTFT p50", 0), ("TPOT p50", 2), ("E2E p50", 4)):
        [line] = [each for each in _PAGE.splitlines() if each.startswith(f"| {metric} |") and rows[0][place] in each]
        cells = [cell.strip() for cell in line.split("|")]
        assert (cells[3], cells[5]) == (rows[0][place], rows[1][place])
    assert not any("**" in cell for row in rows for cell in row)


def _row(table: str, nth: int, arm: str) -> list[str]:
    """Changes of an arm against `warm` in a table of that name: TTFT p50, p90, TPOT p50, p90, E2E p50, p90."""
    shown = _PAGE.partition(f"<!-- {table}: begin -->")[2].partition(f"<!-- {table}: end -->")[0]
    compared = shown.split("| against `warm`")[nth]
    line = next(each for each in compared.splitlines() if each.startswith(f"| `{arm}` |"))
    return [cell.strip() for cell in line.split("|")[3:9]]


def test_changes_are_those_of_the_tables() -> None:
    first = _row("short prompts, first", 1, "llmd_affinity")
    retrieval = _row("short prompts, retrieval", 1, "llmd_affinity")
    for place, metric in ((1, "TTFT p90"), (2, "TPOT p50"), (4, "E2E p50")):
        [line] = [each for each in _SECTION.splitlines() if each.startswith(f"| {metric} |")]
        cells = [cell.strip() for cell in line.split("|")]
        assert cells[3] == first[place].removesuffix(" **better**")
        assert cells[5] == retrieval[place].removesuffix(" **better**")
    for table, nth, place, arms in (
        ("short prompts, first", 1, 1, _ARMS[1:]),
        ("short prompts, retrieval", 1, 1, (*_ARMS[1:], "warm,step_s=0")),
        ("short prompts", 1, 0, (*_ARMS[1:], "warm,step_s=0")),
    ):
        assert all(_row(table, nth, arm)[place].endswith("**better**") for arm in arms)
    assert _row("short prompts, retrieval", 1, "warm,step_s=0")[1] == "-34 % [-38, -30] **better**"
    assert _row("short prompts", 1, "warm,step_s=0")[0] == "-47 % [-52, -42] **better**"
    sure = [_row("short prompts", 2, arm) for arm in (*_ARMS[1:], "warm,slowdown=0", "warm,step_s=0")]
    assert not any("**" in row[place] for row in sure for place in (0, 1, 4, 5))


def test_all_were_answered() -> None:
    sent = [each for folder in _FOLDERS for _, _, records in _runs(folder) for each in records]
    assert all(each.ok for each in sent)
    assert f"All {len(sent):,} requests were answered" in _SECTION
