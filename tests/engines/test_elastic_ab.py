"""The offloading experiment through its command line, on two real engines for each arm.

These engines are started and stopped before the four that the other tests share.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec
import pytest

from bench.elastic_table import markdown, read_arms
from tests.engines.conftest import ROOT
from tests.engines.rig import REAL_ENGINES

ASKED_VARIABLE = "WARMROUTE_TEST_EXPERIMENT"

pytestmark = [
    *REAL_ENGINES,
    pytest.mark.skipif(
        os.environ.get(ASKED_VARIABLE) != "1", reason=f"two fleets one after the other: set {ASKED_VARIABLE}=1"
    ),
]

REQUESTS = 60


async def run(*command: str, bound_s: float, **environment: str) -> str:
    """Run a command in the project's folder; its output on both streams."""
    child = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(child.communicate(), bound_s)
    finally:
        if child.returncode is None:
            child.terminate()  # it stops its engines
            await child.wait()
    assert child.returncode == 0, out.decode()
    return out.decode()


async def test_two_planners_on_fresh_engines_give_a_table(
    engine_python: Path, tiny_model: Path, tmp_path: Path
) -> None:
    trace, output = tmp_path / "trace.jsonl", tmp_path / "out"
    synth = (
        "trace",
        "synth",
        "--requests",
        str(REQUESTS),
        "--rate-per-s",
        "6",
        "--seed",
        "3",
        "--length-scale",
        "0.05",
    )
    await run(sys.executable, "-m", "warmroute", *synth, "--output", str(trace), bound_s=60)
    settings = {
        "count": "2",
        "base_port": "18501",
        "base_bootstrap_port": "19501",
        "base_events_port": "17721",
        "base_events_replay_port": "17821",
        "base_master_port": "19801",
        "proxy.port": "18601",
        "proxy.classes": "{medium_tokens: 100, heavy_tokens: 300}",
    }
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    arguments += ["--planner", "never", "--planner", "threshold", "--load", "1", "--skip-first-s", "0"]
    arguments += ["--token-low", "10", "--token-high", "2000", "--max-output-tokens", "40", "--timeout-s", "100"]
    reported = await run(
        str(ROOT / "bench" / "gpu" / "elastic_ab.sh"),
        str(trace),
        str(output),
        *arguments,
        bound_s=300,
        FLEET="vllm-cpu-4x",
        PYTHON=sys.executable,
        ENGINE_PYTHON=str(engine_python),
        MODEL=str(tiny_model),
    )
    kept = output / "kept"
    arms = read_arms(kept)
    assert [(arm.note.planner, arm.note.instances, arm.note.transport) for arm in arms] == [
        ("never", 2, "tcp"),
        ("threshold", 2, "tcp"),
    ]
    assert all(record.ok for arm in arms for record in arm.run.records)
    assert [len(arm.run.records) for arm in arms] == [REQUESTS, REQUESTS]
    assert markdown(kept) in reported
    assert f"| `threshold` | {arms[1].repeat} | {REQUESTS}/{REQUESTS} |" in reported
    reasons = [[row["offload_reason"] for row in arm.rows] for arm in arms]
    assert "chosen" not in reasons[0]
    assert reasons[1].count("chosen") >= 3, reasons[1]
    assert "transfer leg median" in reported
    fresh = [msgspec.json.decode((kept / arm.note.label / "fresh.json").read_bytes()) for arm in arms]
    ids = [engine["engine_ids"][0] for proof in fresh for engine in proof["engines"]]
    assert len(set(ids)) == 4, "every arm has separate engines"
    assert not [problem for proof in fresh for engine in proof["engines"] for problem in engine["problems"]]
