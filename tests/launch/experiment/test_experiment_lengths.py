"""``experiment plan`` names the requests that an arm's engines refuse for their length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from launch.__main__ import app
from launch.experiment.definition.file import LoadedExperiment, load_experiment
from launch.experiment.definition.fleets import arm_fleets
from launch.experiment.definition.inputs import checked_plan
from launch.experiment.definition.lengths import too_long
from replayer.traces.formats import bailian
from sim.hardware import load_profile
from tests.replayer.conftest import make_trace

SIMULATED = {"kind": "simulated", "noise": {"speed_sigma": 0.1}}
LIVE = {"kind": "live", "fleet": "sim-4x"}


def loaded(tmp_path: Path, backend: dict[str, Any], arms: dict[str, Any]) -> LoadedExperiment:
    """Of a trace whose longest prompt has 300 tokens, with an answer of 40."""
    path = tmp_path / "long.yaml"
    trace = make_trace(sessions=2, turns=3)
    lengths = [(100, 40), (200, 10), (300, 40)] * 2
    requests = [
        msgspec.structs.replace(request, input_length=prompt, output_length=answer, hash_ids=range(-(-prompt // 64)))
        for request, (prompt, answer) in zip(trace.requests, lengths, strict=True)
    ]
    bailian.write(tmp_path / "trace.jsonl", requests)
    of_file = {"name": "long", "trace": "trace.jsonl", "arms": arms, "baseline": "a", "backend": backend}
    path.write_text(yaml.safe_dump(of_file))
    return load_experiment(path)


def found(experiment: LoadedExperiment) -> list[tuple[tuple[str, ...], int, int]]:
    fleets = arm_fleets(experiment)
    return [
        (one.arms, one.limit_tokens, one.requests)
        for one in too_long(experiment, fleets, checked_plan(experiment, fleets))
    ]


@pytest.mark.usefixtures("checked_here")
def test_arms_with_one_pool_are_named_together(tmp_path: Path) -> None:
    arms = {
        "a": {"policy": "warm", "fleet": {"pool_tokens": 256}},
        "b": {"policy": "lmetric", "fleet": {"pool_tokens": 256}},
        "c": {"policy": "linear"},
        "d": {"policy": "linear", "fleet": {"pool_tokens": 192}},
    }
    assert found(loaded(tmp_path, SIMULATED, arms)) == [(("d",), 192, 4), (("a", "b"), 256, 2)]


@pytest.mark.usefixtures("checked_here")
def test_a_simulated_engine_shortens_the_answer_and_a_real_one_refuses_the_request(tmp_path: Path) -> None:
    arms = {"a": {"policy": "warm", "fleet": {"pool_tokens": 320}}, "b": {"policy": "linear"}}
    assert found(loaded(tmp_path, SIMULATED, arms)) == []
    served = {"a": {"policy": "warm", "fleet": {"sim.max_model_len": 320}}, "b": {"policy": "linear"}}
    assert found(loaded(tmp_path, LIVE, served)) == [(("a",), 320, 2)]
    vllm = {"kind": "live", "fleet": "elastic-4x-kv-both", "overrides": {"vllm.max_model_len": 339}}
    experiment = loaded(tmp_path, vllm, {"a": {"policy": "warm"}, "b": {"policy": "linear"}})
    assert found(experiment) == [(("a", "b"), 339, 2)]


@pytest.mark.usefixtures("checked_here")
def test_the_limit_is_that_of_the_profile_or_its_pool(tmp_path: Path) -> None:
    profile = load_profile("h200")
    assert profile.max_model_len < profile.kv.pool_tokens
    arms = {"a": {"policy": "warm"}, "b": {"policy": "linear"}}
    assert found(loaded(tmp_path, SIMULATED, arms)) == []


@pytest.mark.usefixtures("checked_here")
def test_plan_says_so_and_what_to_do(tmp_path: Path) -> None:
    arms = {"a": {"policy": "warm", "fleet": {"pool_tokens": 256}}, "b": {"policy": "linear"}}
    path = str(loaded(tmp_path, SIMULATED, arms).source)
    printed = CliRunner().invoke(app, ["experiment", "plan", path]).output
    assert "longest prompt with its answer: 340 tokens" in printed
    assert (
        "warning: 2 of 6 requests need more than 256 tokens, all that the engines of a take, and will fail" in printed
    )
    assert "trace.prompt_scale" in printed
    as_json = CliRunner().invoke(app, ["experiment", "plan", path, "--json"]).output
    assert msgspec.json.decode(as_json)["too_long"] == [{"arms": ["a"], "limit_tokens": 256, "requests": 2}]
