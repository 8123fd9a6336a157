"""docs/clients.md is generated, and every row of it has a test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.clients.table import FEATURES, PAGE, page

HERE = Path(__file__).parent


def functions_in(client: str) -> set[str]:
    tree = ast.parse((HERE / f"test_{client}.py").read_text(encoding="utf-8"))
    functions = (each for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    return {each.name for each in functions if each.name.startswith("test_")}


def test_every_row_has_a_test_and_every_test_a_row() -> None:
    for client in {each.client for each in FEATURES}:
        assert {each.test for each in FEATURES if each.client == client} == functions_in(client)


def test_the_page_is_the_generated_one() -> None:
    pytest.importorskip("anthropic")
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.clients.table`"
