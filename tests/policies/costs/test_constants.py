"""Constants of calibrated hardware as the section ``costs`` of a profile."""

from __future__ import annotations

from typing import Any

import pytest

from policies.costs.constants import CostConstants, PrefillConstants, constants_of
from policies.costs.formulas import TransferJob, transfer_formula
from policies.costs.transfer_constants import KV_BYTES_PER_TOKEN, TransferFormula
from policies.types import Transport

FOUND = CostConstants(
    PrefillConstants(0.1, 2e-5, 3e-9), {Transport.RDMA: TransferFormula(0.02, 0.001, 2e10, 0.1, 0.5)}, 50_000.0
)
JOB = TransferJob(("p", "d"), Transport.RDMA, 20e9, 2, 1)


def test_plain_values_are_read_back() -> None:
    assert constants_of(FOUND.as_mapping()) == FOUND


def test_models_start_from_the_constants() -> None:
    book = FOUND.book()
    assert book.prefill.seconds(10_000, 0) == pytest.approx(0.1 + 0.2 + 3e-9 * 10_000 * 5_000)
    # Published RDMA regimes would give another time for 20 GB: they belong to another fabric.
    assert book.transfer.predict(JOB, 0.0).seconds == pytest.approx(0.02 + 2 * 0.001 + 1.0 * 1.2 * 1.5)
    assert book.at(0.0).bytes_per_token == 50_000.0


def test_transports_that_were_not_measured_stay_as_published() -> None:
    job = JOB._replace(transport=Transport.TCP)
    assert FOUND.book().transfer.predict(job, 0.0).seconds == transfer_formula(job)
    only_prefill = CostConstants(FOUND.prefill)
    assert only_prefill.book().transfer.predict(JOB, 0.0).seconds == transfer_formula(JOB)
    assert only_prefill.kv_bytes_per_token == KV_BYTES_PER_TOKEN


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"prefill": {"fixed_s": 1}}, "costs.prefill: expected the keys"),
        ({"prefill": {**FOUND.prefill._asdict(), "fixed_s": -1}}, "costs.prefill.fixed_s"),
        ({"prefill": {**FOUND.prefill._asdict(), "fixed_s": "1"}}, "costs.prefill.fixed_s"),
        ({"prefill": dict.fromkeys(PrefillConstants._fields, 0)}, "must be above 0"),
        ({"kv_bytes_per_token": 0}, "must be above 0"),
        ({"kv_bytes_per_token": float("nan")}, "kv_bytes_per_token"),
        ({"transfers": []}, "costs.transfers"),
        ({"transfers": {"pigeon": {}}}, "costs.transfers.pigeon: choose among"),
        ({"transfers": {"tcp": dict.fromkeys(TransferFormula._fields, 0)}}, "bytes_per_s: must be above 0"),
        ({"more": 1}, "costs: expected the keys"),
    ],
)
def test_unusable_values_are_named(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        constants_of(FOUND.as_mapping() | change)
