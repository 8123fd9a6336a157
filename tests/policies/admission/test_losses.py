"""``Losses``: the time and the tokens lost by recomputation."""

from __future__ import annotations

import pytest

from policies.admission.losses import HALF_LIFE_S, Losses
from policies.costs.formulas import PrefillModel

MODEL = PrefillModel()


def test_only_what_was_computed_before_and_is_not_cached_is_lost() -> None:
    losses = Losses()
    losses.sent("a", MODEL, 10_000, 8_000, 8_000, 0.0)
    assert losses.share(1, 0.0) == 0.0
    losses.sent("a", MODEL, 10_000, 8_000, 2_000, 0.0)
    expected_s = MODEL.predict(8_000, 2_000).seconds - MODEL.predict(2_000, 8_000).seconds
    share = losses.share(2, 0.0)
    assert share == pytest.approx(expected_s * 0.6931471805599453 / (HALF_LIFE_S * 2))
    assert losses.share(2, HALF_LIFE_S) == pytest.approx(share / 2)


def test_what_the_engine_reports_corrects_what_was_predicted() -> None:
    losses, right = Losses(), Losses()
    right.sent("a", MODEL, 10_000, 8_000, 2_000, 0.0)
    work = (10_000, 8_000, 8_000)  # evicted while its request waited in the engine's queue
    losses.sent("a", MODEL, *work, 0.0)
    losses.reported("a", MODEL, *work, 2_000, 0.0)
    assert losses.share(1, 0.0) == pytest.approx(right.share(1, 0.0))
    assert losses.tokens == 6_000
    losses.sent("a", MODEL, 10_000, 8_000, 2_000, 0.0)  # predicted too little: pulled from elsewhere
    losses.reported("a", MODEL, 10_000, 8_000, 2_000, 8_000, 0.0)
    assert losses.share(1, 0.0) == pytest.approx(right.share(1, 0.0))


def test_an_engine_that_reports_no_cached_tokens_corrects_nothing() -> None:
    losses = Losses()
    work = (10_000, 8_000, 8_000)
    losses.sent("a", MODEL, *work, 0.0)
    losses.reported("a", MODEL, *work, 0, 0.0)
    assert (losses.share(1, 0.0), losses.tokens) == (0.0, 0)
    losses.reported("a", MODEL, *work, 8_000, 0.0)
    losses.reported("a", MODEL, *work, 0, 0.0)
    assert losses.tokens == 8_000
    assert losses.share(1, 0.0) > 0.0


def test_a_fleet_that_only_recomputes_has_a_share_of_one() -> None:
    losses = Losses()
    each_s = MODEL.predict(50_000, 0).seconds - MODEL.predict(0, 50_000).seconds
    for number in range(2_000):
        losses.sent("a", MODEL, 50_000, 50_000, 0, number * each_s)
    assert losses.share(1, 2_000 * each_s) == pytest.approx(1.0, rel=0.1)
