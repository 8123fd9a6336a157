"""The HTML page: complete, self-contained, and safe against what files say."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from replayer import figures
from replayer.records import Run
from replayer.report import (
    Arm,
    BreakdownError,
    against_leader,
    compare_all,
    read_breakdown,
    render,
    summarise_arm,
    unique_labels,
)
from replayer.report_cli import register
from tests.report.conftest import make_run

Store = Callable[[Run], Path]
HOSTILE = "<script>alert('x')</script>$\\frac{1$"


class Page(HTMLParser):
    """Collects tags, attributes, ids and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page_of(*runs: Run, **arm: Any) -> str:
    arms = [Arm(label, run, **arm) for label, run in zip(unique_labels(runs), runs, strict=True)]
    comparisons, refusals = compare_all(arms, resamples=1000)
    return render(arms, comparisons, remarks=refusals)


@pytest.fixture(scope="module")
def three_arms() -> str:
    return page_of(
        make_run("round_robin"), make_run("lmetric", slower=0.8, noise_seed=3), make_run("unified", noise_seed=4)
    )


def test_every_arm_is_in_tables_figures_and_verdicts(three_arms: str) -> None:
    text = " ".join(Page(three_arms).text)
    for label in ("round_robin", "lmetric", "unified"):
        assert text.count(label) >= 6
    assert "lmetric against round_robin: better on TTFT p50" in text
    drawings = [attrs for tag, attrs in Page(three_arms).tags if tag == "svg"]
    assert len(drawings) == 7
    assert all("unified" in (attrs["aria-label"] or "") for attrs in drawings)


def test_the_leader_is_the_fastest_of_the_arms_after_the_first_and_the_others_are_held_against_it() -> None:
    runs = {"base": make_run(slower=0.5), "slow": make_run(noise_seed=2), "fast": make_run(slower=0.8, noise_seed=3)}
    arms = [Arm(label, run) for label, run in runs.items()]
    found = [(one.baseline_label, one.candidate_label) for one in against_leader(arms, resamples=1000)]
    assert found == [("fast", "slow")]
    page = render(arms, [], among_the_best=against_leader(arms, resamples=1000))
    assert "fast has the lowest E2E p50" not in page  # verdicts go with comparisons only
    comparisons, _ = compare_all(arms, resamples=1000)
    page = render(arms, comparisons, among_the_best=against_leader(arms, resamples=1000))
    assert "fast has the lowest E2E p50" in page
    assert "slow against fast: worse on TTFT p50" in page
    assert against_leader(arms[:2], resamples=1000) == []


def test_the_page_refers_to_nothing_outside_itself(three_arms: str) -> None:
    for tag, attrs in Page(three_arms).tags:
        assert tag not in {"script", "link", "iframe", "img", "image", "object", "embed", "base", "form"}
        for name, value in attrs.items():
            if name.endswith(("href", "src", "srcset", "action", "data")):
                assert (value or "").startswith("#"), (tag, name, value)
            assert not name.startswith("on")
    assert not re.search(r"@import|url\((?!#)", three_arms)
    assert not re.search(r"https?://", three_arms)


