"""Sweeps: every combination once, the same files for every executor, a failed point does not affect others."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from policies.registry import PolicyParameterError, UnknownPolicyError
from policies.routing.round_robin import RoundRobin
from policies.types import NoCandidateError, Role
from replayer.records.runs import read_run
from replayer.traces.formats import bailian
from sim.offline.options import SimulationError
from sim.offline.setup import Setup, changed, parsed_params
from sim.offline.sweeps.journal import JOURNAL
from sim.offline.sweeps.sweep import Point, PointResult, in_processes, on_ray, points_of, run_sweep, simulate_point
from tests.full_disk import limited_to
from tests.sim.offline.offline_runs import agents
from warmroute_yaml import HARDWARE_FOLDER

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "agents.jsonl"
    bailian.write(path, agents(60).requests)
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_points_are_all_combinations_in_order(trace: Path) -> None:
    base = Setup(trace=str(trace), label="mine", policy="lmetric", policy_params={"min_window": 8})
    points = points_of(base, ["policy=lmetric,round_robin", "arrival-speed=1,2.5", "planner=threshold"])
    assert [point.values for point in points] == [
        {"policy": policy, "arrival-speed": scale, "planner": "threshold"}
        for policy in ("lmetric", "round_robin")
        for scale in (1, 2.5)
    ]
    assert points[1].name == points[1].setup.label == "policy=lmetric arrival-speed=2.5 planner=threshold"
    assert points[1].file == "001-policy=lmetric_arrival-speed=2.5_planner=threshold.jsonl"
    assert points[0].setup.policy_params == {"min_window": 8}  # of the base's policy
    assert points[2].setup.policy_params == {}
    assert points[3].setup.time_scale == 2.5
    assert points[3].setup.options().role is Role.KV_BOTH


def test_values_are_typed_as_their_settings_are(trace: Path) -> None:
    base = Setup(trace=str(trace), policy="linear")
    points = points_of(base, ["pool_tokens=null,200000", "role=kv_both", "policy.alpha=0.5"])
    assert [point.setup.pool_tokens for point in points] == [None, 200_000]
    assert points[1].setup.role is Role.KV_BOTH
    assert points[1].setup.policy_params == {"alpha": 0.5}


@pytest.mark.parametrize(
    ("sweeps", "error", "message"),
    [
        (["policy"], SimulationError, "KEY=VALUE1"),
        (["=1,2"], SimulationError, "KEY=VALUE1"),
        (["colour=red"], SimulationError, "'colour' cannot be swept; choose one of admission, arrival_jitter_s"),
        (["trace=a,b"], SimulationError, "cannot be swept"),
        (["instances=2,many"], SimulationError, "instances=many: Expected `int`"),
        (["instances=2", "instances=3"], SimulationError, "given twice"),
        (["seed=1,1"], SimulationError, "a value is given twice"),
        (["instances=0"], SimulationError, "--instances"),
        (["max-num-seqs=0,1,256"], SimulationError, "--max-num-seqs 0: must be at least 1"),
        (["max-num-batched-tokens=256,0"], SimulationError, "--max-num-batched-tokens 0: must be at least 1"),
        (["max-model-len=null,0"], SimulationError, "--max-model-len 0: must be at least 2"),
        (["arrival-speed=1,.nan"], SimulationError, "--arrival-speed and --think-speed must be above 0"),
        (["think-speed=.inf"], SimulationError, "--arrival-speed and --think-speed must be above 0"),
        (["arrival-jitter-s=.inf,0"], SimulationError, "--arrival-jitter-s must be at least 0 and finite"),
        (["speed-sigma=.nan"], SimulationError, "--speed-sigma"),
        (["slowdown=.nan"], SimulationError, "--slowdown must be above 0"),
        (["request-limit=0,5"], SimulationError, "--request-limit"),
        (["max-model-len=-3"], SimulationError, "--max-model-len -3: must be at least 2"),
        (["policy=linear,best"], UnknownPolicyError, "'best'"),
        (["policy.beta=1"], PolicyParameterError, "beta"),
        (["label=a,b"], SimulationError, "cannot be swept"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused_before_it_begins(
    trace: Path, sweeps: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        points_of(Setup(trace=str(trace)), sweeps)


def test_instances_can_hand_over_kv_where_the_policy_chooses_p(trace: Path) -> None:
    base = Setup(trace=str(trace))
    roles = {point.name: point.setup.options().role for point in points_of(base, ["policy=warm,joint,migrate"])}
    assert roles == {"policy=warm": Role.NONE, "policy=joint": Role.KV_BOTH, "policy=migrate": Role.KV_BOTH}
    assert Setup(trace=str(trace), policy="joint", role=Role.NONE).options().role is Role.NONE
    assert Setup(trace=str(trace), policy="joint", prefill_instances=2).options().role is Role.NONE


def test_what_depends_on_the_trace_shows_when_it_is_simulated(trace: Path) -> None:
    (point,) = points_of(Setup(trace=str(trace)), ["pool-tokens=3"])
    result = simulate_point(point.setup)
    assert result.error is not None
    assert "holds no block of 64" in result.error


def test_processes_and_one_process_write_the_same(trace: Path, tmp_path: Path) -> None:
    base = Setup(trace=str(trace), instances=3)
    points = points_of(base, ["policy=linear,lmetric", "seed=1,2", "arrival-jitter-s=1"])
    done: list[str] = []
    results = run_sweep(points, base, tmp_path / "two", in_processes(2), lambda point, _: done.append(point.name))
    run_sweep(points, base, tmp_path / "one", in_processes(1), lambda *_: None)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert sorted(done) == sorted(point.name for point in points)
    assert [point.name for point, _ in results] == [point.name for point in points]
    summary = json.loads((tmp_path / "one" / "sweep.json").read_text())
    assert [each["name"] for each in summary["points"]] == [point.name for point in points]
    for each in summary["points"]:
        run = read_run(tmp_path / "one" / each["run"])
        assert run.end is not None
        assert run.header.label == each["name"]
        assert len(run.records) == each["figures"]["requests"] == each["figures"]["ok"] == 60


def test_a_point_that_fails_is_reported_and_the_others_continue(trace: Path, tmp_path: Path) -> None:
    base = Setup(trace=str(trace), instances=3)
    points = points_of(base, ["pool-tokens=null,3"])
    results = run_sweep(points, base, tmp_path / "out", in_processes(1), lambda *_: None)
    assert [result.error is None for _, result in results] == [True, False]
    summary = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert "holds no block" in summary["points"][1]["error"]
    assert summary["points"][1]["run"] is None
    assert len(files(tmp_path / "out")) == 2


def test_a_combination_that_contradicts_itself_is_recorded_and_a_value_that_never_fits_is_refused(
    trace: Path, tmp_path: Path
) -> None:
    base = Setup(trace=str(trace))
    points = points_of(base, ["instances=1,2", "prefill-instances=0,1"])
    results = run_sweep(points, base, tmp_path / "out", in_processes(1), lambda *_: None)
    assert [result.error is None for _, result in results] == [True, False, True, True]
    assert "--prefill-instances must leave" in str(results[1][1].error)
    with pytest.raises(SimulationError, match="--prefill-instances must leave"):
        points_of(base, ["instances=1,2", "prefill-instances=0,2"])


@pytest.mark.parametrize("failure", [ValueError("odd fleet"), NoCandidateError("no instance may take the request")])
def test_a_policy_that_raises_fails_its_points_only(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def choose(*_: object) -> None:
        raise failure

    for method in ("choose", "quick"):
        monkeypatch.setattr(RoundRobin, method, choose)
    base = Setup(trace=str(trace), instances=2)
    points = points_of(base, ["policy=round_robin,lmetric"])
    results = run_sweep(points, base, tmp_path / "out", in_processes(1), lambda *_: None)
    said = str(results[0][1].error)
    assert f"{type(failure).__name__}: {failure}" in said
    named = said.startswith("PolicyFailedError: policy 'round_robin' failed at request")
    assert (named, "test_sweep.py:" in said) == (isinstance(failure, ValueError),) * 2
    assert results[1][1].error is None
    summary = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [point["run"] for point in summary["points"]] == [None, points[1].file]


def test_an_error_that_a_process_cannot_send_back_is_recorded(trace: Path) -> None:
    points = points_of(Setup(trace=str(trace), instances=2), ["seed=1,2"])
    unsendable = points[0].setup.policy_params | {"alpha": lambda: None}
    points[0] = points[0]._replace(setup=msgspec.structs.replace(points[0].setup, policy_params=unsendable))
    results = {point.name: result for point, result in in_processes(2)(points)}
    assert "lambda" in str(results[points[0].name].error)
    assert results[points[1].name].error is None


def documented(command: str) -> list[list[list[str]]]:
    """Arguments of a command in the code blocks of the documents, one list for each block that has it."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    blocks = [block for page in pages for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.S | re.M)]
    lines = [[line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines()] for block in blocks]
    found = [[shlex.split(line, comments=True) for line in block if line.startswith(command)] for block in lines]
    return [block for block in found if block]


