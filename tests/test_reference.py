"""docs/reference holds exactly the generated pages, and they agree with the code."""

from __future__ import annotations

import re

import pytest

from tests.proxy.metrics.reference import families, parent_registry, proxy_registry, telemetry_registry
from tests.reference import FOLDER, PAGES


def test_the_folder_has_the_generated_pages_and_no_others() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_generates(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run `make reference`"


def test_the_page_of_metrics_has_every_family_with_its_labels_and_help() -> None:
    page = (FOLDER / "metrics.md").read_text(encoding="utf-8")
    rows = {row[0]: row[3] for row in re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]+) \| ([^|]+) \|", page, re.MULTILINE)}
    known = [
        each for registry in (proxy_registry(), parent_registry(), telemetry_registry()) for each in families(registry)
    ]
    assert len(known) > 25
    assert len(rows) == len(known)
    for family, labels in known:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert family.documentation, name
        assert re.findall(r"\w+", rows[name]) == list(labels), name