def test_ids_are_unique_where_they_are_referred_to(three_arms: str) -> None:
    ids = [attrs["id"] for _, attrs in Page(three_arms).tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    for reference in re.findall(r'(?:url\(|href=")#([^")]+)', three_arms):
        assert reference in ids


def test_the_rule_for_exclusions_is_told(three_arms: str) -> None:
    assert "No request is left out for warm-up or as an outlier.\nThe intervals cover" in three_arms


def test_conditions_are_told(three_arms: str) -> None:
    text = " ".join(Page(three_arms).text)
    for condition in ("trace_sha256", "ab" * 32, "clock_scale", "seed", "warmroute_version", "0.1.0"):
        assert condition in text


def test_hostile_text_is_shown_as_text() -> None:
    runs = [make_run("a"), make_run(HOSTILE, trace=HOSTILE)]
    for record in runs[1].records:
        record.instance = record.reason = record.session_id = HOSTILE
    runs[1].records[0].ok, runs[1].records[0].error = False, HOSTILE
    arms = [
        Arm(label, run, [{"outcome": HOSTILE, "stages_ms": {HOSTILE: 1.0}}], [HOSTILE])
        for label, run in zip(unique_labels(runs), runs, strict=True)
    ]
    page = render(arms, [], title=HOSTILE, remarks=[HOSTILE])
    assert "<script" not in page
    assert "alert(&#39;x&#39;)" in page
    assert not [tag for tag, _ in Page(page).tags if tag == "script"]


def test_labels_that_would_upset_the_figures_are_drawn() -> None:
    drawing = figures.cdfs({"_hidden": np.array([1.0, 2.0]), "a\x00b": np.array([1.0])}, title="TTFT", unit="s")
    assert "_hidden</text>" in drawing
    assert "\x00" not in drawing


def test_axes_are_labelled_in_plain_numbers(three_arms: str) -> None:
    assert "$" not in three_arms
    assert ">0.5</text>" in three_arms


def test_one_run_makes_a_page_without_verdicts() -> None:
    page = page_of(make_run("alone"))
    assert "<h2>Arms</h2>" in page
    assert "<h2>Verdict</h2>" not in page


def test_a_run_in_which_everything_failed_makes_a_page() -> None:
    page = page_of(make_run("a"), make_run("dead", fail_every=1))
    assert "ReadTimeout" in page
    assert "0 / " in page


def test_unlike_runs_stand_side_by_side_and_the_page_says_why() -> None:
    page = page_of(make_run("a"), make_run("b", time_scale=4.0))
    assert "time_scale differs" in page
    assert "<h2>Verdict</h2>" not in page


def test_warnings_and_breakdown_are_shown() -> None:
    rows: list[dict[str, Any]] = [
        {"outcome": "ok", "offload_reason": "planner_never", "stages_ms": {"decide": value}, "attempts": [1]}
        for value in (0.1, 0.2, 0.3)
    ]
    page = page_of(make_run("a"), breakdown=rows, warnings=["the processors were saturated"])
    assert 'class="warning"' in page
    assert "the processors were saturated" in page
    assert "planner_never 3" in page
    assert "<td>decide</td><td>0.20</td>" in page


def test_summary_by_hand() -> None:
    run = make_run("a", sessions=1)
    del run.records[1:]
    [record] = run.records
    record.ttft_s, record.cached_tokens, record.prompt_tokens, record.predicted_cached_tokens = 2.0, 30, 120, 50
    found = summarise_arm("a", run)
    assert found.summary.total.ttft_s.p99 == 2.0
    assert found.summary.apc == 0.25
    assert found.summary.predicted_error_tokens.mean == found.summary.predicted_bias_tokens == 20
    assert found.new_tokens_by_instance == {"inst-0": 90}
    assert found.imbalance(found.new_tokens_by_instance, 8) == 8.0


def test_a_request_without_cached_tokens_counts_as_cold_where_others_have_them() -> None:
    run = make_run("a", sessions=2, cached_share=0.5)
    run.records[0].cached_tokens = None
    found = summarise_arm("a", run)
    prompt = sum(record.prompt_tokens or 0 for record in run.records)
    assert found.summary.apc == pytest.approx(sum(record.cached_tokens or 0 for record in run.records) / prompt)
    assert sum(found.new_tokens_by_instance.values()) == pytest.approx(prompt * (1 - found.summary.apc))


def test_labels_used_twice_are_numbered() -> None:
    assert unique_labels([make_run("a"), make_run("a"), make_run("")]) == ["a", "a (2)", "run"]


def test_instances_sort_by_number() -> None:
    assert sorted(["inst-10", "inst-2", "b", "7"], key=figures.natural) == ["7", "b", "inst-2", "inst-10"]


def test_command_line_writes_the_page(stored: Store, tmp_path: Path) -> None:
    app = typer.Typer()
    register(app)
    paths = [str(stored(make_run())), str(stored(make_run("slow", slower=1.3, noise_seed=2)))]
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"outcome": "ok", "stages_ms": {"total": 5}}\n')
    output = tmp_path / "deep" / "report.html"
    options = ["--output", str(output), "--breakdown", f"slow={rows}", "--resamples", "1000"]
    result = CliRunner().invoke(app, ["report", *paths, *options])
    assert result.exit_code == 0, result.output
    assert "slow against baseline: worse on" in result.output
    assert "Proxy breakdown: slow" in output.read_text()
    wrong = CliRunner().invoke(app, ["report", *paths, "--breakdown", f"nobody={rows}"])
    assert wrong.exit_code == 2
    assert "ARM one of baseline, slow" in wrong.output


def test_a_broken_breakdown_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"outcome": "ok"}\n[1]\n')
    with pytest.raises(BreakdownError, match=r"rows\.jsonl:2"):
        read_breakdown(path)
