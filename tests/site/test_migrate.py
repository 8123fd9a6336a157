"""The pages for those who come from another router name flags, settings, policies and endpoints that exist here."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from policies.registry import ADMISSION_GROUP, BUILT_IN, OFFLOAD_GROUP, ROUTING_GROUP
from proxy.settings import ClientKey, InstanceSettings
from proxy.settings.reference import reference
from tests.command_line.commands import option_names, root

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path for path in (DOCS / "migrate").glob("*.md") if path.name != "side-by-side.md")
NAMED = {"policy.name": ROUTING_GROUP, "offload.planner": OFFLOAD_GROUP, "admission.name": ADMISSION_GROUP}
"""Settings whose values are names, and the group of the registry that has them."""

_ENDPOINTS = re.compile(r"(?:GET|POST|PUT|DELETE) (/\S+)")
_VALUE = re.compile(r"(?P<key>[\w.\[\]]+)(?:: (?P<value>\S+))?")


def settings_keys() -> set[str]:
    """Every key, sections with keys below them included; those of list entries as ``instances[].url``."""
    keys = set(re.findall(r"^\| `([\w.]+)` \|", reference().partition("Each entry of")[0], re.MULTILINE))
    return {
        *keys,
        *(f"instances[].{name}" for name in InstanceSettings.model_fields),
        *(f"keys.client[].{name}" for name in ClientKey.model_fields),
    }


def parameters() -> set[str]:
    """Parameters of all routing policies."""
    return {name for policy in BUILT_IN[ROUTING_GROUP].values() for name in inspect.signature(policy).parameters}


def unknown(span: str) -> str | None:
    """Reason for which a code span of the column is nothing of ours; None: it exists."""
    if span.startswith("--"):
        return None if span in option_names(root().commands["serve"]) else "no flag of `warmroute serve`"
    if found := _ENDPOINTS.fullmatch(span):
        documented = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("proxy.md", "operations.md"))
        return None if f"`{span}" in documented or f" {found[1]}`" in documented else "no endpoint of ours"
    named = _VALUE.fullmatch(span)
    if named is None:
        return "neither flag, setting nor endpoint"
    key, value = named["key"], named["value"]
    if key.startswith("policy.params."):
        return None if key.rpartition(".")[2] in parameters() else "no parameter of a policy"
    if key not in settings_keys():
        return "no setting"
    if key in NAMED and value is not None and value not in BUILT_IN[NAMED[key]]:
        return "nothing of that name is registered"
    return None


def rows(page: str) -> list[list[str]]:
    """Cells of the table of flags."""
    found = re.search(r"^\| theirs \| ours \| notes \|\n\|[ -|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert found
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_everything_in_the_column_of_ours_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    table = rows(text)
    assert len(table) >= 14
    problems = []
    for theirs, ours, _ in table:
        spans = re.findall(r"`([^`]+)`", ours)
        assert spans, f"{theirs}: nothing in the column of ours; move it to the other table"
        problems += [f"{theirs}: `{span}`: {reason}" for span in spans if (reason := unknown(span))]
    assert problems == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_settings_named_elsewhere_on_the_page_exist(path: Path) -> None:
    sections = {key.partition(".")[0] for key in settings_keys() if "." in key}
    spans = re.findall(r"`([a-z_]+\.[a-z_.]+)(?:: [^`]+)?`", path.read_text(encoding="utf-8"))
    ours = [span for span in spans if span.partition(".")[0] in sections and not span.endswith((".md", ".py"))]
    assert [span for span in ours if unknown(span)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_states_what_was_read_and_what_has_no_counterpart(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^Read: .*(?:commit )[0-9a-f]{8}\b", text, re.MULTILINE)
    assert "\n## Without a counterpart\n" in text
    assert "(side-by-side.md)" in text


@pytest.mark.parametrize(
    ("span", "known"),
    [
        ("--instance", True),
        ("--worker-urls", False),
        ("limits.queue_size", True),
        ("limits.queue_length", False),
        ("policy.name: warm", True),
        ("policy.name: hot", False),
        ("policy.params.cache_threshold", True),
        ("policy.params.heat", False),
        ("instances[].role", True),
        ("instances[].rank", False),
        ("GET /stats", True),
        ("GET /statistics", False),
        ("two words", False),
    ],
)
def test_what_exists_is_known_and_what_does_not_is_found(span: str, known: bool) -> None:
    assert (unknown(span) is None) is known
