"""Kept records of runs behind routers, and the pages that state their figures."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from bench.routers.records import RouterRecord, read_records
from replayer.records.runs import RequestRecord

DOCS = Path(__file__).parents[3] / "docs"
RESULTS = DOCS / "results"
README = (DOCS.parent / "README.md").read_text(encoding="utf-8")
PAGE = (DOCS / "head-to-head.md").read_text(encoding="utf-8")


@cache
def runs_of(folder: str) -> list[RouterRecord]:
    """The runs of a folder of ``RESULTS``."""
    return list(read_records(RESULTS / folder).values())


def sent_s(record: RequestRecord) -> float:
    """Time at which the request was sent."""
    assert record.sent_s is not None
    return record.sent_s
