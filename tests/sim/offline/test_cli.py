"""``warmroute simulate`` from the command line: its files are read by the replayer's own commands."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from replayer.cli import register as register_replayer
from replayer.records.runs import read_run
from replayer.records.sessions import session_tally
from replayer.report.page import read_breakdown, summarise_arm
from replayer.traces.formats import bailian
from replayer.traces.trace import TraceRequest
from sim.offline.cli import simulate_command
from sim.offline.running import new_files
from sim.offline.setup import SETTING_OF_OPTION, Setup
from sim.offline.simulate import SimOptions
from sim.server.settings import ServerSettings
from tests.full_disk import limited_to
from tests.sim.offline.offline_runs import agents, conversation

ROOT = Path(__file__).parents[3]


def application() -> typer.Typer:
    app = typer.Typer()
    register_replayer(app)
    app.command("simulate")(simulate_command)
    return app


APP = application()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "agents.jsonl.zst"
    bailian.write(path, agents(60).requests)
    return path


def call(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(APP, [str(each) for each in arguments], env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.output


def test_its_runs_are_read_as_a_replays_are(trace: Path, tmp_path: Path) -> None:
    for policy in ("linear", "round_robin"):
        run, rows = tmp_path / f"{policy}.jsonl", tmp_path / f"{policy}-rows.jsonl"
        said = call("simulate", trace, "-o", run, "--breakdown-output", rows, "--policy", policy, "--instances", 3)
        assert "60 / 60" in said
        assert len(read_breakdown(rows)) == 60
        assert read_run(run).header.label == policy
    runs = [tmp_path / "linear.jsonl", tmp_path / "round_robin.jsonl"]
    assert "60 requests of 60 planned, 60 ok, complete" in call("summary", runs[0])
    assert "round_robin" in call("compare", *runs)
    arm = summarise_arm("linear", read_run(runs[0]))
    assert sum(arm.requests_by_instance.values()) == 60
    assert arm.summary.predicted_requests == 60


def test_a_simulation_without_any_success_exits_1(trace: Path, tmp_path: Path) -> None:
    said = call("simulate", trace, "-o", tmp_path / "run.jsonl", "--max-model-len", 16, code=1)
    assert "error: none of 60 requests succeeded: 60 x HTTP 400: no room for prompt and output in 16 tokens" in said
    assert len(read_run(tmp_path / "run.jsonl").records) == 60


def test_requests_beyond_the_longest_context_are_reported_with_the_limit(tmp_path: Path) -> None:
    """One whose prompt leaves no room, two, and one whose output has room for 4 of its 9 tokens."""
    path, run = tmp_path / "long.jsonl", tmp_path / "run.jsonl"
    bailian.write(path, [one for first, blocks in ((1, 5), (2, 6), (3, 3)) for one in long_request(first, blocks)])
    said = call("simulate", path, "-o", run, "--instances", 2, "--pool-tokens", 300)
    refused = "HTTP 400: no room for prompt and output in 256 tokens (--max-model-len, at most the KV pool)"
    assert f"failed: 2 x {refused}: the prompt has 327\n" in said
    assert "failed, 2x: HTTP 400: no room" in call("summary", run)
    roomy = call("simulate", path, "-o", tmp_path / "roomy.jsonl", "--max-model-len", 395)
    assert "outputs cut short: 1, where prompt and output exceed --max-model-len (at most the KV pool)" in roomy
    assert "failed" not in roomy


def long_request(chat_id: int, blocks: int) -> list[TraceRequest]:
    return conversation((float(chat_id), blocks, 9), session=f"s{chat_id}", first_id=chat_id)


def test_options_reach_the_run(trace: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    options = ["--policy", "linear", "--policy-param", "alpha=0.25", "--planner", "threshold", "--label", "mine"]
    options += ["--planner-param", "max_in_flight=2", "--pool-tokens", "90000", "--arrival-speed", "2", "--seed", "5"]
    options += ["--arrival-jitter-s", "1", "--speed-sigma", "0.1", "--slowdown", "1.2", "--request-limit", "40"]
    call("simulate", trace, "-o", run, *options)
    header, records, _, _ = read_run(run)
    assert (header.label, header.endpoint, header.seed, header.time_scale, header.think_scale) == (
        "mine",
        "sim:offline",
        5,
        2.0,
        2.0,
    )
    assert header.options["policy_params"]["alpha"] == 0.25
    assert header.options["planner_params"]["max_in_flight"] == 2
    assert header.options["role"] == "kv_both"  # a planner needs it
    assert (header.options["pool_tokens"], header.options["slowdown"]) == (90_000, 1.2)
    assert header.options["kv_capacity_tokens"] == 90_000 // 64 * 64
    assert len(records) == 40


def test_a_session_that_the_limit_cut_is_not_completed_in_a_stream_either(trace: Path, tmp_path: Path) -> None:
    printed = []
    for name, options in (("whole", ()), ("streamed", ("--stream",))):
        run = tmp_path / f"{name}.jsonl"
        said = call("simulate", trace, "-o", run, "--request-limit", 40, *options)
        figures = session_tally([read_run(run)]).figures()
        assert figures.cut == 1
        assert f" {figures.completed} / {figures.sessions} " in said
        printed.append([line for line in said.splitlines() if line.startswith("│")])
    assert printed[0] == printed[1]


def test_a_stream_writes_the_same_records(trace: Path, tmp_path: Path) -> None:
    whole, streamed = tmp_path / "whole.jsonl", tmp_path / "streamed.jsonl"
    call("simulate", trace, "-o", whole, "--policy", "lmetric")
    assert "sessions known at once" in call("simulate", trace, "-o", streamed, "--policy", "lmetric", "--stream")
    assert whole.read_bytes().split(b"\n")[1:] == streamed.read_bytes().split(b"\n")[1:]
    further = tmp_path / "further.jsonl"
    call("simulate", trace, "-o", further, "--policy", "lmetric", "--stream", "--look-ahead-s", 900)
    assert further.read_bytes().split(b"\n")[1:] == whole.read_bytes().split(b"\n")[1:]


def test_the_options_of_the_loader_reach_it(trace: Path, tmp_path: Path) -> None:
    requests = agents(60).requests
    for request in requests:
        request.timestamp_s *= 1_000_000
    in_us = tmp_path / "us.jsonl"
    bailian.write(in_us, requests)
    assert "--time-unit us" in call("simulate", in_us, "-o", tmp_path / "no.jsonl", code=2)
    for options in ((), ("--stream",), ("--sweep", "seed=1")):
        written = tmp_path / f"{len(options)}{'stream' in str(options)}"
        call("simulate", in_us, "-o", written, "--time-unit", "us", "--instances", 3, *options)
        run = read_run(written / "000-seed=1.jsonl" if written.is_dir() else written)
        call("simulate", trace, "-o", tmp_path / f"s{written.name}", "--instances", 3)
        expected = read_run(tmp_path / f"s{written.name}").records
        assert [each.scheduled_s for each in run.records] == pytest.approx([each.scheduled_s for each in expected])
    call("trace", "sample", in_us, "-o", tmp_path / "few.jsonl", "--time-unit", "us", "--target-requests", 10)
    call("trace", "repeat", in_us, "-o", tmp_path / "more.jsonl", "--time-unit", "us")


def test_a_sweep_writes_a_folder(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    said = call("simulate", trace, "-o", folder, "--sweep", "policy=linear,lmetric", "--instances", 2, "--jobs", 1)
    assert "done: policy=lmetric" in said
    assert f"written: {folder} (sweep.json and 2 run files)" in said
    points = json.loads((folder / "sweep.json").read_text())["points"]
    assert [point["run"] for point in points] == ["000-policy=linear.jsonl", "001-policy=lmetric.jsonl"]
    assert read_run(folder / points[1]["run"]).header.options["instances"] == 2
    failing = tmp_path / "failing"
    said = call("simulate", trace, "-o", failing, "--sweep", "pool-tokens=null,3", "--jobs", 1, code=1)
    assert f"written: {failing} (sweep.json and 1 run file)" in said


def test_no_figure_is_cut_on_a_narrow_terminal(trace: Path, tmp_path: Path) -> None:
    sweep = ("--sweep", "policy=warm,session_sticky", "--sweep", "pool-tokens=3,null", "--jobs", "1")
    arguments = ["simulate", str(trace), "-o", str(tmp_path / "sweep"), "--slowdown", "9999", *sweep]
    said = CliRunner().invoke(APP, arguments, env={"COLUMNS": "80"}).output
    assert "…" not in said
    words = said.split()
    for point in json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]:
        if point["error"] is not None:
            assert "failed" in words
            continue
        for name, scale, digits in (("ttft", 1, 2), ("tpot", 1e3, 1), ("e2e", 1, 2)):
            for share in ("p50", "p90", "p99"):
                assert f"{scale * point['figures'][f'{name}_{share}_s']:.{digits}f}" in words


OWN = """
from policies.routing.warm import Warm


