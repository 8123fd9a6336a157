"""The learned time of a short prefill's step, from kept records, as decision 28 and docs/head-to-head.md say."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.gpu.routers_ab import app
from bench.routers.records import RequestFigures, RouterRecord, read_records
from bench.routers.short_steps import SHOWN_SIGMA, learned_steps
from bench.routers.table import lines_of
from policies.routing.warm import Warm

_DOCS = Path(__file__).parents[3] / "docs"
_DECISION = (_DOCS / "decisions" / "0028-learned-step.md").read_text(encoding="utf-8")
_PAGE = (_DOCS / "head-to-head.md").read_text(encoding="utf-8")
_SECTION = _PAGE.partition("### With a learned step")[2].partition("<!-- ")[0].replace("\n", " ")
_FOLDER = "routers-azure-h200-learned-second"
_FORMER = "routers-azure-h200-learned"
_CODE = "routers-azure-code-h200"
_ON_CODE = _PAGE.partition("### Requests for code, on one H200")[2].partition("<!-- ")[0].replace("\n", " ")
_BASE = "warm,learned_step=false"


@cache
def _runs(folder: str) -> list[RouterRecord]:
    return list(read_records(_DOCS / "results" / folder).values())


def _rows() -> list[list[str]]:
    shown = _DECISION.partition("<!-- learned steps: begin -->")[2].partition("<!-- learned steps: end -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.strip().splitlines()[2:]]


@pytest.mark.parametrize("row", _rows(), ids=lambda row: str(row[0]))
def test_the_table_of_the_decision_is_that_of_the_kept_records(row: list[str]) -> None:
    folders = re.findall(r"`([^`]+)`", row[1])
    found = [learned_steps(run.requests) for folder in folders for run in _runs(folder)]
    found = [each for each in found if each.estimates]
    last = [each.estimates[-1] for each in found]
    precise = sorted(each.seconds * 1e3 for each in last if each.sigma < SHOWN_SIGMA)
    shown = f"{precise[0]:.0f} to {precise[-1]:.0f}" if precise else "–"
    replaced = sum(each.replaced > 0 for each in found)
    assert row[2:] == [str(len(found)), str(len(precise)), shown, str(replaced)]


def _quantile(folder: str, label: str, share: float, field: str = "ttft_scheduled_s") -> float:
    """Of the requests planned after the first 20 s, seconds."""
    found = [
        getattr(each.record(), field)
        for run in _runs(folder)
        for each in run.requests
        if run.label == label and each.trace_timestamp_s >= 20.0 * run.load
    ]
    return float(np.quantile([value for value in found if value is not None], share))


def _row_of(lines: list[str], label: str) -> list[str]:
    """The row of differences from the base: TTFT p50 and p90, TPOT, E2E p50 and p90, session time."""
    [line] = [each for each in lines if each.startswith(f"| `{label}` |") and each.count("|") == 10]
    return [cell.strip() for cell in line.split("|")[3:-1]]


def _shown(table: str, label: str) -> list[str]:
    """That row of a table of the page, which is compared with the records in `test_page`."""
    lines = _PAGE.partition(f"<!-- {table}: begin -->")[2].partition(f"<!-- {table}: end -->")[0].splitlines()
    return _row_of(lines, label)


def _answered(folder: str, section: str) -> bool:
    sent = [each for run in _runs(folder) for each in run.requests]
    assert all(each.error is None for each in sent)
    return f"{len(sent):,} requests were answered" in section


def test_what_the_page_says_of_first_tokens() -> None:
    p50, p90 = ([f"{1e3 * _quantile(_FOLDER, label, share):.0f}" for label in ("warm", _BASE)] for share in (0.5, 0.9))
    assert f"TTFT p50 is {p50[0]} instead of {p50[1]} ms and TTFT p90 {p90[0]} instead of {p90[1]} ms" in _SECTION
    assert _answered(_FOLDER, _SECTION)
    changes = _shown("learned step", "warm")
    assert f"({changes[0]} and {changes[1]})" in _SECTION
    assert all("**better**" in each for each in changes[:2])
    former = _row_of(list(lines_of(_runs(_FORMER), _BASE, 20.0)), "warm")
    assert f"neither figure sure: {former[0]} and {former[1]}." in _SECTION
    assert not any("**" in each for each in former[:2])


def _noted_ms(folder: str, label: str) -> list[float]:
    runs = [run for run in _runs(folder) if run.label == label]
    return sorted(float(line.split()[1]) * 1e3 for run in runs for line in run.evidence if "short_prefill" in line)


def test_what_the_page_says_of_the_learned_time() -> None:
    noted = _noted_ms(_FOLDER, "warm")
    assert len(noted) == 3
    assert f"put it at {noted[0]:.0f} to {noted[-1]:.0f} ms" in _SECTION
    found = [learned_steps(run.requests) for run in _runs(_FOLDER) if run.label == "warm"]
    assert f"learned the time within {max(each.first_s or 1e9 for each in found):.0f} s" in _SECTION
    former = sorted(_noted_ms(_FORMER, "warm") + _noted_ms(_FORMER, _BASE))
    assert f"put the time at {former[0]:.0f} to {former[-1]:.0f} ms, so near" in _SECTION


def test_what_the_page_says_of_requests_for_code() -> None:
    rival = "llmd_affinity"
    ttft_ms = [f"{1e3 * _quantile(_CODE, label, 0.9):.0f}" for label in (rival, "warm")]
    e2e_s = [f"{_quantile(_CODE, label, 0.5, 'e2e_scheduled_s'):.2f}" for label in (rival, "warm")]
    changes = _shown("code", rival)
    assert (
        f"TTFT p90 is {ttft_ms[0]} instead of {ttft_ms[1]} ms ({changes[1]}), E2E p50 {e2e_s[0]} instead of "
        in _ON_CODE
    )
    assert f"{e2e_s[1]} s ({changes[4]})" in _ON_CODE
    assert "**worse**" in changes[1]
    assert "**worse**" in changes[4]
    noted = _noted_ms(_CODE, "warm")
    assert f"put at {noted[0]:.0f} to {noted[-1]:.0f} ms" in _ON_CODE
    found = [learned_steps(run.requests) for run in _runs(_CODE) if run.label == "warm"]
    assert sorted(round(each.replaced / len(each.estimates), 1) for each in found) == [0.0, 0.0, 0.4]
    assert _shown("code", _BASE)[1].startswith("+3 % ")
    assert _answered(_CODE, _ON_CODE)


def test_the_command_prints_a_row_for_each_run() -> None:
    printed = CliRunner().invoke(app, ["steps", str(_DOCS / "results" / _FORMER)]).output.splitlines()
    assert len(printed) == 2 + 4
    assert printed[2] == "| `warm,learned_step=false`, 8 x, 1 | 69 | 12 ± 0.4 | 69 | 16 |"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["steps", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "no records" in result.output


def _answer(place: int, first_s: float, tokens: int = 40, **fields: Any) -> RequestFigures:
    """An answer of 20 ms a token."""
    figures = _runs(_FOLDER)[0].requests[0]
    values: dict[str, Any] = {name: getattr(figures, name) for name in figures.__struct_fields__}
    times = {"first_token_s": first_s, "last_token_s": first_s + 0.02 * (tokens - 1), "prompt_tokens": 100}
    return RequestFigures(**{**values, "request_id": str(place), "completion_tokens": tokens, **times, **fields})


def test_requests_without_an_instance_or_a_first_token_are_left_out() -> None:
    answers = [_answer(place, 0.4 * place) for place in range(450)]
    estimates = learned_steps(answers).estimates
    assert len(estimates) == 1 + (450 - 416) // 32
    lost = [_answer(900 + place, 0.4 * place, instance=None) for place in range(50)]
    unread = [_answer(800 + place, 0.4 * place, first_token_s=None) for place in range(50)]
    uncounted = [_answer(700 + place, 0.4 * place, completion_tokens=None) for place in range(50)]
    assert learned_steps([*answers, *lost, *unread, *uncounted]).estimates == estimates
    assert Warm().step_s == 0.04
