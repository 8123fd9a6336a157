"""docs/reference/failure-matrix.md is the matrix that the tests run; docs/reliability.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.chaos.rig.matrix import CELLS
from tests.chaos.rig.matrix_table import reference

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reliability.md"
MATRIX = ROOT / "docs" / "reference" / "failure-matrix.md"


def test_the_document_has_the_matrix() -> None:
    assert MATRIX.read_text(encoding="utf-8") == reference(), "run `make reference`"


def test_no_two_cells_have_the_same_name() -> None:
    ids = [cell.id for cell in CELLS]
    assert len(ids) == len(set(ids))


def test_the_document_names_files_that_exist() -> None:
    named = set(re.findall(r"`((?:tests|bench|docs)/[\w/.]+)`", DOCUMENT.read_text(encoding="utf-8")))
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
