"""Request classes."""

from __future__ import annotations

import pytest

from policies.classes import ClassThresholds
from policies.types import RequestClass


@pytest.mark.parametrize(
    ("new_tokens", "expected"),
    [
        (0, RequestClass.WARM),
        (4_999, RequestClass.WARM),
        (5_000, RequestClass.MEDIUM),
        (19_999, RequestClass.MEDIUM),
        (20_000, RequestClass.HEAVY),
        (10**9, RequestClass.HEAVY),
    ],
)
def test_a_threshold_belongs_to_the_class_above_it(new_tokens: int, expected: RequestClass) -> None:
    assert ClassThresholds().classify(new_tokens) is expected


def test_thresholds_can_be_moved() -> None:
    thresholds = ClassThresholds(medium_tokens=10, heavy_tokens=11)
    assert [thresholds.classify(n) for n in (9, 10, 11)] == list(RequestClass)


@pytest.mark.parametrize(("medium", "heavy"), [(0, 10), (-1, 10), (10, 10), (20_000, 5_000)])
def test_thresholds_out_of_order_are_refused_with_both_values(medium: int, heavy: int) -> None:
    with pytest.raises(ValueError, match=f"0 < medium_tokens < heavy_tokens.*{medium}.*{heavy}"):
        ClassThresholds(medium, heavy)
