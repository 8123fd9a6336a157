"""Goodput: all objectives at once, failures included, TTFT by length where asked."""

from __future__ import annotations

import numpy as np
import pytest

from replayer.compare.goodput import Slo, SloTokens, meets_fixed, meets_scaled
from replayer.compare.pairing import align
from replayer.compare.runs import Comparison, ComparisonError, compare
from replayer.compare.statistics.tests import Effect
from replayer.records.runs import Run
from tests.replayer.constructed_runs import make_run

NAN = float("nan")


def by_name(found: Comparison) -> dict[str, Effect]:
    return {effect.metric: effect for effect in found.effects}


def test_all_objectives_must_be_met() -> None:
    ok = np.array([True, True, True, True, True, False])
    ttft = np.array([1.0, 3.0, 1.0, 1.0, 1.0, 1.0])
    tpot = np.array([0.1, 0.1, 0.3, NAN, 0.1, 0.1])
    e2e = np.array([5.0, 5.0, 5.0, 5.0, 9.0, 5.0])
    slo = Slo(ttft_s=2.0, tpot_s=0.2, e2e_s=6.0)
    # An answer of one token has no TPOT to miss; a failed request meets nothing.
    assert meets_fixed(slo, ok, ttft, tpot, e2e).tolist() == [True, False, False, True, False, False]


def test_the_scaled_objective_grows_with_the_tokens() -> None:
    ok = np.ones(4, dtype=bool)
    ttft, tokens = np.array([1.0, 1.1, 3.0, 3.1]), np.array([0.0, 0.0, 4000.0, 4000.0])
    slo = Slo(ttft_base_s=1.0, ttft_per_1k_tokens_s=0.5, tpot_s=0.2)
    free = np.full(4, 0.1)
    assert meets_scaled(slo, ok, ttft, free, free, tokens).tolist() == [True, False, True, False]
    assert not meets_scaled(slo, ok, ttft, free + 1, free, tokens).any()
    assert slo.describe_scaled() == "TTFT ≤ 1 s + 0.5 s per 1,000 prompt tokens, TPOT ≤ 0.2 s"


def test_goodput_is_a_share_of_all_requests_and_a_rate() -> None:
    baseline, candidate = make_run(), make_run("slow", slower=1.5, fail_every=7)
    slo = Slo(ttft_s=1.0, tpot_s=0.012)
    found = compare(baseline, candidate, slo=slo)
    effect = by_name(found)["goodput"]

    def good(run: Run) -> int:
        return sum(
            record.ok and (record.ttft_s or 0.0) <= 1.0 and (record.tpot_s or 0.0) <= 0.012 for record in run.records
        )

    total = len(baseline.records)
    assert effect.baseline == pytest.approx(good(baseline) / total)
    assert effect.candidate == pytest.approx(good(candidate) / total)
    assert effect.requests == total
    assert not effect.lower_is_better
    assert effect.verdict.value == "worse"
    ends = [max(record.finished_s or 0.0 for record in run.records) for run in (baseline, candidate)]
    start = baseline.records[0].scheduled_s
    rates = found.goodput_per_s["goodput"]
    assert rates == pytest.approx((good(baseline) / (ends[0] - start), good(candidate) / (ends[1] - start)))
    assert found.as_json()["goodput_per_s"]["goodput"]["baseline"] == pytest.approx(rates[0])


def test_both_kinds_side_by_side_and_neither_unasked() -> None:
    slo = Slo(ttft_s=1.0, ttft_base_s=0.5, ttft_per_1k_tokens_s=0.1)
    names = by_name(compare(make_run(), make_run("b"), slo=slo))
    assert {"goodput", "goodput, scaled SLO"} <= names.keys()
    assert not {"goodput", "goodput, scaled SLO"} & by_name(compare(make_run(), make_run("b"))).keys()


def test_new_tokens_are_what_the_plan_adds_not_what_an_arm_missed() -> None:
    run = make_run(sessions=1, seed=5)
    lengths = [record.input_length for record in run.records]
    assert len(lengths) > 2
    for record in run.records:
        record.output_length = 100
    requests, _ = align([run], clock="sent")
    assert requests.added_tokens.tolist() == [lengths[0], *[1000 - 100] * (len(lengths) - 1)]
    # A prompt that does not hold its history (the client cut it) is all new.
    run.records[1].input_length = 500
    requests, _ = align([run], clock="sent")
    assert requests.added_tokens[1] == 500
    slo = Slo(ttft_base_s=0.2, ttft_per_1k_tokens_s=0.5, tokens=SloTokens.NEW)
    assert "per 1,000 new tokens" in slo.describe_scaled()


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        (Slo(ttft_s=0.0), "--slo-ttft-s must be above 0"),
        (Slo(e2e_s=-1.0), "--slo-e2e-s must be above 0"),
        (Slo(ttft_base_s=0.0, ttft_per_1k_tokens_s=0.0), "nor both 0"),
        (Slo(ttft_base_s=-1.0, ttft_per_1k_tokens_s=2.0), "must not be below 0"),
    ],
)
def test_objectives_nobody_can_mean_are_refused(slo: Slo, message: str) -> None:
    with pytest.raises(ComparisonError, match=message):
        compare(make_run(), make_run("b"), slo=slo)