def given(arguments: list[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(arguments) if name == option]


def test_sweeps_in_the_documents_can_be_simulated(trace: Path) -> None:
    commands = [one for block in documented("warmroute simulate") for one in block if "--sweep" in one]
    assert len(commands) >= 4
    for command in commands:
        base = Setup(trace=str(trace), policy=(given(command, "--policy") or ["warm"])[0])
        assert len(points_of(base, given(command, "--sweep"))) > 1, command


def test_simulations_that_follow_each_other_in_the_documents_write_different_files() -> None:
    for block in documented("warmroute simulate"):
        outputs = [given(command, "-o")[:1] or ["run.jsonl"] for command in block]
        assert len(outputs) == len({output for [output] in outputs}), block


def test_nothing_is_written_over(trace: Path, tmp_path: Path) -> None:
    base = Setup(trace=str(trace))
    (tmp_path / "something").touch()
    with pytest.raises(SimulationError, match="not empty"):
        run_sweep(points_of(base, ["seed=1"]), base, tmp_path, in_processes(1), lambda *_: None)


def interrupted(points: Sequence[Point]) -> Iterator[tuple[Point, PointResult]]:
    """Simulates one point, the second."""
    yield points[1], simulate_point(points[1].setup)
    raise KeyboardInterrupt


def test_a_sweep_that_was_stopped_continues(trace: Path, tmp_path: Path) -> None:
    base, folder = Setup(trace=str(trace), instances=2), tmp_path / "out"
    points = points_of(base, ["seed=1,2,3"])
    with pytest.raises(KeyboardInterrupt):
        run_sweep(points, base, folder, interrupted, lambda *_: None)
    with (folder / JOURNAL).open("ab") as journal:
        journal.write(b'{"name":"seed=3","fi')  # killed while it wrote
    (folder / points[2].file).write_text("half a run")
    with pytest.raises(SimulationError, match="not empty; give another --output, or --resume to continue its sweep"):
        run_sweep(points, base, folder, in_processes(1), lambda *_: None)
    done: list[str] = []
    results = run_sweep(points, base, folder, in_processes(1), lambda point, _: done.append(point.name), resume=True)
    assert done == ["seed=1", "seed=3"]
    assert [point.name for point, _ in results] == ["seed=1", "seed=2", "seed=3"]
    run_sweep(points, base, tmp_path / "whole", in_processes(1), lambda *_: None)
    assert files(folder) == files(tmp_path / "whole")
    with pytest.raises(SimulationError, match="no sweep to continue"):
        run_sweep(points, base, folder, in_processes(1), lambda *_: None, resume=True)


def test_a_full_disk_ends_a_sweep_with_the_file_and_it_continues(trace: Path, tmp_path: Path) -> None:
    base = Setup(trace=str(trace))
    points = points_of(base, ["seed=0,1"])
    folder = tmp_path / "out"
    named = rf"{points[0].file}: cannot be written \(.*\); --resume continues the sweep once that is fixed"
    with limited_to(1000), pytest.raises(SimulationError, match=named):
        run_sweep(points, base, folder, in_processes(1), lambda *_: None)
    assert [path.name for path in folder.iterdir()] == [JOURNAL]
    results = run_sweep(points, base, folder, in_processes(1), lambda *_: None, resume=True)
    assert [result.error for _, result in results] == [None, None]
    assert {point.file for point in points} < {path.name for path in folder.iterdir()}


def test_a_point_whose_run_file_is_gone_is_simulated_again(trace: Path, tmp_path: Path) -> None:
    base = Setup(trace=str(trace), instances=2)
    points = points_of(base, ["seed=1,2"])
    with pytest.raises(KeyboardInterrupt):
        run_sweep(points, base, tmp_path / "out", interrupted, lambda *_: None)
    (tmp_path / "out" / points[1].file).unlink()
    run_sweep(points, base, tmp_path / "out", in_processes(1), lambda *_: None, resume=True)
    assert len(files(tmp_path / "out")) == 3


@pytest.mark.parametrize(
    ("sweeps", "change"),
    [(["seed=1,2"], {"instances": 3}), (["seed=1,3"], {}), (["seed=1,2"], {"profile": "h20"})],
)
def test_another_sweep_is_not_continued(
    trace: Path, tmp_path: Path, sweeps: list[str], change: dict[str, object]
) -> None:
    base = Setup(trace=str(trace), instances=2)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(points_of(base, ["seed=1,2"]), base, tmp_path / "out", interrupted, lambda *_: None)
    before = files(tmp_path / "out")
    other = msgspec.structs.replace(base, **change)
    with pytest.raises(SimulationError, match="its sweep has other values, settings"):
        run_sweep(points_of(other, sweeps), other, tmp_path / "out", in_processes(1), lambda *_: None, resume=True)
    (tmp_path / "out" / JOURNAL).write_text("{}\n")
    with pytest.raises(SimulationError, match="not a journal of a sweep"):
        run_sweep(points_of(base, ["seed=1,2"]), base, tmp_path / "out", in_processes(1), lambda *_: None, resume=True)
    assert before.keys() == files(tmp_path / "out").keys()


@pytest.mark.parametrize("changed", ["swept_policy.py", "swept_helper.py", "fast.yaml"])
def test_points_of_other_code_or_another_profile_are_not_mixed(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """A file that only a value of the sweep names decides the figures as those of the base do."""
    for name in ("swept_policy", "swept_helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "swept_policy.py").write_text("from swept_helper import Linear as Mine\n")
    (tmp_path / "swept_helper.py").write_text("from policies.routing.linear import Linear as Linear\n")
    (tmp_path / "fast.yaml").write_bytes((HARDWARE_FOLDER / "h20.yaml").read_bytes())
    base = Setup(trace=str(trace), instances=2)
    points = points_of(base, ["policy=warm,swept_policy:Mine", f"profile={tmp_path / 'fast.yaml'}"])
    with pytest.raises(KeyboardInterrupt):
        run_sweep(points, base, tmp_path / "out", interrupted, lambda *_: None)
    before = (tmp_path / changed).read_text()
    text = before.replace(" as", "  as").replace("prefill_s: ", "prefill_s: 1")
    assert text != before
    (tmp_path / changed).write_text(text)
    with pytest.raises(SimulationError, match="profile, version or code of a MODULE:Class"):
        run_sweep(points, base, tmp_path / "out", in_processes(1), lambda *_: None, resume=True)
    (tmp_path / changed).write_text(before)
    run_sweep(points, base, tmp_path / "out", in_processes(1), lambda *_: None, resume=True)
    assert len(files(tmp_path / "out")) == 3


def test_a_process_that_dies_is_reported(trace: Path, tmp_path: Path) -> None:
    """An executor may return results in any order, with errors in place of figures."""

    def execute(points: Sequence[Point]) -> Iterator[tuple[Point, PointResult]]:
        yield points[1], simulate_point(points[1].setup)
        yield points[0], PointResult({}, error="its process died")

    base = Setup(trace=str(trace))
    points = points_of(base, ["seed=1,2"])
    results = run_sweep(points, base, tmp_path / "out", execute, lambda *_: None)
    assert [result.error for _, result in results] == ["its process died", None]


def test_without_ray_it_says_what_to_install(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SimulationError, match=r"pip install 'warmroute\[ray\]'"):
        on_ray(Setup(trace=str(trace)))


@pytest.mark.timeout(300)
def test_on_ray_the_files_are_the_same(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is optional and not installed")
    base = Setup(trace=str(trace), instances=3)
    points = points_of(base, ["policy=linear,lmetric", "arrival-speed=1,-1"])
    run_sweep(points, base, tmp_path / "ray", on_ray(base), lambda *_: None)
    run_sweep(points, base, tmp_path / "here", in_processes(1), lambda *_: None)
    assert files(tmp_path / "ray") == files(tmp_path / "here")


def test_parameters_are_read_as_yaml() -> None:
    assert parsed_params(["a=1", "b=0.5", "c=true", "d=text", "e=1e3", "f="]) == {
        "a": 1,
        "b": 0.5,
        "c": True,
        "d": "text",
        "e": "1e3",
        "f": None,
    }
    with pytest.raises(PolicyParameterError, match="KEY=VALUE"):
        parsed_params(["alpha"])
    with pytest.raises(PolicyParameterError, match="not YAML"):
        parsed_params(["alpha=[1"])


def test_parameters_add_to_those_of_the_same_policy() -> None:
    base = Setup(trace="t", policy="unified", policy_params={"affinity_gate": 0.4})
    assert changed(base, {"policy.overload-factor": 2.0}).policy_params == {
        "affinity_gate": 0.4,
        "overload_factor": 2.0,
    }
    assert changed(base, {"policy": "unified"}).policy_params == {"affinity_gate": 0.4}
    assert changed(base, {"policy": "linear", "policy.alpha": 2}).policy_params == {"alpha": 2}
