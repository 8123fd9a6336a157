"""The hooks in the connector source of real vLLM versions: the engines' environment, and those of a variable.

``WARMROUTE_CONNECTORS`` holds paths of further ``mooncake_connector.py``, separated by colons.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.instruments.hooked.stages import pair_records, read_records
from tests.launch.transfer_hooks.real_connector import BLOCK_BYTES, BLOCKS_OF_D, LAYERS

ROOT = Path(__file__).parents[3]
_PATH = "lib/python3*/site-packages/vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
SOURCES = [
    *(ROOT / ".venv-engines").glob(_PATH),
    *(Path(path) for path in os.environ.get("WARMROUTE_CONNECTORS", "").split(":") if path),
]


@pytest.mark.skipif(not SOURCES, reason="no source of vLLM: run `make engines`, or set WARMROUTE_CONNECTORS")
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_a_hand_off_is_recorded_whole(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    command = [sys.executable, "-m", "tests.launch.transfer_hooks.real_connector", str(source), str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    found = pair_records(read_records(path.read_bytes()))
    assert found.incomplete == {}
    stages = found.complete["t"]
    assert (stages.sender, stages.receiver, stages.blocks) == ("p", "d", len(BLOCKS_OF_D))
    assert stages.size_bytes == len(BLOCKS_OF_D) * len(LAYERS) * BLOCK_BYTES
    assert stages.pieces == 2 * len(LAYERS)  # two of the three blocks are neighbours on both sides
    assert stages.ready_wait_s > 0
    assert stages.request_s is not None
    assert stages.answer_s is not None
