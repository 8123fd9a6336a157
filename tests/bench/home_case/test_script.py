"""The script of the home case: its usage, and what it refuses before it starts anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.fleet import ROOT

SCRIPT = ROOT / "bench" / "gpu" / "home_case.sh"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script's end. It inherits none of its own variables."""
    own = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    return subprocess.run(
        [str(SCRIPT), *arguments], env=own | environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_script_reports_its_usage() -> None:
    assert os.access(SCRIPT, os.X_OK)
    ended = run("only-an-output")
    assert ended.returncode == 2
    assert "bench/gpu/home_case.sh OUTPUT long.jsonl head.jsonl" in ended.stdout


def test_its_usage_names_every_variable_that_it_reads() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    usage = run().stdout
    read = set(re.findall(r"\$\{([A-Z_]+):[-+]", text))
    assert {"MODEL", "SETTINGS", "BUDGET_S"} <= read
    assert not [name for name in sorted(read) if name not in usage]


@pytest.mark.parametrize("gpus", ["3", "16"])
def test_a_number_of_gpus_without_a_fleet_file_is_refused(gpus: str, tmp_path: Path) -> None:
    ended = run(str(tmp_path / "out"), "long.jsonl", "head.jsonl", GPUS=gpus)
    assert ended.returncode == 2
    assert f"no fleet file for {gpus} GPUs" in ended.stdout
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_the_fleets_that_it_names_exist(gpus: int) -> None:
    assert (ROOT / "configs" / "fleets" / f"elastic-{gpus}x-kv-both.yaml").exists()
