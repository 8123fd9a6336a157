"""docs/reliability.md contains the matrix that the tests run, and names existing tests."""

from __future__ import annotations

import re
from pathlib import Path

from tests.chaos.matrix import CELLS
from tests.chaos.matrix_table import DOCUMENT, between, table

ROOT = Path(__file__).parents[2]


def test_the_document_has_the_matrix() -> None:
    assert between(DOCUMENT.read_text(encoding="utf-8")) == table(), "python -m tests.chaos.matrix_table --write"


def test_no_two_cells_have_the_same_name() -> None:
    ids = [cell.id for cell in CELLS]
    assert len(ids) == len(set(ids))


def test_the_document_names_files_that_exist() -> None:
    named = set(re.findall(r"`((?:tests|bench|docs)/[\w/.]+)`", DOCUMENT.read_text(encoding="utf-8")))
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
