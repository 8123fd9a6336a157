"""Tables of the pages about instruments and the records that they come from, for the tests that compare them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
RECORDS = REPOSITORY / "docs" / "results" / "instruments"
PAGES = {
    name: (REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("instruments", "instruments-h100")
}
PAGE = PAGES["instruments"]
STAGES = ("p_queue_s", "p_prefill_s", "d_queue_s", "control_s", "wire_s", "admission_s")

Row = dict[str, Any]


def rows_of(record: str) -> list[Row]:
    """Rows of a record, named by its path below the folder of records, without ``.json``."""
    rows: list[Row] = json.loads((RECORDS / f"{record}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def sends(record: str) -> Iterator[Row]:
    """Lines of P's worker among the hooks' lines of a ``.jsonl``, named as in ``rows_of``."""
    for line in (RECORDS / f"{record}.jsonl").read_text(encoding="utf-8").splitlines():
        row: Row = json.loads(line)
        if row["kind"] == "send":
            yield row


def table(heading: str, header: str) -> list[list[str]]:
    """Cells of the table below a heading, of any page and level, whose header begins with a text."""
    sections = [
        section
        for page in PAGES.values()
        for section in re.split(r"^#+ ", page, flags=re.MULTILINE)
        if section.startswith(f"{heading}\n")
    ]
    [section] = sections
    lines = section[section.index(header) :].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def number(cell: str) -> float:
    found = re.match(r"[\d,.]+", cell)
    assert found, cell
    return float(found[0].rstrip(",.").replace(",", ""))


def shown(cell: str, value: float) -> bool:
    """True if a cell shows a value, rounded to the digits that it has."""
    text = cell.split(maxsplit=1)[0]
    digits = len(text.partition(".")[2])
    return abs(number(text) - value) <= 0.5 * 10**-digits + 1e-9


def about(cell: str, value: float) -> bool:
    """True if a cell shows a value as ``shown``, or to three digits."""
    return shown(cell, value) or abs(number(cell) / value - 1) < 0.005
