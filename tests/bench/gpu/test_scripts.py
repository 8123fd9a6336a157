"""The scripts for machines with GPUs: their usage, and what they refuse before they start anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.fleet import ROOT

FOLDER = ROOT / "bench" / "gpu"
HOME_CASE, INSTRUMENTS = "home_case.sh", "instruments.sh"


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script's end. It inherits none of its own variables."""
    own = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    return subprocess.run(
        [str(FOLDER / script), *arguments],
        env=own | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "usage"),
    [
        (HOME_CASE, "bench/gpu/home_case.sh OUTPUT long.jsonl head.jsonl"),
        (INSTRUMENTS, "bench/gpu/instruments.sh OUTPUT"),
    ],
)
def test_a_script_reports_its_usage_and_names_every_variable_that_it_reads(script: str, usage: str) -> None:
    assert os.access(FOLDER / script, os.X_OK)
    ended = run(script)
    assert ended.returncode == 2
    assert usage in ended.stdout
    read = set(re.findall(r"\$\{([A-Z_]+):[-+]", (FOLDER / script).read_text(encoding="utf-8")))
    assert {"MODEL", "SETTINGS", "BUDGET_S"} <= read
    assert not [name for name in sorted(read) if name not in ended.stdout]


@pytest.mark.parametrize("gpus", ["3", "16"])
def test_a_number_of_gpus_without_a_fleet_file_is_refused(gpus: str, tmp_path: Path) -> None:
    ended = run(HOME_CASE, str(tmp_path / "out"), "long.jsonl", "head.jsonl", GPUS=gpus)
    assert ended.returncode == 2
    assert f"no fleet file for {gpus} GPUs" in ended.stdout
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_the_fleets_of_the_home_case_exist(gpus: int) -> None:
    assert (ROOT / "configs" / "fleets" / f"elastic-{gpus}x-kv-both.yaml").exists()


def test_unknown_parts_of_the_instruments_are_refused(tmp_path: Path) -> None:
    ended = run(INSTRUMENTS, str(tmp_path / "out"), PARTS="fast,slow", SMALL="1")
    assert ended.returncode == 2
    assert "PARTS: fast, overhead, tcp and blocks" in ended.stdout
    assert not (tmp_path / "out").exists()
