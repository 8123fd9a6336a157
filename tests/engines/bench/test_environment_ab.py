"""Two environments of real engines as arms of an experiment: other Mooncake bytes, in the record of each run.

These engines are started and stopped before the four that the other tests share.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import venv
from pathlib import Path

import msgspec
import pytest

from launch.experiment.records.record import ArmRecord
from launch.experiment.records.state import read_experiment
from tests.engines.rig import REAL_ENGINES
from tests.engines.test_elastic_ab import ASKED_VARIABLE, run

pytestmark = [
    *REAL_ENGINES,
    pytest.mark.skipif(
        os.environ.get(ASKED_VARIABLE) != "1", reason=f"two fleets one after the other: set {ASKED_VARIABLE}=1"
    ),
]

REQUESTS = 30


def other_environment(engine_python: Path, folder: Path) -> Path:
    """An environment with the packages of the engines', but for Mooncake: a copy with one more byte; its Python."""
    venv.create(folder, symlinks=True)
    (packages,) = (engine_python.parent.parent / "lib").glob("python3*/site-packages")
    (own,) = (folder / "lib").glob("python3*/site-packages")
    (own / "engines.pth").write_text(f"{packages}\n")
    shutil.copytree(packages / "mooncake", own / "mooncake")
    for libraries in packages.glob("mooncake*.libs"):  # found relative to the engine's own place
        (own / libraries.name).symlink_to(libraries)
    with (own / "mooncake/engine.so").open("ab") as file:
        file.write(b"\0")
    (folder / "lib/libiomp5.so").symlink_to(engine_python.parent.parent / "lib/libiomp5.so")
    return folder / "bin/python"


async def test_two_environments_in_turns(engine_python: Path, tiny_model: Path, tmp_path: Path) -> None:
    other = other_environment(engine_python, tmp_path / "other")
    output = tmp_path / "out"
    settings = {
        "backend.fleet": "vllm-cpu-4x",
        "backend.overrides.count": "2",
        "backend.overrides.model": str(tiny_model),
        "backend.overrides.vllm.python": str(engine_python),
        "backend.base_port": "18651",
        "arms.other.fleet.vllm.python": str(other),
        "trace.synth": f"{{requests: {REQUESTS}, seed: 3, rate_per_s: 6, length_scale: 0.05}}",
        "trace.max_output_tokens": "40",
        "replay": "{timeout_s: 100, token_low: 10, token_high: 2000}",
        "repeats": "1",
        "comparison.skip_first_s": "0",
    }
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = (sys.executable, "-m", "warmroute", "experiment", "run", "environments-live", "--output", str(output))
    await run(*command, *arguments, bound_s=380)
    runs = read_experiment(output).runs
    assert {each.arm: (each.state, each.ok) for each in runs} == {
        "current": ("done", REQUESTS),
        "other": ("done", REQUESTS),
    }
    engine_hashes = {}
    for each in runs:
        record = msgspec.json.decode((output / each.path / "arm.json").read_bytes(), type=ArmRecord)
        (engine,) = record.engines
        assert engine.packages["vllm-cpu"] == "0.18.1"
        engine_hashes[each.arm] = engine.transfer_path.pop("mooncake/engine.so")
        assert set(engine.transfer_path) == {"vllm/mooncake_connector.py", "vllm/mooncake_utils.py"}
    (library,) = (tmp_path / "other").rglob("mooncake/engine.so")
    assert engine_hashes["other"] == hashlib.sha256(library.read_bytes()).hexdigest()
    assert engine_hashes["current"] == hashlib.sha256(library.read_bytes()[:-1]).hexdigest()
