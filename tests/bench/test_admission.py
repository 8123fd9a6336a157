"""``bench.admission``: ratios and their intervals, and the page that shows them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from bench.admission import AdmissionCell, _ratio, harmed, summary_of
from bench.tournament.results import GridCell

DOCS = Path(__file__).resolve().parents[2] / "docs"


class _Document(msgspec.Struct):
    cells: list[AdmissionCell]


def cells(name: str = "admission") -> list[AdmissionCell]:
    return msgspec.json.decode((DOCS / "results" / f"{name}.json").read_bytes(), type=_Document).cells


def test_a_ratio_of_means_has_an_interval_around_it() -> None:
    base = np.array([10.0, 20.0, 30.0, 40.0] * 20)
    ratio, low, high = _ratio(base * 0.5, base, seed=1)
    assert (ratio, low, high) == (0.5, 0.5, 0.5)
    noise = np.random.default_rng(1).normal(0.0, 5.0, base.size)
    ratio, low, high = _ratio(base * 0.5 + noise, base, seed=1)
    assert low < ratio < high
    assert 0.4 < low < high < 0.6


def test_harm_is_what_lies_beyond_its_interval() -> None:
    first = cells()[0]
    rule = first.rules[0]
    worse = msgspec.structs.replace(rule, e2e=(1.10, 1.04, 1.2), completion=(1.2, 1.02, 1.4))
    assert len(harmed([msgspec.structs.replace(first, rules=[worse])])) == 1


def test_the_page_shows_the_kept_results() -> None:
    page = (DOCS / "admission.md").read_text(encoding="utf-8")
    assert "\n".join(summary_of(cells())) in page
    assert not harmed(cells()), "the page says that no run is worse beyond its interval"


def test_the_page_shows_the_results_of_the_present_rule() -> None:
    page = (DOCS / "admission.md").read_text(encoding="utf-8")
    section = page.partition("### The present rule\n")[2].partition("\n### ")[0]
    new, before = cells("admission-room"), {_key(each): each for each in cells("admission-present")}
    assert "\n".join(summary_of(new)) in section
    assert f"({len(new)} runs)" in section
    harmful = {found.partition(", working_set")[0] for found in harmed(new)}
    assert (len(harmful), sum("mooncake load 1 pool 1" in each for each in harmful)) == (4, 3)
    ratios = {seed: _mean([each.rules[0].e2e[0] for each in new if each.seed == seed]) for seed in (1, 4)}
    pairs = [(each.rules[0].figures, before[_key(each)].rules[0].figures) for each in new if each.seed == 1]
    e2e = [one.e2e_mean_s / other.e2e_mean_s for one, other in pairs]
    p50 = _mean([one.e2e_p50_s / other.e2e_p50_s for one, other in pairs])
    ttft = _mean([one.ttft_mean_s / other.ttft_mean_s for one, other in pairs])
    former = _mean([before[_key(each)].rules[0].e2e[0] for each in new if each.seed == 1])
    assert f"In the same {len(pairs)} cells of seed 1 mean E2E is {_mean(e2e)} times" in section
    assert f"E2E p50 {p50} and mean TTFT, time in line included, {ttft} times" in section
    assert f"in single cells {min(e2e):.2f} to {max(e2e):.2f} times" in section
    assert f"it is {ratios[1]} with seed 1 ({former} before) and {ratios[4]} with seed 4" in section


def test_the_decision_on_those_who_wait_shows_its_grid() -> None:
    page = (DOCS / "decisions" / "0032-those-who-wait.md").read_text(encoding="utf-8")
    new, before = cells("admission-idle"), {_key(each): each for each in cells("admission-room")}
    for seed, name in ((1, "seed 1"), (4, "the same with seed 4")):
        pairs = [(each.rules[0].figures, before[_key(each)].rules[0].figures) for each in new if each.seed == seed]
        e2e = [one.e2e_mean_s / other.e2e_mean_s for one, other in pairs]
        assert f"{name} | {len(pairs)} | {_mean(e2e)} | {min(e2e):.2f} to {max(e2e):.2f} |" in page
    found = [each.partition(", working_set")[0] for each in harmed(new)]
    earlier = [each.partition(", working_set")[0] for each in harmed(list(before.values()))]
    assert (len(found), len(set(found)), len(earlier), len(set(earlier))) == (9, 5, 7, 4)
    assert "nine figures of five runs (of 540)" in page
    assert "seven figures of four runs before" in page


def _key(each: AdmissionCell) -> tuple[GridCell, int]:
    return each.cell, each.seed


def _mean(ratios: list[float]) -> str:
    return f"{np.exp(np.mean(np.log(ratios))):.2f}"