class Own(Warm):
    name = "own"
"""


def test_a_class_that_no_package_declares_is_simulated_too(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "my_policy.py").write_text(OWN)
    same = ["--sweep", "policy=warm,my_policy:Own", "--jobs", "2"]
    command = [sys.executable, "-m", "warmroute", "simulate", str(trace), "-o", "sweep", "--instances", "2", *same]
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    figures = [point["figures"] for point in json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]]
    assert figures[0] == figures[1]


FAILING = """
class Policy:
    name = "mine"

    def choose(self, request, fleet):
        raise KeyError("lost")


class Planner:
    name = "mine"

    def plan(self, *arguments):
        return 1 / 0


class Rule:
    name = "mine"
    keep_s = 30.0

    def admit(self, request, session, fleet):
        return None


class Unkept:
    name = "mine"

    def admit(self, request, session, fleet): ...
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--policy failing_policy:Policy", r"policy 'mine' failed at request '\S+-0': KeyError: 'lost' \({file}:6\)"),
        ("--policy failing_policy:Policy --stream", r"policy 'mine' failed at request '\S+-0': KeyError: 'lost'"),
        (
            "--planner failing_policy:Planner",
            r"planner 'mine' failed at request '\S+-0': ZeroDivisionError: division by zero \({file}:13\)",
        ),
        (
            "--admission failing_policy:Rule",
            r"admission rule 'mine' failed at request '\S+-0': ValueError: admission rule 'mine' answered None",
        ),
        ("--admission failing_policy:Unkept", "admission rule 'failing_policy:Unkept' has no attribute 'keep_s'"),
    ],
)
def test_what_a_class_of_ones_own_raises_is_one_line_with_its_place(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, message: str
) -> None:
    file, run = tmp_path / "failing_policy.py", tmp_path / "run.jsonl"
    file.write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "failing_policy", raising=False)
    said = call("simulate", trace, "-o", run, *options.split(), code=2)
    assert re.match(f"error: {message.format(file=re.escape(str(file)))}", said), said
    assert said.count("\n") == 1
    assert not run.exists()


