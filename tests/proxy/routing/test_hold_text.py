"""Sentences about admission answers."""

from __future__ import annotations

import pytest

from policies.admission.base import AdmissionReason, Admit, Hold
from proxy.routing.hold_text import held_sentence, offer_sentence


@pytest.mark.parametrize(
    ("hold", "says"),
    [
        (
            Hold(AdmissionReason.WORKING_SET, 1_910_000, 1_920_000, behind=2),
            "held 12 s: working set 1.91 of 1.92 M tokens, third in line",
        ),
        (
            Hold(AdmissionReason.WORKING_SET, 12_340, 10_000, expected_wait_s=7.6),
            "held 12 s: working set 12.3 of 10.0 k tokens, first in line, expected wait 8 s",
        ),
        (
            Hold(AdmissionReason.WORKING_SET, 700, 600, behind=11),
            "held 12 s: working set 700 of 600 tokens, number 12 in line",
        ),
        (
            Hold(AdmissionReason.WORKING_SET, 450_000, 640_000, behind=2, own_tokens=85_000, free_tokens=61_000),
            "held 12 s: no instance has room for 85,000 tokens: best has 61,000, working set 450.0 of 640.0 k tokens, "
            "third in line",
        ),
        (
            Hold(AdmissionReason.AT_CAP, behind=1),
            "held 12 s: as many sessions as permitted are in flight or kept, second in line",
        ),
        (
            Hold(AdmissionReason.AT_CAP, expected_wait_s=3.0, behind=5, tenant="agent-1", behind_in_tenant=2),
            "held 12 s: as many sessions as permitted are in flight or kept, sixth in line, third of tenant agent-1, "
            "expected wait 3 s",
        ),
        (Hold(AdmissionReason.ROOM), "held 12 s: room, first in line"),
    ],
)
def test_a_held_request_is_described(hold: Hold, says: str) -> None:
    assert held_sentence(hold, 12.3) == says
    assert offer_sentence(hold) == says.replace("held 12 s", "would be held")


def test_a_request_that_would_be_sent_is_described() -> None:
    assert offer_sentence(Admit(AdmissionReason.BELOW_CAP)) == "would be sent at once: below cap"
