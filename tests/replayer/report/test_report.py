"""The HTML page: complete, self-contained, printable, and safe against what files say."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replayer.compare.comparison import Comparison
from replayer.compare.runs import ComparisonError, compare
from replayer.records.runs import Run
from replayer.report.figures import latency as figures_latency
from replayer.report.figures import style as figures
from replayer.report.page import (
    Arm,
    Extras,
    Page,
    against_leader,
    compare_all,
    make_page,
    summarise_arm,
    unique_labels,
    write_report,
)
from tests.full_disk import limited_to
from tests.replayer.constructed_runs import make_run

HOSTILE = "<script>alert('x')</script>$\\frac{1$"
LABELS = ("round_robin", "lmetric", "unified")


class Parsed(HTMLParser):
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

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for found, attrs in self.tags if found == tag]


def plain(page: Page) -> str:
    return " ".join(" ".join(Parsed(page.html).text).split())


@pytest.fixture(scope="module")
def three_arms() -> Page:
    runs = [make_run("round_robin"), make_run("lmetric", slower=0.7, noise_seed=3), make_run("unified", noise_seed=4)]
    runs[0].records[3].ok, runs[0].records[3].error = False, "ReadTimeout: no token"
    rows: list[dict[str, Any]] = [
        {
            "request_id": record.request_id,
            "outcome": "ok",
            "offload_reason": "chosen" if number % 2 else "fell_back_p_timeout",
            "stages_ms": {"decide": 0.2},
            "legs": {
                "prefill": {"predicted_s": 1.0, "actual_s": 1.5},
                "transfer": {"predicted_s": 0.1, "actual_s": 0.1},
            },
            "attempts": [1],
        }
        for number, record in enumerate(runs[1].records)
    ]
    for record in runs[1].records[::2]:
        record.prefill_instance = "inst-9"
    arms = [
        Arm("round_robin", runs[0], warnings=["the processors were saturated"]),
        Arm("lmetric", runs[1], rows),
        Arm("unified", runs[2]),
    ]
    comparisons, refusals = compare_all(arms, resamples=1000)
    assert not refusals
    return make_page(arms, comparisons, among_the_best=against_leader(arms, resamples=1000))


@pytest.fixture(scope="module")
def awkward() -> Page:
    """Hostile text everywhere it can come from, an arm in which all failed, runs that must not be compared."""
    runs = [make_run("dead", fail_every=1), make_run(HOSTILE, trace=HOSTILE, time_scale=4.0)]
    for record in runs[1].records:
        record.instance = record.reason = record.session_id = HOSTILE
    runs[1].records[0].ok, runs[1].records[0].error = False, HOSTILE
    row: dict[str, Any] = {"outcome": HOSTILE, "offload_reason": HOSTILE, "stages_ms": {HOSTILE: 1.0}}
    row["legs"] = {HOSTILE: {"predicted_s": 1, "actual_s": 1}}
    fresh = {"engines": [{"instance": HOSTILE, "problems": [HOSTILE]}]}
    arms = [
        Arm(label, run, [row], [HOSTILE], fresh=fresh) for label, run in zip(unique_labels(runs), runs, strict=True)
    ]
    comparisons, refusals = compare_all(arms, resamples=1000)
    extras = Extras(environment={"system": HOSTILE, "files": {HOSTILE: HOSTILE}}, why_no_trace=HOSTILE)
    return make_page(arms, comparisons, title=HOSTILE, remarks=[*refusals, HOSTILE], extras=extras)


@pytest.fixture(scope="module")
def alone() -> Page:
    """One run that says as little as a run can."""
    run = make_run("alone", sessions=12)
    for record in run.records:
        record.instance = record.reason = record.predicted_cached_tokens = record.cached_tokens = None
        record.request_class = None
    return make_page([Arm("alone", run)], [])


def test_every_arm_is_in_tables_figures_and_verdicts(three_arms: Page) -> None:
    text = plain(three_arms)
    for label in LABELS:
        assert text.count(label) >= 6
    assert re.search(r"lmetric against round_robin: [\d–]+ % better on TTFT p50", text)
    assert "lmetric has the lowest E2E p50" in text
    assert re.search(r"unified against lmetric: [\d–]+ % worse on TTFT p50", text)
    names = [drawing.name for drawing in three_arms.drawings]
    shared = ["cdf-TTFT", "cdf-E2E", "cdf-TPOT", "cdf-Session_time", "ttft-by-turn", "fleet-load"]
    shared += ["imbalance-largest_over_mean"]
    shared += ["imbalance-coefficient_of_variation", "instances-requests", "instances-new_tokens", "legs"]
    assert set(names) == {*shared, *(f"{kind}-{label}" for kind in ("load", "timeline") for label in LABELS)}
    for drawing in three_arms.drawings:
        if drawing.name in shared and drawing.name != "legs":
            assert all(label in drawing.description for label in LABELS), drawing.name


def test_sessions_are_counted_and_timed_by_arm(three_arms: Page) -> None:
    text = plain(three_arms)
    assert "share of sessions" in three_arms.html
    # One turn of one session failed in the first arm.
    rows = re.findall(r"(\w+) (\d+) / (\d+) (\d+) (\d+) [\d.]+ s [\d.]+ s [\d.]+ s [\d.]+× [\d.]+× [\d.]+×", text)
    assert rows == [
        ("round_robin", "59", "60", "1", "0"),
        ("lmetric", "60", "60", "0", "0"),
        ("unified", "60", "60", "0", "0"),
    ]
    assert re.search(r"session slowdown mean [\d.]+× [\d.]+× -\d", text), "among the paired changes"


@pytest.mark.usefixtures("undrawn")
def test_repeats_of_a_session_count_as_sessions_of_their_own() -> None:
    runs = [make_run("a", noise_seed=seed) for seed in (1, 2)]
    page = make_page([Arm("a", runs[0], repeats=(Arm("a", runs[1]),))], [])
    assert "120 / 120" in page.html
    assert max(float(each) for each in re.findall(r">([\d.]+)×<", page.html)) < 30


def test_figures_have_titles_and_tables_have_headers(three_arms: Page) -> None:
    parsed = Parsed(three_arms.html)
    drawings = parsed.all("svg")
    assert len(drawings) == len(three_arms.drawings)
    assert all(attrs["role"] == "img" and (attrs["aria-label"] or "").strip() for attrs in drawings)
    assert len(parsed.all("figure")) == len(drawings)
    # Every table has column headers, every body row a row header.
    tables = re.findall(r"<table>.*?</table>", three_arms.html, flags=re.DOTALL)
    assert tables
    for table in tables:
        assert 'scope="col"' in table
        rows = re.findall(r"<tr[^>]*>(.*?)</tr>", table.split("<tbody>")[1], flags=re.DOTALL)
        assert all(row.lstrip().startswith("<th scope=") for row in rows)
    assert '<html lang="en">' in three_arms.html
    assert '<meta name="viewport"' in three_arms.html
    targets = {attrs.get("id") for _, attrs in parsed.tags}
    assert {(attrs["href"] or "").removeprefix("#") for attrs in parsed.all("a")} <= targets


@pytest.mark.parametrize("name", ["three_arms", "awkward", "alone"])
def test_the_page_refers_to_nothing_outside_itself(name: str, request: pytest.FixtureRequest) -> None:
    html = request.getfixturevalue(name).html
    for tag, attrs in Parsed(html).tags:
        assert tag not in {"script", "link", "iframe", "img", "image", "object", "embed", "base", "form"}
        for attribute, value in attrs.items():
            if attribute.endswith(("href", "src", "srcset", "action", "data")):
                assert (value or "").startswith("#"), (tag, attribute, value)
            assert not attribute.startswith("on")
    assert not re.search(r"@import|url\((?!#)", html)
    assert not re.search(r"https?://", html)


def test_ids_are_unique_where_they_are_referred_to(three_arms: Page) -> None:
    ids = [attrs["id"] for _, attrs in Parsed(three_arms.html).tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    for reference in re.findall(r'(?:url\(|href=")#([^")]+)', three_arms.html):
        assert reference in ids


def test_the_page_can_be_printed(three_arms: Page) -> None:
    printed = three_arms.html.split("@media print {")[1].split("</style>")[0]
    assert "size: A4" in printed
    assert "section.page { break-before: page; }" in printed
    assert re.search(r"tr, figure[^}]*break-inside: avoid", printed)
    assert "table-header-group" in printed
    assert "--page: #fff" in three_arms.html
    assert "background: var(--page)" in three_arms.html
    assert three_arms.html.count('class="page"') >= 5


def test_the_verdict_comes_first_then_figures_then_tables_and_the_fine_print_is_folded(three_arms: Page) -> None:
    html = three_arms.html
    places = [html.index(f'id="{name}"') for name in ("verdict", "latency", "arms", "changes", "hits")]
    assert places == sorted(places)
    assert html.index('class="matrix"') < html.index("<svg") < html.index("<table>")
    folded = " ".join(re.findall(r"<details>.*?</details>", html, flags=re.DOTALL))
    for fine_print in ("p (Holm)", "smallest effect found", "No arm was repeated", "lmetric against round_robin: "):
        assert fine_print in folded
        assert fine_print not in re.sub(r"<details>.*?</details>", "", html, flags=re.DOTALL)
    assert "<details open" not in html
    assert "Single runs: noise between runs is assumed, not measured: ±7 % for times" in html[: places[1]]


def test_folded_parts_are_printed_and_paper_is_white_in_either_scheme(three_arms: Page) -> None:
    styles = three_arms.html.split("<style>")[1].split("</style>")[0]
    screen, printed = styles.split("@media print {")
    assert "details::details-content { content-visibility: visible;" in printed
    assert "--page: #fff" in printed
    assert "@media screen and (prefers-color-scheme: dark)" in screen
    assert "figure svg { background: #fff;" in screen


@pytest.mark.usefixtures("undrawn")
def test_several_warnings_are_folded_into_one(three_arms: Page) -> None:
    arms = [Arm("a", make_run("a"), warnings=["one", "two"]), Arm("b", make_run("b"), warnings=["three"])]
    html = make_page(arms, []).html
    [folded] = re.findall(r'<details class="warning">.*?</details>', html, flags=re.DOTALL)
    assert "3 warnings for a, b" in folded
    assert all(f"</strong> {warning}" in folded for warning in ("one", "two", "three"))
    assert '<details class="warning">' not in three_arms.html


def test_what_was_left_out_and_how_sure_it_is_is_stated(three_arms: Page) -> None:
    text = plain(three_arms)
    assert "No request is left out for warm-up or as an outlier." in text
    assert "No arm was repeated" in text
    # Medians with their intervals: "0.951 s 0.8.. s … 1.1.. s".
    assert re.search(r"\d s \d\.\d{3} s … \d\.\d{3} s", text)


def test_conditions_warnings_and_failures_are_shown(three_arms: Page) -> None:
    text = plain(three_arms)
    for condition in ("trace_sha256", "ab" * 32, "clock_scale", "seed", "warmroute_version", "0.1.0"):
        assert condition in text
    assert 'class="warning"' in three_arms.html
    assert "the processors were saturated" in text
    assert "Failed in round_robin: 1 × ReadTimeout: no token" in text


def test_offloads_show_their_legs_and_what_they_fell_back_for(three_arms: Page) -> None:
    text = plain(three_arms)
    assert re.search(r"fell_back_p_timeout \d+", text)
    assert "P leg: prefill on P" in text
    assert "15.000 s" in text  # 1.5 wall seconds at ten times real time
    assert "lmetric decide" in text


def test_pieces_that_are_missing_say_so(alone: Page, three_arms: Page) -> None:
    text = plain(alone)
    assert "Left out: it needs the trace for its block ids: give --trace FILE." in text
    assert "Left out in alone, as there are no breakdown rows" in text
    assert "did not say which instance served them" in text
    assert "No proof of freshness" in text
    assert "not recorded" in text
    assert 'id="verdict"' not in alone.html
    assert "Left out in unified, as there are no breakdown rows" in plain(three_arms)
    assert "Left out in lmetric, as there are no breakdown rows" not in plain(three_arms)


def test_hostile_text_is_shown_as_text(awkward: Page) -> None:
    assert "alert(&#39;x&#39;)" in awkward.html
    assert not Parsed(awkward.html).all("script")
    assert "<script" not in awkward.html
    assert plain(awkward).count("alert('x')") > 15


def test_runs_of_different_conditions_and_one_in_which_all_failed_stand_side_by_side_and_the_page_says_why(
    awkward: Page,
) -> None:
    assert "time_scale differs" in plain(awkward)
    assert 'id="verdict"' not in awkward.html
    assert "ReadTimeout" in awkward.html
    assert "0 / " in awkward.html


def test_a_stale_proof_is_shown_as_such(awkward: Page) -> None:
    assert "not fresh" in plain(awkward)


def test_one_arm_that_cannot_be_compared_does_not_cost_the_others_their_verdict() -> None:
    runs = [make_run("a"), make_run("b", noise_seed=2), make_run("c", time_scale=4.0)]
    arms = [Arm(run.header.label, run) for run in runs]
    comparisons, refusals = compare_all(arms, resamples=1000)
    assert [found.candidate_label for found in comparisons] == ["b"]
    assert len(refusals) == 1
    assert "'c'" in refusals[0]


def test_verdicts_are_those_of_the_compare_command() -> None:
    runs = [make_run("a"), make_run("b", slower=1.3, noise_seed=2)]
    [shown], _ = compare_all([Arm(run.header.label, run) for run in runs], resamples=1000)
    expected: Comparison = compare(*runs, resamples=1000)
    assert shown.as_json() == expected.as_json()
    with pytest.raises(ComparisonError):
        compare(runs[0], make_run("c", time_scale=2.0), resamples=1000)


def test_the_leader_is_the_fastest_of_the_arms_after_the_first_and_the_others_are_held_against_it() -> None:
    runs = {"base": make_run(slower=0.5), "slow": make_run(noise_seed=2), "fast": make_run(slower=0.8, noise_seed=3)}
    arms = [Arm(label, run) for label, run in runs.items()]
    found = [(one.baseline_label, one.candidate_label) for one in against_leader(arms, resamples=1000)]
    assert found == [("fast", "slow")]
    assert against_leader(arms[:2], resamples=1000) == []


def test_an_arm_that_fails_at_the_slow_requests_is_not_the_leader() -> None:
    base, quick, shedding = make_run(), make_run(noise_seed=2), make_run(slower=1.3, noise_seed=3)
    limit_s = sorted(record.e2e_s or 0.0 for record in shedding.records)[len(shedding.records) // 4]
    for record in shedding.records:
        record.ok = (record.e2e_s or 0.0) <= limit_s
    assert median_e2e_s(shedding) < median_e2e_s(quick)
    arms = [Arm("base", base), Arm("quick", quick), Arm("shedding", shedding)]
    [found] = against_leader(arms, resamples=1000)
    assert (found.baseline_label, found.candidate_label) == ("quick", "shedding")
    for record in shedding.records:
        record.ok = record.turn == 1
    for record in quick.records:
        record.ok = record.turn == 2
    assert against_leader(arms, resamples=1000) == []


def median_e2e_s(run: Run) -> float:
    return float(np.median([record.e2e_s for record in run.records if record.ok and record.e2e_s is not None]))


def test_labels_that_would_upset_the_figures_are_drawn() -> None:
    series = {"_hidden": np.array([1.0, 2.0]), "a\x00b": np.array([1.0])}
    drawing = figures_latency.cdfs(series, title="TTFT", unit="s")
    assert drawing is not None
    assert "_hidden</text>" in drawing.inline()
    assert "\x00" not in drawing.inline()


def test_axes_are_labelled_in_plain_numbers_that_no_rounding_touches() -> None:
    drawing = figures_latency.cdfs({"a": np.array([0.0012, 0.004])}, title="TPOT", unit="s")
    assert drawing is not None
    assert "$" not in drawing.inline()
    assert ">0.002</text>" in drawing.inline()
    assert figures_latency.cdfs({"a": np.array([])}, title="TPOT", unit="s") is None


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
    assert found.shares["WARM"].requests == found.shares["WARM"].new_tokens == 1.0


def test_a_request_without_cached_tokens_counts_as_cold_where_others_have_them() -> None:
    run = make_run("a", sessions=2, cached_share=0.5)
    run.records[0].cached_tokens = None
    found = summarise_arm("a", run)
    prompt = sum(record.prompt_tokens or 0 for record in run.records)
    assert found.summary.apc is not None
    assert found.summary.apc == pytest.approx(sum(record.cached_tokens or 0 for record in run.records) / prompt)
    assert sum(found.new_tokens_by_instance.values()) == pytest.approx(prompt * (1 - found.summary.apc))


def test_labels_used_twice_are_numbered() -> None:
    assert unique_labels([make_run("a"), make_run("a"), make_run("")]) == ["a", "a (2)", "run"]


def test_instances_sort_by_number() -> None:
    assert sorted(["inst-10", "inst-2", "b", "7"], key=figures.natural) == ["7", "b", "inst-2", "inst-10"]


def test_a_full_disk_keeps_the_page_before(tmp_path: Path) -> None:
    page = write_report(tmp_path / "pages" / "report.html", "<p>before</p>")
    with limited_to(1000), pytest.raises(OSError, match=r"report\.html"):
        write_report(page, "x" * 2000)
    assert page.read_text() == "<p>before</p>"
    assert list(page.parent.iterdir()) == [page]
