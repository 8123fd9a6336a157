"""``make audit`` with possible answers of pip-audit: it fails for a vulnerability and never ignores one silently."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / ".ci" / "audit.py"
JINJA = {
    "name": "jinja2",
    "version": "2.4.1",
    "vulns": [{"id": "PYSEC-2014-8", "aliases": ["CVE-2014-1402"], "fix_versions": ["2.7.2"], "description": "…"}],
}
SOUND = {"name": "h11", "version": "0.16.0", "vulns": []}
UNKNOWN = {"name": "ours", "skip_reason": "Dependency not found on PyPI and could not be audited: ours (1.0)"}


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("answer", "stderr", "ignored", "code", "says"),
    [
        ([SOUND], "No known vulnerabilities found", {}, 0, "1 packages audited, 0 vulnerable"),
        ([SOUND, JINJA], "Found 1 known vulnerability", {}, 1, "VULNERABLE jinja2 2.4.1: PYSEC-2014-8, fixed in 2.7.2"),
        ([JINJA], "", {"CVE-2014-1402": "no sandbox here"}, 0, "(ignored: no sandbox here)"),
        ([JINJA], "", {"CVE-2000-1": "old"}, 1, "VULNERABLE"),
        ([SOUND], "", {"CVE-2000-1": "old"}, 0, "no longer reported, take it out of the ignored: CVE-2000-1"),
        ([SOUND, UNKNOWN], "", {}, 0, "not audited, since the index does not know them: ours"),
        ([UNKNOWN], "No known vulnerabilities found", {}, 0, "advisories could not be reached"),
        (None, "requests.exceptions.ConnectionError: Max retries exceeded", {}, 0, "advisories could not be reached"),
        (None, "ERROR: requirements.lock: no such file", {}, 1, "pip-audit failed: ERROR"),
        (None, "No module named pip_audit", {}, 1, "pip-audit failed"),
        (None, "", {}, 1, "pip-audit failed: no output"),
    ],
)
def test_verdicts(
    audit: ModuleType, answer: list[Any] | None, stderr: str, ignored: dict[str, str], code: int, says: str
) -> None:
    stdout = "" if answer is None else json.dumps({"dependencies": answer, "fixes": []})
    lines, got = audit.judge(stdout, stderr, ignored)
    assert got == code
    assert any(says in line for line in lines), lines


def test_what_is_ignored_has_a_reason(audit: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "ignored.txt"
    file.write_text("# why\n\nGHSA-aaaa-bbbb-cccc  its parser is not used # really\n")
    assert audit.read_ignored(file) == {"GHSA-aaaa-bbbb-cccc": "its parser is not used"}
    file.write_text("GHSA-aaaa-bbbb-cccc\n")
    with pytest.raises(ValueError, match="is not 'ADVISORY REASON'"):
        audit.read_ignored(file)
    audit.read_ignored(SCRIPT.parent / "audit-ignored.txt")
