"""Run files and experiment directories as the commands write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.replayer.constructed_runs import make_run, write_run

MakeExperiment = Callable[..., Path]


@pytest.fixture
def experiment(tmp_path: Path) -> MakeExperiment:
    """Writes ``DIR/experiment.json`` and ``DIR/arms/<arm>/<repeat>/run.jsonl``; keywords change the plan."""

    def make(*, repeats: int = 2, backend: str = "simulated", proofs: bool = True, **plan: Any) -> Path:
        root = tmp_path / "experiment"
        runs = []
        for order, (repeat, (arm, slower)) in enumerate(
            (repeat, arm) for repeat in range(1, repeats + 1) for arm in (("linear", 1.0), ("lmetric", 0.7))
        ):
            folder = root / "arms" / arm / str(repeat)
            folder.mkdir(parents=True)
            write_run(folder / "run.jsonl", make_run(arm, slower=slower, noise_seed=10 * repeat + len(arm)))
            if proofs:
                proof = {"engines": [{"instance": "inst-0", "problems": []}], "gpus": {"status": "none"}}
                (folder / "fresh.json").write_text(json.dumps(proof))
            runs.append(
                {
                    "arm": arm,
                    "repeat": repeat,
                    "seed": repeat,
                    "order": order,
                    "path": f"arms/{arm}/{repeat}",
                    "state": "done",
                }
            )
        values = {
            "schema": 1,
            "backend": backend,
            "baseline": "linear",
            "arms": ["linear", "lmetric"],
            "config": {"arms": {"linear": {"policy": "linear"}, "lmetric": {"policy": "lmetric"}}},
            "runs": runs,
            **plan,
        }
        (root / "experiment.json").write_text(json.dumps(values))
        return root

    return make
