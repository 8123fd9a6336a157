"""The reference of policies has every built-in one with its formula, inputs, parameters, source and complexity."""

from __future__ import annotations

import pytest

from policies.registry import BUILT_IN
from tests.policies.pages.reference import complexity, inputs, markdown, reference

CLASSES = {f"{group}/{name}": each for group, built_in in BUILT_IN.items() for name, each in built_in.items()}


def test_every_built_in_one_has_a_section() -> None:
    page = reference()
    for name in CLASSES:
        assert f"\n### `{name.rpartition('/')[2]}`\n" in page, name
    assert page.count("\n### ") == len(CLASSES) > 20


@pytest.mark.parametrize("name", CLASSES)
def test_a_docstring_states_complexity_and_those_of_baselines_their_source(name: str) -> None:
    policy = CLASSES[name]
    assert complexity(policy).startswith("O(")
    assert "**Source:** " in markdown(policy.__doc__ or "") or not policy.__module__.startswith("policies.baselines")
    assert "``" not in markdown(policy.__doc__ or "")


def test_inputs_are_those_of_a_decision() -> None:
    assert {"own_s", "others_s"} <= set(inputs(CLASSES["warmroute.routing/warm"]))
    assert "transfer_s" in inputs(CLASSES["warmroute.offload/cost_model"])
    assert "fleet.pool_tokens" in inputs(CLASSES["warmroute.admission/working_set"])
    assert inputs(CLASSES["warmroute.admission/never_hold"]) == []


def test_paragraphs_items_and_labels() -> None:
    text = "One ``a``\ntwo.\n\nRules:\n- first\n  more\n- second\n\nSource: a book. Complexity: O(n)."
    assert markdown(text) == "One `a` two.\n\nRules:\n\n- first more\n- second\n\n**Source:** a book."

    class Silent:
        """Nothing about its cost."""

    with pytest.raises(ValueError, match="Silent"):
        complexity(Silent)
