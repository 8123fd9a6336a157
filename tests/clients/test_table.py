"""docs/clients.md is generated, and every row of it has a test."""

from __future__ import annotations

import ast

import pytest

from tests.clients.table import CLIENTS, EXTRA, FEATURES, PAGE, ROOT, page


def functions_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = (each for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    return {each.name for each in functions if each.name.startswith("test_")}


def test_every_row_has_a_test_and_every_test_a_row() -> None:
    assert {each.client for each in FEATURES} == set(CLIENTS)
    for file in {each.file for each in FEATURES}:
        assert {each.test for each in FEATURES if each.file == file} == functions_in(file)


def test_every_test_of_a_client_is_on_the_page() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / EXTRA).glob("test_*.py")}
    assert files - {f"{EXTRA}/test_environments.py"} <= {client.test for client in CLIENTS.values()}


def test_the_page_is_the_generated_one() -> None:
    pytest.importorskip("anthropic")
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.clients.table`"
