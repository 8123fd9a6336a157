"""The demonstration from the wheel, in a fresh environment of the newest Python here.

All other tests of it run from the sources, on the oldest Python.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.package.conftest import PYTHONS, Built, find_python, install

pytestmark = [pytest.mark.package, pytest.mark.first, pytest.mark.timeout(600)]


def test_the_demonstration_runs_and_writes_its_report(built: Built, tmp_path: Path) -> None:
    newest = next((version for version in reversed(PYTHONS) if find_python(version)), PYTHONS[-1])
    lab = install(built, tmp_path, newest, "[lab]")
    done = lab.run("demo", "--quick", "--output", "demo", timeout_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (lab.folder / "demo" / "report.html").stat().st_size > 10_000
