"""``bench.admission``: ratios and their intervals, and the page that shows them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from bench.admission import AdmissionCell, _ratio, harmed, summary_of

DOCS = Path(__file__).resolve().parents[2] / "docs"


class _Document(msgspec.Struct):
    cells: list[AdmissionCell]


def cells() -> list[AdmissionCell]:
    return msgspec.json.decode((DOCS / "results" / "admission.json").read_bytes(), type=_Document).cells


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
