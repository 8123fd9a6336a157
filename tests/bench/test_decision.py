"""``bench.decision`` runs: it replaces functions of the routing step, whose signatures may change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_short_run_measures_every_stage(tmp_path: Path) -> None:
    output = tmp_path / "decision.json"
    sizes = ["--shape", "text", "--calls", "100", "--held-blocks", "2000", "--in-flight", "4"]
    command = [sys.executable, "-m", "bench.decision", *sizes, "--output", str(output)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    stages = msgspec.json.decode(output.read_bytes())["shapes"]["text"]["stages"]
    assert {"parse", "route", "release"} <= {stage["what"] for stage in stages}