def test_python_m_sim_simulates_too(trace: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "sim", "simulate", str(trace), "-o", str(run), "--request-limit", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert len(read_run(run).records) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "best"], "unknown routing policy 'best'"),
        (["--policy", "no_such_module:Best"], "'no_such_module:Best' cannot be loaded: ModuleNotFoundError"),
        (["--policy", "policies.types:Best"], "'policies.types:Best' cannot be loaded: AttributeError"),
        (["--planner", "policies.types:Role"], "offload planner 'policies.types:Role'"),
        (["--policy", "linear", "--policy-param", "beta=1"], "has no parameter 'beta'"),
        (["--policy-param", "alpha"], "give parameters as KEY=VALUE"),
        (["--planner", "best"], "unknown offload planner 'best'"),
        (["--profile", "gh9000"], "h20, h200"),
        (["--pool-tokens", "10"], "holds no block"),
        (["--instances", "1000000000"], "--instances must be within 1..10000"),
        (["--role", "kv_producer"], "--role kv_producer: no instance could decode"),
        (["--sweep", "role=kv_producer,none", "--sweep", "seed=1,2"], "--role kv_producer: no instance could decode"),
        (["--slowdown", "0"], "error: --slowdown must be above 0"),
        (["--max-hold-s", "0"], "error: --max-hold-s must be above 0"),
        (["--arrival-speed", "0"], "--arrival-speed and --think-speed must be above 0"),
        (["--jobs", "2"], "are for sweeps"),
        (["--ray"], "are for sweeps"),
        (["--resume"], "are for sweeps"),
        (["--look-ahead-s", "3"], "--look-ahead-s is for streams"),
        (["--look-ahead-s", "600"], "--look-ahead-s is for streams"),
        (["--look-ahead-s", "3", "--sweep", "seed=1,2"], "--look-ahead-s is for streams"),
        (["--sweep", "policy=linear", "--stream"], "cannot be given together"),
        (["--sweep", "policy"], "give KEY=VALUE1"),
        (["--stream", "--max-inflight-sessions", "3"], "--max-inflight-sessions"),
    ],
)
def test_bad_input_is_reported_and_leaves_no_file(
    trace: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    run = tmp_path / "run.jsonl"
    said = call("simulate", trace, "-o", run, *options, code=2)
    assert message in " ".join(said.split())
    assert not run.exists()


def test_a_missing_trace_and_an_existing_output_are_refused(trace: Path, tmp_path: Path) -> None:
    assert "no such trace" in call("simulate", tmp_path / "none.jsonl", "-o", tmp_path / "run.jsonl", code=2)
    run = tmp_path / "old.jsonl"
    one = call("simulate", trace, "-o", run, "--breakdown-output", tmp_path / "." / "old.jsonl", code=2)
    assert "--output and --breakdown-output name one file" in one
    run.write_text("precious")
    assert "already exists" in call("simulate", trace, "-o", run, code=2)
    assert run.read_text() == "precious"


def test_what_fails_half_way_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"

    def broken() -> None:
        with new_files(path, None) as (file, none):
            assert none is None
            assert file is not None
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        broken()
    assert not path.exists()


def test_a_file_that_another_run_made_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def second() -> None:
        with new_files(path) as (file,):
            assert file is not None
            file.write(b"second")
            path.write_text("first")

    with pytest.raises(FileExistsError):
        second()
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_reported_with_the_file(trace: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    with limited_to(100):
        assert "run.jsonl" in call("simulate", trace, "-o", run, code=2)
    assert not run.exists()


def test_defaults_agree_wherever_they_are_written() -> None:
    """Equal defaults in the command's options, the setup and the library's options."""
    setup = {field.name: field.default for field in msgspec.structs.fields(Setup) if field.name != "trace"}
    parameters = inspect.signature(simulate_command).parameters
    command = {SETTING_OF_OPTION.get(name, name): parameter.default for name, parameter in parameters.items()}
    shared = setup.keys() & command.keys() - {"speeds"}
    assert len(shared) >= 20
    assert {name: command[name] for name in shared} == {name: setup[name] for name in shared}
    options = SimOptions()
    for name in setup.keys() & {each.name for each in dataclasses.fields(SimOptions)} - {"role", "label"}:
        assert getattr(options, name) == setup[name], name
    assert (options.plan.idle_gap_cap_s, options.noise.arrival_jitter_s) == (60.0, 0.0)
    engine = inspect.signature(ServerSettings.resolve).parameters
    for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "transport", "scheduling_policy"):
        assert engine[name].default == getattr(options, name)


def test_every_option_explains_itself() -> None:
    for parameter in inspect.signature(simulate_command, eval_str=True).parameters.values():
        (info,) = parameter.annotation.__metadata__
        assert info.help, parameter.name
