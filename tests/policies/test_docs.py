"""docs/policies.md matches the code: defaults, reasons, bounds."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from policies.classes import ClassThresholds
from policies.costs.formulas import PrefillModel, TransferModel
from policies.costs.transfer_constants import TRANSFER_FORMULAS
from policies.hotspots import HotspotTracker
from policies.ledger import Ledger
from policies.offload.cost_model import CostModel
from policies.pairs import PairBreaker
from policies.predict.prefix_index import PrefixIndex
from policies.registry import BUILT_IN, OFFLOAD_GROUP, ROUTING_GROUP, make_planner, make_routing, parameters
from policies.sessions import SessionTable
from policies.types import OffloadReason, Reason

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")


def table(first_column: str) -> dict[str, list[str]]:
    """Rows of the page's tables whose first heading is ``first_column``: name in backticks -> the other cells."""
    rows = re.findall(rf"^\| {first_column} \|.*\n\|[ -:|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert rows, f"docs/policies.md has no table that begins with {first_column!r}"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in "".join(rows).splitlines()]
    return {row[0].strip("`"): row[1:] for row in cells}


def cell_of(defaults: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in defaults.items()) or "none"


def test_the_table_of_policies_is_complete_and_its_defaults_are_those_of_the_code() -> None:
    documented = {name: cells[-1] for name, cells in table("policy").items()}
    assert documented == {name: cell_of(parameters(make_routing(name))) for name in BUILT_IN[ROUTING_GROUP]}


def test_the_readme_counts_the_policies() -> None:
    """Modules of ``policies/baselines`` have other routers' formulas."""
    baselines = [name for name in BUILT_IN[ROUTING_GROUP] if "baselines" in type(make_routing(name)).__module__]
    own = len(BUILT_IN[ROUTING_GROUP]) - len(baselines)
    numbers = dict(enumerate(["seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen"], 7))
    counted = f"{numbers[own]} policies of ours, {numbers[len(baselines)]} baselines"
    assert counted in (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_table_of_planners_is_complete_and_its_defaults_are_those_of_the_code() -> None:
    documented = {name: cells[-1] for name, cells in table("planner").items()}
    assert documented == {name: cell_of(parameters(make_planner(name))) for name in BUILT_IN[OFFLOAD_GROUP]}


@pytest.mark.parametrize(("column", "reasons"), [("reason", Reason), ("offload reason", OffloadReason)])
def test_the_lists_of_reasons_are_those_of_the_code(column: str, reasons: type[StrEnum]) -> None:
    assert list(table(column)) == [reason.value for reason in reasons]
    assert all(cells[0] for cells in table(column).values())


@pytest.mark.parametrize("owner", [PrefixIndex, Ledger, SessionTable, HotspotTracker, ClassThresholds])
def test_the_bounds_of_the_state_are_those_of_the_code(owner: Callable[..., object]) -> None:
    documented = re.findall(r"`(\w+=[^`]+)`", table("state")[owner.__name__][-1])
    signature = inspect.signature(owner).parameters.values()
    assert sorted(documented) == sorted(f"{p.name}={p.default}" for p in signature)


@pytest.mark.parametrize("owner", [PrefillModel, TransferModel, PairBreaker])
def test_the_constants_of_the_cost_models_are_those_of_the_code(owner: Callable[..., object]) -> None:
    parameters_of = inspect.signature(owner).parameters.values()
    public = {p.name: p.default for p in parameters_of if not p.name.startswith("_")}
    assert table("model")[owner.__name__][-1] == cell_of(public)


def test_the_constants_of_the_transports_are_those_of_the_code() -> None:
    documented = {name: [float(cell) for cell in cells[:-1]] for name, cells in table("transport").items()}
    assert documented == {transport.value: list(formula) for transport, formula in TRANSFER_FORMULAS.items()}


def test_every_parameter_of_the_cost_model_is_explained() -> None:
    assert list(table("parameter")) == [field.name for field in dataclasses.fields(CostModel)]


def test_every_input_of_the_cost_model_is_named() -> None:
    source = inspect.getsource(CostModel.plan)
    assert all(f"`{name}`" in PAGE for name in re.findall(r'"(\w+_s)":', source))


def test_the_class_thresholds_in_the_text_are_those_of_the_code() -> None:
    thresholds = ClassThresholds()
    text = f"WARM below {thresholds.medium_tokens:,}, MEDIUM from\n   {thresholds.medium_tokens:,}, HEAVY from"
    assert f"{text} {thresholds.heavy_tokens:,}" in PAGE
