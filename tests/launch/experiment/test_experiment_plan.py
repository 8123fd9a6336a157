"""Experiments before they run: valid files, the order of runs, and the shipped files."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from launch.__main__ import app
from launch.experiment.cli import _newest
from launch.experiment.comparison import COMPARISON_FILE
from launch.experiment.definition.file import (
    EXPERIMENTS,
    ExperimentError,
    ExperimentSettings,
    LoadedExperiment,
    load_experiment,
    parse_experiment,
)
from launch.experiment.definition.fleets import arm_fleet, arm_fleets, clock_scale, placed_fleet
from launch.experiment.definition.inputs import TRACE_FILE, build_trace, checked_plan, prepare, reading, trace_file
from launch.experiment.definition.order import interleaved_rows, noise_seed, plan_runs, randomised_rows
from launch.experiment.definition.reference import SECTIONS, reference
from launch.experiment.records.environment import ENVIRONMENT_FILE, differences, engines_of, software
from launch.experiment.records.record import KEPT_FILES
from launch.experiment.records.state import CONFIG_FILE, STATE_FILE, config_changes
from launch.experiment.run.live import with_room
from launch.experiment.run.simulated import simulator_command
from launch.fleet.overrides import PYTHON_VARIABLE
from policies.registry import routing_policies
from replayer.traces.loading import load, load_trace
from replayer.traces.trace import TraceError
from tests.launch.conftest import free_base
from tests.replayer.conftest import make_trace

SIMULATED: dict[str, Any] = {
    "name": "paper",
    "trace": {"synth": {"requests": 40}},
    "arms": {"a": {"policy": "linear"}, "b": {"policy": "lmetric"}, "c": {"policy": "unified"}},
    "backend": {"kind": "simulated", "noise": {"speed_sigma": 0.1}},
}
LIVE: dict[str, Any] = {
    **SIMULATED,
    "backend": {"kind": "live", "fleet": "sim-4x", "overrides": {"sim.time_scale": 20}},
}


def settings(base: dict[str, Any] = SIMULATED, **values: Any) -> ExperimentSettings:
    return parse_experiment({**base, **values})


def loaded(tmp_path: Path, base: dict[str, Any] = SIMULATED, *overrides: str, **values: Any) -> LoadedExperiment:
    path = tmp_path / "paper.yaml"
    path.write_text(yaml.safe_dump({**base, **values}, sort_keys=False))
    return load_experiment(path, overrides)


class TestAdmission:
    ARMS: ClassVar[dict[str, Any]] = {
        "a": {"policy": "warm"},
        "b": {"policy": "warm", "admission": {"name": "working_set", "params": {"fill": 0.9}, "max_hold_s": 60.0}},
        "c": {"policy": "warm", "admission": "never_hold"},
    }

    def test_an_arm_s_rule_reaches_the_simulator(self, tmp_path: Path) -> None:
        experiment = loaded(tmp_path, arms=self.ARMS)
        slots = {slot.arm: slot for slot in plan_runs(experiment.settings)}
        plain, holding, other = (simulator_command(experiment, slots[arm], Path("t"), tmp_path) for arm in "abc")
        assert not [part for part in plain if "admission" in part or "hold" in part]
        flags = dict(itertools.pairwise(holding))
        assert (flags["--admission-param"], flags["--max-hold-s"]) == ("fill=0.9", "60.0")
        assert dict(itertools.pairwise(other))["--admission"] == "never_hold"

    def test_an_arm_s_rule_reaches_the_proxy_in_its_time(self, tmp_path: Path) -> None:
        experiment = loaded(tmp_path, LIVE, arms=self.ARMS)
        admission = arm_fleet(experiment, "b").proxy["admission"]
        assert (admission["name"], admission["max_hold_s"]) == ("working_set", 3.0)  # time_scale is 20
        assert admission["params"] == {"fill": 0.9, "keep_s": 1.5}
        plain = arm_fleet(experiment, "a").proxy["admission"]
        assert (plain["name"], plain["params"]) == ("working_set", {"keep_s": 1.5})
        assert arm_fleet(experiment, "c").proxy["admission"]["name"] == "never_hold"

    def test_an_unknown_rule_is_refused(self) -> None:
        with pytest.raises(ExperimentError, match="nonsense"):
            settings(arms={"a": {"policy": "warm", "admission": "nonsense"}, "b": {"policy": "warm"}})


def test_settings_of_the_engines_reach_the_simulator(tmp_path: Path) -> None:
    def command(**backend: Any) -> list[str]:
        experiment = loaded(tmp_path, backend={**SIMULATED["backend"], **backend})
        return simulator_command(experiment, plan_runs(experiment.settings)[0], Path("t"), tmp_path)

    assert "--scheduling-policy" not in command()
    assert dict(itertools.pairwise(command(scheduling_policy="priority")))["--scheduling-policy"] == "priority"
    assert "--long-prefill-token-threshold" not in command()
    shared = dict(itertools.pairwise(command(long_prefill_token_threshold=4096)))
    assert shared["--long-prefill-token-threshold"] == "4096"
    assert "--speeds" not in command()
    assert dict(itertools.pairwise(command(speeds=[1, 0.5])))["--speeds"] == "1.0,0.5"
    with pytest.raises(ExperimentError, match="scheduling_policy"):
        settings(backend={**SIMULATED["backend"], "scheduling_policy": "lifo"})


class TestOrder:
    def test_each_repeat_runs_all_arms_and_begins_one_later(self) -> None:
        runs = plan_runs(settings(repeats=4))
        assert "".join(run.arm for run in runs) == "abcbcacababc"
        assert [run.repeat for run in runs] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
        assert [run.order for run in runs] == list(range(12))
        assert runs[4].path == "arms/c/2"

    @given(arms=st.integers(1, 7), repeats=st.integers(1, 30), seed=st.integers(0, 1000))
    def test_any_order_is_balanced(self, arms: int, repeats: int, seed: int) -> None:
        names = [f"arm{number}" for number in range(arms)]
        for rows in (interleaved_rows(names, repeats), randomised_rows(names, repeats, seed)):
            assert len(rows) == repeats
            assert all(sorted(row) == sorted(names) for row in rows)
            for place in range(arms):
                counts = Counter(row[place] for row in rows)
                assert max(counts.values()) - min(counts[name] for name in names) <= 1

    def test_randomised_is_seeded(self) -> None:
        names = ["a", "b", "c", "d"]
        assert randomised_rows(names, 12, 5) == randomised_rows(names, 12, 5)
        assert randomised_rows(names, 12, 5) != randomised_rows(names, 12, 6)
        assert randomised_rows(names, 5, 5) == randomised_rows(names, 12, 5)[:5]
        drawn = {tuple(randomised_rows(["a", "b", "c"], 1, seed)[0]) for seed in range(200)}
        assert drawn == set(itertools.permutations("abc"))

    def test_a_repeat_has_one_seed(self) -> None:
        assert [run.seed for run in plan_runs(settings(repeats=2))] == [0, 0, 0, 1, 1, 1]
        chosen = plan_runs(settings(LIVE, seeds=[7, 9], repeats=2))
        assert [run.seed for run in chosen[::3]] == [7, 9, 7, 9]
        assert [run.repeat for run in chosen[::3]] == [1, 2, 3, 4]

    def test_arms_draw_their_own_noise_unless_it_is_common(self) -> None:
        own = settings(repeats=2)
        seeds = {noise_seed(own, run) for run in plan_runs(own)}
        assert len(seeds) == 6
        assert all(0 <= seed < 2**32 for seed in seeds)
        for shared in (
            settings(backend={"kind": "simulated", "noise": {"speed_sigma": 0.1, "common": True}}),
            settings(backend={"kind": "simulated"}),
            settings(LIVE),
        ):
            assert {noise_seed(shared, run) for run in plan_runs(shared)} == {0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"armz": {}}, "armz: unknown key"),
        ({"arms": {}}, "arms: Dictionary should have at least 1 item"),
        ({"arms": {"../x": {"policy": "linear"}}}, "is used as a folder name"),
        ({"arms": {"a": {"policy": "nonesuch"}}}, "arms.a.policy: unknown routing policy 'nonesuch'"),
        ({"arms": {"a": {"policy": {"name": "linear", "params": {"beta": 1}}}}}, "has no parameter 'beta'"),
        ({"arms": {"a": {"policy": "linear", "offload": "nonesuch"}}}, "unknown offload planner 'nonesuch'"),
        (
            {"arms": {"a": {"policy": "lost_module:A"}}},
            "arms.a.policy: routing policy 'lost_module:A' cannot be loaded",
        ),
        (
            {"arms": {"a": {"policy": "linear", "admission": "a:"}}},
            "arms.a.admission: admission rule 'a:': write MODULE",
        ),
        (
            {"arms": {"a": {"policy": "lost_module:A"}}, "backend": {"kind": "live", "fleet": "sim-4x"}},
            "arms.a.policy: 'lost_module:A' is a class, and a running proxy takes names only",
        ),
        (
            {"arms": {"a": {"policy": "linear", "offload": "m:P"}}, "backend": {"kind": "live", "fleet": "sim-4x"}},
            "arms.a.offload: 'm:P' is a class, and a running proxy takes names only",
        ),
        ({"arms": {"a": "nonesuch"}}, "arms.a.policy: unknown routing policy 'nonesuch'"),
        ({"arms": {"a": 5}}, "arms.a: expected keys with values, found int"),
        ({"arms": ["linear"]}, "arms: expected keys with values, found list"),
        ({"arms": {"a": {"policy": None}}}, "arms.a.policy: expected keys with values, found nothing"),
        ({"arms": None}, "arms: expected keys with values, found nothing"),
        (
            {"backend": {"kind": "simulated", "noise": {"speed_sigma": 1.5}}},
            "noise.speed_sigma: Input should be less than or equal to 1",
        ),
        ({"arms": {"a": {"policy": "linear", "fleet": {"noise": {}}}}}, "must be the same in all arms"),
        ({"arms": {"a": {"policy": "linear", "fleet": {"slowness": 2}}}}, "slowness: unknown key"),
        ({"baseline": "d"}, "baseline: 'd' is none of the arms: a, b, c"),
        ({"name": "a/b"}, "is used as a folder name"),
        ({"trace": {"path": "x", "synth": {}}}, "give either `path` or `synth`"),
        ({"trace": {}}, "give either `path` or `synth`"),
        ({"replay": {"time_scale": 0}}, "replay.time_scale: Input should be greater than 0"),
        ({"replay": {"time_scale": math.inf}}, "replay.time_scale: Input should be a finite number"),
        ({"replay": {"think_scale": math.nan}}, "replay.think_scale: Input should be a finite number"),
        (
            {"backend": {"kind": "simulated", "noise": {"arrival_jitter_s": math.inf}}},
            "noise.arrival_jitter_s: Input should be a finite number",
        ),
        ({"replay": {"prompt_mode": "chat"}}, "replay.prompt_mode: the simulator sends no requests"),
        ({"replay": {"idle_gap_cap_s": None}}, "the simulator needs a number"),
        ({"seeds": [1, 1]}, "seeds must be different"),
        ({"seeds": [1, 2], "repeats": 2}, "list more seeds instead"),
        ({"backend": {"kind": "simulated"}, "repeats": 2}, "without noise every repeat would be the same"),
        ({"backend": {"kind": "imagined"}}, "backend"),
        (
            {"backend": {"kind": "live", "fleet": "sim-4x", "flet": 1}},
            "experiment: 1 problem\n  backend.flet: unknown key; did you mean fleet?",
        ),
        (
            {"backend": {"kind": "simulated", "pool_token": 1}, "repeat": 3},
            "experiment: 2 problems\n  backend.pool_token: unknown key; did you mean pool_tokens?\n"
            "  repeat: unknown key; did you mean repeats?",
        ),
        ({"arms": {"a": {"polcy": "warm", "policy": "warm"}}}, "arms.a.polcy: unknown key; did you mean policy?"),
        ({"trace": {"synth": {"zzz": 1}}}, "trace.synth.zzz: unknown key; check the spelling"),
        ({"backend": {"kind": "simulated", "role": "kv_producer"}}, "role: no instance could decode"),
        ({"arms": {"a": {"policy": "linear", "fleet": {"role": "kv_producer"}}}}, "role: no instance could decode"),
        ({"order": "random"}, "order: Input should be 'interleaved' or 'randomised'"),
        ({"comparison": {"resamples": 10}}, "comparison.resamples"),
        ({"comparison": {"slo": {"tokens": "new", "ttft_s": 1}}}, "comparison.slo: tokens: is for the length-scaled"),
    ],
)
def test_every_mistake_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        settings(**values)
    assert message in str(caught.value)


def test_an_override_without_a_value_is_refused_with_a_key_of_an_experiment(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"--set repeats: write key=value, for example backend.instances=16$"):
        loaded(tmp_path, SIMULATED, "repeats")


def test_an_arm_may_be_the_name_of_its_policy() -> None:
    assert settings(arms={"a": "linear"}) == settings(arms={"a": {"policy": "linear"}})


def test_the_command_that_resumes_has_the_overrides(tmp_path: Path) -> None:
    experiment = loaded(tmp_path, SIMULATED, "repeats=2", "baseline=b", "trace.synth={requests: 20}")
    assert shlex.split(experiment.resume_command(tmp_path / "a run")) == [
        *("warmroute", "experiment", "run", str(experiment.source)),
        *("--set", "repeats=2", "--set", "baseline=b", "--set", "trace.synth={requests: 20}"),
        *("--output", str(tmp_path / "a run"), "--resume"),
    ]


def test_settings_survive_their_own_record(tmp_path: Path) -> None:
    for base in (SIMULATED, LIVE):
        experiment = loaded(tmp_path, base, repeats=3)
        kept = msgspec.json.decode(msgspec.json.encode(experiment.config))
        assert parse_experiment(kept) == experiment.settings


class TestFleets:
    def test_policy_planner_and_keys_of_the_arm_are_laid_over_the_file(self, tmp_path: Path) -> None:
        arms = {
            "plain": {"policy": "linear"},
            "other": {
                "policy": {"name": "lmetric"},
                "offload": {"planner": "threshold", "params": {}},
                "fleet": {"count": 2, "role": "kv_both", "proxy": {"health": {"interval_s": 3}}},
            },
        }
        fleets = arm_fleets(loaded(tmp_path, LIVE, arms=arms))
        plain, other = fleets["plain"], fleets["other"]
        assert (plain.instances, other.instances) == (4, 2)
        assert plain.proxy["policy"]["name"] == "linear"
        assert other.proxy["policy"]["name"] == "lmetric"
        assert other.proxy["offload"]["planner"] == "threshold"
        assert other.proxy["health"]["interval_s"] == 3
        assert clock_scale(plain) == clock_scale(other) == 20
        assert plain.proxy["ledger"]["recent_half_life_s"] == 30 / 20

    def test_a_fleet_may_stand_in_the_experiment(self, tmp_path: Path) -> None:
        backend = {"kind": "live", "fleet": {"kind": "sim", "count": 3}}
        assert arm_fleets(loaded(tmp_path, LIVE, backend=backend))["a"].instances == 3

    def test_ports_are_looked_for(self, tmp_path: Path) -> None:
        import socket

        base = free_base()
        backend = {"kind": "live", "fleet": "elastic-4x-kv-both", "base_port": base}
        experiment = loaded(tmp_path, LIVE, backend=backend)
        assert {port for port, _ in arm_fleet(experiment, "a", base).ports()} == set(range(base, base + 21))
        assert placed_fleet(experiment, "a").base_port == base
        with socket.create_server(("127.0.0.1", base + 3)):
            assert placed_fleet(experiment, "a").base_port == base + 50

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"backend": {"kind": "live", "fleet": "nonesuch"}}, "no fleet file at nonesuch"),
            ({"backend": {"kind": "live", "fleet": {"kind": "sim", "cout": 1}}}, "cout: unknown key"),
            (
                {"arms": {"a": {"policy": "linear", "fleet": {"counts": 1}}, "b": {"policy": "linear"}}},
                "counts: unknown key",
            ),
            (
                {"arms": {"a": {"policy": "linear", "fleet": {"sim.time_scale": 3}}, "b": {"policy": "linear"}}},
                "sim.time_scale differs between arms (a: 3, b: 20)",
            ),
            (
                {
                    "backend": {
                        "kind": "live",
                        "fleet": "sim-4x",
                        "overrides": {"peers": [{"url": "http://127.0.0.1:1"}]},
                    }
                },
                "has peers",
            ),
        ],
    )
    def test_refused_fleets(self, tmp_path: Path, values: dict[str, Any], message: str) -> None:
        with pytest.raises(ExperimentError) as caught:
            arm_fleets(loaded(tmp_path, LIVE, **values))
        assert message in str(caught.value)

    def test_the_proxy_keeps_a_row_for_every_request(self, tmp_path: Path) -> None:
        fleet = arm_fleets(loaded(tmp_path, LIVE))["a"]
        assert with_room(fleet, 9_000) is fleet
        assert with_room(fleet, 20_000).proxy["breakdown"]["capacity"] == 20_000


class TestTrace:
    def test_a_trace_is_cut_and_shortened(self, tmp_path: Path) -> None:
        whole = build_trace(loaded(tmp_path))
        cut = {"synth": {"requests": 40}, "window_s": 20, "max_output_tokens": 50, "prompt_scale": 0.25}
        trace = build_trace(loaded(tmp_path, trace=cut))
        assert 0 < len(trace.requests) < len(whole.requests)
        assert all(request.timestamp_s < 20 for request in trace.requests)
        assert max(request.output_length for request in trace.requests) == 50
        for before, after in zip(whole.requests, trace.requests, strict=False):
            assert list(after.hash_ids) == list(before.hash_ids[: len(after.hash_ids)])
            assert after.input_length <= max(64, before.input_length * 0.25 + 64)

    @pytest.mark.usefixtures("checked_here")
    def test_a_path_is_relative_to_the_experiment_file_too(self, tmp_path: Path) -> None:
        from replayer.traces.formats import bailian

        bailian.write(tmp_path / "mine.jsonl", build_trace(loaded(tmp_path)).requests)
        experiment = loaded(tmp_path, trace="mine.jsonl")
        assert experiment.settings.trace.as_stored
        path = trace_file(experiment)
        assert path == (tmp_path / "mine.jsonl").resolve()
        assert len(load_trace(path).requests) == checked_plan(experiment, {}).requests == 40
        with pytest.raises(ExperimentError, match=r"trace: nothing at yours\.jsonl"):
            trace_file(loaded(tmp_path, trace="yours.jsonl"))

    @pytest.mark.usefixtures("checked_here")
    def test_repeats_that_only_move_the_one_session_of_a_trace_are_refused_before_anything_runs(
        self, tmp_path: Path
    ) -> None:
        from replayer.traces.formats import bailian

        bailian.write(tmp_path / "one.jsonl", make_trace(sessions=1, turns=3).requests)
        bailian.write(tmp_path / "two.jsonl", make_trace(sessions=2, turns=3).requests)
        moved = {"kind": "simulated", "noise": {"arrival_jitter_s": 1}}
        slowed = {"kind": "simulated", "noise": {"arrival_jitter_s": 1, "speed_sigma": 0.02}}

        def checked(**values: Any) -> None:
            experiment = loaded(tmp_path, **values)
            prepare(experiment, tmp_path)
            checked_plan(experiment, {})

        with pytest.raises(ExperimentError, match=r"the trace has one session.* set backend\.noise\.speed_sigma"):
            checked(trace="one.jsonl", repeats=2, backend=moved)
        checked(trace="one.jsonl", repeats=2, backend=slowed)
        checked(trace="one.jsonl", repeats=1, backend=moved)
        checked(trace="two.jsonl", repeats=2, backend=moved)

    @pytest.mark.parametrize(("cap_s", "gap_s"), [(60.0, 60.0), (500.0, 500.0), (None, 1000.0)])
    def test_idle_gaps_of_conversations_are_cut_to_the_cap_of_the_replay(
        self, tmp_path: Path, cap_s: float | None, gap_s: float
    ) -> None:
        calls = [{"t": t, "in": 64, "out": 1, "hash_ids": [1]} for t in (0, 1000)]
        (tmp_path / "conversation.json").write_text(json.dumps({"requests": calls}))
        experiment = loaded(tmp_path, LIVE, trace="conversation.json", replay={"idle_gap_cap_s": cap_s})
        planned = build_trace(experiment)
        settings = experiment.settings
        replayed = load(tmp_path / "conversation.json", reading(settings.trace, settings.replay))
        assert planned.duration_s == replayed.duration_s == gap_s

    @pytest.mark.usefixtures("checked_here")
    def test_times_in_another_unit_are_read_by_the_key_that_the_loader_names(self, tmp_path: Path) -> None:
        from msgspec.structs import replace

        from replayer.traces.formats import bailian

        requests = build_trace(loaded(tmp_path, trace={"synth": {"requests": 120}})).requests
        slower = [replace(request, timestamp_s=request.timestamp_s * 1e6) for request in requests]
        bailian.write(tmp_path / "us.jsonl", slower)
        with pytest.raises(TraceError, match="or --time-unit us "):
            build_trace(loaded(tmp_path, trace="us.jsonl"))
        experiment = loaded(tmp_path, trace={"path": "us.jsonl", "time_unit": "us"})
        read = prepare(experiment, tmp_path).trace_path
        assert read.parent == tmp_path  # a new file in seconds: runs and reports read it without the option
        times = [request.timestamp_s for request in load_trace(read).requests]
        assert times == pytest.approx([request.timestamp_s for request in requests], abs=1e-3)
        single = build_trace(loaded(tmp_path, trace={"path": "us.jsonl", "time_unit": "us", "sessions": "single"}))
        assert len(single.requests) == 120
        with pytest.raises(ExperimentError, match="time_unit, sessions: are for the trace at `path`"):
            loaded(tmp_path, trace={"synth": {"requests": 40}, "time_unit": "us"})


SHIPPED = {
    "aa-simulated": ["one", "other"],
    "policies-simulated": ["linear", "lmetric", "session_sticky", "unified", "warm"],
    "policies-live-sim": ["linear", "lmetric"],
    "elastic-live": ["never", "threshold", "cost_model"],
    "environments-live": ["current", "other"],
    "static-pd": ["combined", "elastic", "pd_4p4d", "pd_6p2d"],
}


class TestShipped:
    def test_these_are_shipped(self) -> None:
        assert {path.stem for path in EXPERIMENTS.glob("*.yaml")} == set(SHIPPED)

    @pytest.mark.parametrize("name", SHIPPED)
    @pytest.mark.usefixtures("checked_here")
    def test_a_shipped_experiment_is_good(self, name: str) -> None:
        overrides = [] if "warm" in routing_policies() else ["arms.warm.policy=linear"] * (name == "policies-simulated")
        experiment = load_experiment(Path(name), overrides)
        assert experiment.settings.name == name
        assert list(experiment.settings.arms) == SHIPPED[name]
        arm_fleets(experiment)
        assert checked_plan(experiment, {}).requests > 100

    def test_a_a_arms_are_the_same(self) -> None:
        experiment = load_experiment(Path("aa-simulated"))
        one, other = experiment.settings.arms.values()
        assert one == other
        assert len({noise_seed(experiment.settings, run) for run in plan_runs(experiment.settings)}) == 20

    @pytest.mark.parametrize(("fleet", "instances"), [("elastic-4x-kv-both", 4), ("elastic-8x-kv-both", 8)])
    def test_elastic_runs_on_four_and_eight_gpus(self, fleet: str, instances: int) -> None:
        fleets = arm_fleets(load_experiment(Path("elastic-live"), [f"backend.fleet={fleet}"]))
        for planner, made in fleets.items():
            assert made.proxy["offload"]["planner"] == planner
            assert [member.role.value for member in made.members] == ["kv_both"] * instances
            assert made.restart == "never"

    def test_an_unknown_name_lists_the_shipped_ones(self) -> None:
        with pytest.raises(ExperimentError, match="shipped experiments: aa-simulated, elastic-live"):
            load_experiment(Path("nonesuch"))


@pytest.mark.usefixtures("checked_here")
def test_plan_starts_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reported = CliRunner().invoke(app, ["experiment", "plan", "elastic-live"])
    assert reported.exit_code == 0, reported.output
    assert "elastic-live: 9 runs, randomised" in reported.output
    assert "never (baseline)" in reported.output
    assert "expected time: at least" in reported.output
    assert list(tmp_path.iterdir()) == []
    as_json = CliRunner().invoke(app, ["experiment", "plan", "aa-simulated", "--json", "--set", "repeats=1"])
    planned = msgspec.json.decode(as_json.output)
    assert [run["order"] for run in planned["runs"]] == [0, 1]
    assert planned["offered"]["requests"] == 2000
    refused = CliRunner().invoke(app, ["experiment", "plan", "aa-simulated", "--set", "repeat=1"])
    assert refused.exit_code == 2
    assert "repeat: unknown key" in refused.output


def invoke(*arguments: str) -> str:
    """Output of a refused command."""
    ended = CliRunner().invoke(app, ["experiment", *arguments])
    assert ended.exit_code == 2, ended.output
    return ended.output


@pytest.mark.parametrize(
    ("backend", "fleet", "messages"),
    [
        ({"profile": "bogus"}, {}, ["hardware profile 'bogus': neither a file nor one of configs/hardware"]),
        ({}, {"profile": "bogus"}, ["hardware profile 'bogus'"]),
        ({"profile": "h20_points"}, {}, ["arms a, b: ", "is not a hardware profile", "decode: unknown key"]),
        ({}, {"pool_tokens": 10}, ["arm b: a KV pool of 10 tokens holds no block of 64"]),
        ({}, {"transport": "pigeon"}, ["arm b: profile h200 has no transport 'pigeon'"]),
        ({"pool_tokens": 10}, {"prefill_instances": 8}, ["arm a: a KV pool", "arm b: --prefill-instances must leave"]),
    ],
)
@pytest.mark.usefixtures("checked_here")
def test_engines_that_cannot_exist_are_refused_before_anything_starts(
    tmp_path: Path, backend: dict[str, Any], fleet: dict[str, Any], messages: list[str]
) -> None:
    arms = {"a": {"policy": "linear"}, "b": {"policy": "linear", "fleet": fleet, "offload": "cost_model"}}
    source = loaded(tmp_path, arms=arms, backend={**SIMULATED["backend"], **backend}).source
    output = tmp_path / "run"
    for refusal in (invoke("plan", str(source)), invoke("run", str(source), "--output", str(output))):
        for message in messages:
            assert message in refusal
        # Neither a points file among the profiles, nor pydantic's own text.
        assert "h20_points, " not in refusal
        assert "errors.pydantic.dev" not in refusal
    assert {path.name for path in output.iterdir()} <= {".lock"}


def test_the_simulator_s_own_process_checks_the_engines(tmp_path: Path) -> None:
    arms = {"a": {"policy": "linear"}, "b": {"policy": "linear", "fleet": {"pool_tokens": 10}}}
    source = loaded(tmp_path, arms=arms).source
    for refusal in (invoke("plan", str(source)), invoke("run", str(source), "--output", str(tmp_path / "run"))):
        assert "arm b: a KV pool of 10 tokens holds no block of 64" in refusal
        assert "arm a" not in refusal


def test_live_arms_with_engines_that_cannot_exist_are_refused_before_anything_starts(tmp_path: Path) -> None:
    fleets: dict[str, dict[str, Any]] = {
        "a": {},
        "b": {"sim.kv_capacity_tokens": 10},
        "c": {"sim.kv_capacity_tokens": 10},
        "d": {"sim": {"transport": "pigeon"}},
    }
    arms = {name: {"policy": "linear", "fleet": fleet} for name, fleet in fleets.items()}
    refusal = invoke("plan", str(loaded(tmp_path, LIVE, arms=arms).source))
    assert "arms b, c: sim: a KV pool of 10 tokens holds no block of 64" in refusal
    assert "arm d: sim: profile h20 has no transport 'pigeon'" in refusal
    assert "arm a" not in refusal
    del arms["a"], arms["d"]  # each further fleet is another process
    output = tmp_path / "run"
    refusal = invoke("run", str(loaded(tmp_path, LIVE, arms=arms).source), "--output", str(output))
    assert "arms b, c: sim: a KV pool of 10 tokens holds no block of 64" in refusal
    assert {path.name for path in output.iterdir()} <= {".lock"}


def test_a_directory_that_cannot_be_used_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "nothing to resume: no runs/aa-simulated-*" in invoke("run", "aa-simulated", "--resume")
    elsewhere = tmp_path / "elsewhere"
    assert "give the directory that" in invoke("run", "aa-simulated", "--resume", "--output", str(elsewhere))
    assert not elsewhere.exists()
    assert "leave it at 1" in invoke("run", "policies-live-sim", "--jobs", "2", "--output", str(elsewhere))
    elsewhere.mkdir()
    (elsewhere / "experiment.json").write_text("{}")
    for command in ("status", "verify"):
        assert "not the state of an experiment" in invoke(command, str(elsewhere))


def test_the_newest_of_a_name_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for age_s, name in ((10, "mine-20260101-000000"), (20, "mine-20260202-000000"), (1, "mine-too-20260303-000000")):
        state = tmp_path / "runs" / name / STATE_FILE
        state.parent.mkdir(parents=True)
        state.write_text("{}")
        os.utime(state, (1e9 - age_s, 1e9 - age_s))
    assert _newest("mine") == Path("runs/mine-20260101-000000")


def test_changes_are_reported_by_key() -> None:
    before = {"a": 1, "b": {"c": [1], "d": "x"}, "gone": True}
    assert config_changes(before, before) == []
    assert config_changes(before, {"a": 2, "b": {"c": [1, 2], "d": "x"}, "new": 0}) == [
        "a: was 1, now 2",
        "b.c: was [1], now [1,2]",
        "gone: was true, now missing",
        "new: was missing, now 0",
    ]


class TestGuide:
    GUIDE = (EXPERIMENTS.parents[1] / "docs" / "compare.md").read_text()

    def test_its_keys_are_the_models(self) -> None:
        page = EXPERIMENTS.parents[1] / "docs" / "reference" / "experiment-file.md"
        assert page.read_text() == reference(), "run `make reference`"

    def test_every_key_is_described(self) -> None:
        lacking = [
            f"{title}: {name}"
            for title, model in SECTIONS
            for name, f in model.model_fields.items()
            if not f.description
        ]
        assert lacking == []

    def test_its_example_is_an_experiment(self) -> None:
        example = yaml.safe_load(self.GUIDE.split("```yaml\n", 1)[1].split("```", 1)[0])
        assert list(parse_experiment(example).arms) == ["linear", "eager", "elastic"]

    def test_it_lists_the_shipped_experiments_with_their_backend(self) -> None:
        table = self.GUIDE.split("| file | backend | content |\n| --- | --- | --- |\n", 1)[1].split("\n\n", 1)[0]
        listed = {row.split("|")[1].strip(" `"): row.split("|")[2].strip() for row in table.splitlines()}
        assert listed == {
            path.stem: yaml.safe_load(path.read_text())["backend"]["kind"] for path in EXPERIMENTS.glob("*.yaml")
        }

    def test_it_lists_the_files_that_are_kept(self) -> None:
        for name in (*KEPT_FILES, STATE_FILE, CONFIG_FILE, TRACE_FILE, ENVIRONMENT_FILE, COMPARISON_FILE):
            assert name in self.GUIDE


class TestEnvironments:
    """Two Pythons of the engines as arms."""

    def python(self, folder: Path, connector: str) -> str:
        """A Python with a stand-in of vLLM."""
        place = folder / "site/vllm/distributed/kv_transfer/kv_connector/v1/mooncake"
        place.mkdir(parents=True)
        (folder / "site/vllm/__init__.py").touch()
        (place / "mooncake_connector.py").write_text(connector)
        wrapper = folder / "python"
        wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable} "$@"\n')
        wrapper.chmod(0o755)
        return str(wrapper)

    def test_each_arm_has_its_python_and_the_record_its_transfer_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
        pythons = [self.python(tmp_path / name, f"# {name}\n") for name in ("current", "other")]
        changes = [f"backend.overrides.vllm.python={pythons[0]}", f"arms.other.fleet.vllm.python={pythons[1]}"]
        fleets = arm_fleets(load_experiment(Path("environments-live"), changes))
        assert {fleet.pair_warmup.mode for fleet in fleets.values()} == {"require"}
        now = software(fleets.values())
        assert [engine.executable for engine in now.engines] == sorted(pythons)
        hashes = {}
        for arm, fleet in fleets.items():
            (engine,) = engines_of(now, [fleet])
            hashes[arm] = engine.transfer_path
        assert hashes == {
            name: {"vllm/mooncake_connector.py": hashlib.sha256(f"# {name}\n".encode()).hexdigest()} for name in fleets
        }

    def test_an_engine_that_changes_between_runs_is_noticed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
        python = self.python(tmp_path, "# before\n")
        changes = [f"backend.overrides.vllm.python={python}", "arms.other.fleet={vllm: {enforce_eager: true}}"]
        fleets = arm_fleets(load_experiment(Path("environments-live"), changes))
        assert [fleet.members[0].vllm.enforce_eager for fleet in fleets.values()] == [False, True]
        before = software(fleets.values())
        assert differences(before, software(fleets.values())) == []
        (changed,) = tmp_path.rglob("mooncake_connector.py")
        changed.write_text("# after\n")
        (found,) = differences(before, software(fleets.values()))
        assert found.startswith("engines.0.transfer_path.vllm/mooncake_connector.py: ")
