"""The offloading experiment: its arms, their fleets, and the table made from the kept records."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from bench.elastic_ab import app, arm_fleet, arms_of, cut_trace
from bench.elastic_table import ARM_FILE, markdown, read_arms
from launch.fleet.file import load_fleet
from replayer.traces.formats.bailian import write
from replayer.traces.shorten import shortened
from replayer.traces.synth import SynthOptions, synthetic_trace
from replayer.traces.trace import TraceError
from tests.launch.conftest import free_base

REPOSITORY = Path(__file__).resolve().parents[2]


def test_every_planner_runs_at_every_load_and_none_is_always_first() -> None:
    planners = ["never", "threshold", "cost_model"]
    arms = arms_of([1.0, 2.0, 3.0], planners)
    assert sorted(arms) == sorted((load, name) for load in (1.0, 2.0, 3.0) for name in planners)
    assert [name for _, name in arms[::3]] == planners


def test_arms_differ_in_planner_and_policy_only() -> None:
    base = load_fleet(Path("elastic-4x-kv-both"))
    fleet = arm_fleet(base, "linear", "threshold", {"threshold": {"max_in_flight": 2}})
    assert fleet.proxy["policy"] == {"name": "linear"}
    assert fleet.proxy["offload"] == {"planner": "threshold", "params": {"max_in_flight": 2}}
    assert fleet.model_copy(update={"proxy": base.proxy}) == base


def test_the_window_cuts_late_calls_and_long_outputs_only() -> None:
    trace = synthetic_trace(SynthOptions(requests=60, seed=1))
    cut = cut_trace(trace, 30.0, 100)
    kept = [request for request in trace.requests if request.timestamp_s < 30.0]
    assert [request.chat_id for request in cut.requests] == [request.chat_id for request in kept]
    assert [request.output_length for request in cut.requests] == [min(100, each.output_length) for each in kept]
    with pytest.raises(TraceError, match="no request within"):
        cut_trace(trace, 0.0, 100)


def test_shortening_keeps_what_was_shared() -> None:
    trace = synthetic_trace(SynthOptions(requests=40, seed=2))
    short = shortened(trace, 0.25)
    for before, after in zip(trace.requests, short.requests, strict=True):
        assert list(after.hash_ids) == list(before.hash_ids)[: len(after.hash_ids)]
        assert after.input_length <= len(after.hash_ids) * trace.block_tokens
        assert after.input_length < before.input_length or len(before.hash_ids) == 1


@pytest.mark.fleet
def test_two_arms_on_simulated_engines_give_a_table(tmp_path: Path) -> None:
    base = free_base()
    trace = tmp_path / "trace.jsonl"
    options = SynthOptions(requests=40, seed=3, rate_per_s=4.0)
    made = synthetic_trace(options)
    write(trace, made.requests)
    arguments = ["run", str(trace), "-o", str(tmp_path / "out"), "--fleet", "sim-8x-kv-both", "--hardware", "simulated"]
    for setting in (
        "count=2",
        f"base_port={base}",
        f"base_bootstrap_port={base + 10}",
        f"proxy.port={base + 20}",
        "sim.profile=h200",
        "sim.transport=nvlink",
        "sim.time_scale=20",
    ):
        arguments += ["--set", setting]
    arguments += ["--engine-speed", "20", "--load", "2", "--planner", "never", "--planner", "threshold"]
    result = CliRunner().invoke(app, [*arguments, "--skip-first-s", "0"])
    assert result.exit_code == 0, result.output
    kept = tmp_path / "out" / "kept"
    arms = read_arms(kept)
    assert [(arm.note.planner, arm.note.load, arm.note.instances) for arm in arms] == [
        ("never", 2.0, 2),
        ("threshold", 2.0, 2),
    ]
    assert all(record.ok for arm in arms for record in arm.run.records)
    table = markdown(kept)
    assert table in result.output
    assert f"| `never` | kept | {len(made.requests)}/{len(made.requests)} |" in table
    assert "| against `never` |" in table
    fresh = [msgspec.json.decode((kept / arm.note.label / "fresh.json").read_bytes()) for arm in arms]
    ids = [engine["engine_ids"][0] for proof in fresh for engine in proof["engines"]]
    assert len(set(ids)) == 4, "every arm has its own engines"
    offloaded = sum(row["prefill_instance"] is not None for row in arms[1].rows)
    assert offloaded > 0
    assert "transfer leg median" in table


def test_a_folder_without_arms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=ARM_FILE.replace(".", r"\.")):
        markdown(tmp_path)


def test_the_script_says_how_it_is_used() -> None:
    script = REPOSITORY / "bench" / "gpu" / "elastic_ab.sh"
    assert os.access(script, os.X_OK)
    reported = subprocess.run([str(script)], capture_output=True, text=True, timeout=30, check=False)
    assert reported.returncode == 2
    assert "elastic_ab.sh TRACE OUTPUT" in reported.stdout


@pytest.mark.parametrize(
    ("begins", "ends", "results"),
    [
        ("<!-- table -->", "<!-- end of table -->", "elastic-h200-4x"),
        ("<!-- long sessions -->", "<!-- end of long sessions -->", "elastic-h200-4x-long"),
    ],
)
def test_the_published_tables_are_what_the_kept_records_say(begins: str, ends: str, results: str) -> None:
    page = (REPOSITORY / "docs" / "elastic.md").read_text()
    published = page.split(f"{begins}\n")[1].split(f"\n{ends}")[0]
    assert published == markdown(REPOSITORY / "docs" / "results" / results)


def engine_ids_of(results: str, requests: int) -> list[str]:
    """Engine ids of all kept arms, each of which was fresh, complete and over NVLink."""
    engine_ids: list[str] = []
    for arm in read_arms(REPOSITORY / "docs" / "results" / results):
        folder = REPOSITORY / "docs" / "results" / results / arm.repeat / arm.note.label
        proof = msgspec.json.decode((folder / "fresh.json").read_bytes())
        assert [engine["problems"] for engine in proof["engines"]] == [[]] * 4
        engine_ids += [engine["engine_ids"][0] for engine in proof["engines"]]
        assert arm.run.end is not None
        assert len(arm.run.records) == requests
        assert all(record.ok for record in arm.run.records)
        assert arm.note.transport == "nvlink"
    return engine_ids


@pytest.mark.parametrize(
    ("results", "arms", "requests"), [("elastic-h200-4x", 10, 159), ("elastic-h200-4x-long", 4, 287)]
)
def test_the_kept_arms_were_fresh_complete_and_over_nvlink(results: str, arms: int, requests: int) -> None:
    assert len(set(engine_ids_of(results, requests))) == 4 * arms, "an engine served two arms"


def test_the_first_runs_hand_offs_were_mostly_short() -> None:
    arms = read_arms(REPOSITORY / "docs" / "results" / "elastic-h200-4x")
    rows = [row for arm in arms for row in arm.rows]
    assert sum(row["predicted_cached_tokens"] == row["actual_cached_tokens"] for row in rows) == 1588
    offloaded = [row for arm in arms if arm.note.planner == "cost_model" for row in arm.rows if row["prefill_instance"]]
    assert (len(offloaded), sum(row["legs"]["prefill"]["actual_s"] <= 0.3 for row in offloaded)) == (65, 48)
