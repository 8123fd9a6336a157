"""docs/admission.md matches the code: rules, defaults, reasons and constants."""

from __future__ import annotations

from pathlib import Path

from policies.admission.base import MAX_HOLD_S, AdmissionReason
from policies.admission.elsewhere import AGING_S
from policies.admission.losses import HALF_LIFE_S
from policies.registry import ADMISSION_GROUP, BUILT_IN, make_admission, parameters
from tests.policies.test_docs import cell_of

PAGE = (Path(__file__).parents[3] / "docs" / "admission.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the table whose first heading this is."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:end]]


def test_rules_and_their_defaults_are_those_of_the_code() -> None:
    documented = {name.strip("`"): defaults for name, _, defaults in rows("rule")}
    assert documented == {name: cell_of(parameters(make_admission(name))) for name in BUILT_IN[ADMISSION_GROUP]}


def test_reasons_are_those_of_the_code() -> None:
    assert [name.strip("`") for name, _ in rows("reason")] == [reason.value for reason in AdmissionReason]


def test_constants_are_those_of_the_code() -> None:
    assert f"half-life {HALF_LIFE_S:g} s" in PAGE
    assert f"`tokens / (1 + w / {AGING_S:g} s)`" in PAGE
    assert f"`max_hold_s` ({MAX_HOLD_S:g} s)" in PAGE
