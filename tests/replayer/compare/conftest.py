"""Run files and experiment directories as the commands write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.replayer.constructed_runs import make_run, write_run

MakeExperiment = Callable[..., Path]
SLOWER = {"linear": 1.0, "lmetric": 0.7}


@pytest.fixture
def experiment(tmp_path: Path) -> MakeExperiment:
    """Writes ``DIR/experiment.json`` and ``DIR/arms/<arm>/<repeat>/run.jsonl``.

    ``slower`` has the arms with the factor on their times, the baseline first; other keywords change the plan.
    """

    def make(
        *,
        repeats: int = 2,
        backend: str = "simulated",
        proofs: bool = True,
        slower: Mapping[str, float] = SLOWER,
        **plan: Any,
    ) -> Path:
        root = tmp_path / "experiment"
        runs = []
        for order, (repeat, arm) in enumerate((repeat, arm) for repeat in range(1, repeats + 1) for arm in slower):
            folder = root / "arms" / arm / str(repeat)
            folder.mkdir(parents=True)
            write_run(folder / "run.jsonl", make_run(arm, slower=slower[arm], noise_seed=10 * repeat + len(arm)))
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
            "baseline": next(iter(slower)),
            "arms": list(slower),
            "config": {"arms": {arm: {"policy": arm} for arm in slower}},
            "runs": runs,
            **plan,
        }
        (root / "experiment.json").write_text(json.dumps(values))
        return root

    return make
