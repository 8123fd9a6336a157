"""Two of warmroute's policies on two simulated engines: records, continuation, budget, table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from bench.gpu.routers_ab import app
from bench.routers.records import read_records, totals_of
from tests.integration.fleet import free_port
from tests.sim.server.test_http import EngineProcess

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Settings of a proxy in front of two engines."""
    engines: list[EngineProcess] = []
    try:
        events = [free_port() for _ in range(2)]
        for port in events:
            options = ("--role", "none", "--block-size", "16", "--kv-events-port", str(port))
            engines.append(EngineProcess.start(*options))
        path = tmp_path_factory.mktemp("fleet") / "proxy.yaml"
        instances = [
            {"url": f"http://127.0.0.1:{engine.port}", "events_url": f"tcp://127.0.0.1:{port}"}
            for engine, port in zip(engines, events, strict=True)
        ]
        path.write_text(yaml.safe_dump({"instances": instances, "grace_s": 1.0}))
        yield path
    finally:
        for engine in engines:
            engine.stop()


def trace(path: Path) -> Path:
    """Four sessions of three turns that grow."""
    rows = [
        {
            "chat_id": 10 * session + turn,
            "parent_chat_id": 10 * session + turn - 1 if turn else -1,
            "timestamp": 2.0 * session + 5.0 * turn,
            "input_length": 640 * (turn + 1),
            "output_length": 4,
            "type": "coder",
            "turn": turn + 1,
            "hash_ids": [1000 * session + block for block in range(10 * (turn + 1))],
            "session_id": f"s{session}",
            "think_time": 1.0 if turn else 0.0,
            "api_time": 1.0,
        }
        for session in range(4)
        for turn in range(3)
    ]
    rows.sort(key=lambda row: (float(str(row["timestamp"])), str(row["session_id"])))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_a_comparison_runs_continues_and_prints_its_table(config: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = ["run", trace(tmp_path / "t.jsonl"), "--config", config, "-o", output, "--engine-speed", "50"]
    command += ["--arm", "session_sticky", "--arm", "round_robin", "--repeats", "1"]

    planned = invoke(*command, "--plan", "--budget-s", "5")
    assert planned.exit_code == 0, planned.output
    assert "tokens-x1-session_sticky-r0: 1" in planned.output
    assert "past the budget" in planned.output
    assert not output.exists()

    spent = invoke(*command, "--budget-s", "1")
    assert spent.exit_code == 1, spent.output
    assert "not started" in spent.output

    done = invoke(*command)
    assert done.exit_code == 0, done.output
    records = read_records(output)
    assert set(records) == {"tokens-x1-session_sticky-r0", "tokens-x1-round_robin-r0"}
    for record in records.values():
        assert all(each.error is None for each in record.requests), done.output
        assert len(record.requests) == record.planned == 12
        assert all(each.warm_hit_tokens > 0 == each.empty_hit_tokens for each in record.proofs)
    sticky, turns = (totals_of(records[f"tokens-x1-{name}-r0"].counters) for name in ("session_sticky", "round_robin"))
    # The engines counted the trace's prompts, and nothing of the run before.
    assert sticky.prompt == turns.prompt == 4 * 640 * (1 + 2 + 3)
    assert sticky.hit_rate == pytest.approx(3 / 6)
    assert turns.hit_rate <= sticky.hit_rate

    again = invoke(*command)
    assert again.exit_code == 0, again.output
    assert "r0" not in again.output  # nothing is run twice
    other = invoke(*command, "--seed", "7")
    assert other.exit_code == 2
    assert "seed" in other.output

    table = invoke("table", output, "--base", "session_sticky")
    assert table.exit_code == 0, table.output
    assert "| `round_robin` | 1 | 12/12 |" in table.output


def test_an_arm_runs_on_the_engines_it_names(config: Path, tmp_path: Path) -> None:
    files = []
    for name, instance in zip("ab", yaml.safe_load(config.read_text())["instances"], strict=True):
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump({"instances": [instance], "grace_s": 1.0}))
    output = tmp_path / "out"
    command = ["run", trace(tmp_path / "t.jsonl"), "--config", files[0], "-o", output, "--engine-speed", "50"]
    command += ["--arm", "round_robin", "--arm", "round_robin@b", "--repeats", "1"]

    nowhere = invoke(*command)
    assert nowhere.exit_code == 2
    assert "--engines b=FILE" in nowhere.output
    uneven = invoke(*command, "--engines", f"b={config}")
    assert uneven.exit_code == 2
    assert "2 instances, but 1 in --config" in uneven.output

    done = invoke(*command, "--engines", f"b={files[1]}")
    assert done.exit_code == 0, done.output
    records = read_records(output)
    assert set(records) == {"tokens-x1-round_robin-r0", "tokens-x1-round_robin-b-r0"}
    urls = [yaml.safe_load(path.read_text())["instances"][0]["url"] for path in files]
    for record, url in zip((records[name] for name in sorted(records, key=len)), urls, strict=True):
        assert [proof.engine for proof in record.proofs] == [url]
        assert totals_of(record.counters).prompt == 4 * 640 * (1 + 2 + 3)
    table = invoke("table", output, "--base", "round_robin")
    assert "`round_robin@b`: " in table.output
    assert "policy round_robin, on the engines b." in table.output


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--arm", "sglang:cache_aware"], "text prompts only"),
        (["--arm", "no_such"], "no_such"),
        (["--length-scale", "1"], "error: "),
    ],
)
def test_bad_input_is_refused_before_anything_starts(options: list[str], reason: str, tmp_path: Path) -> None:
    settings = tmp_path / "proxy.yaml"
    settings.write_text("instances: []\n" if options[0] == "--length-scale" else "instances: ['http://127.0.0.1:1']\n")
    result = invoke("run", trace(tmp_path / "t.jsonl"), "--config", settings, "-o", tmp_path, *options)
    assert result.exit_code == 2
    assert reason in result.output


def test_prompts_that_do_not_fit_the_engines_are_refused_with_the_scale_that_would(
    config: Path, tmp_path: Path
) -> None:
    path = trace(tmp_path / "t.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0] |= {"input_length": 64_000_000, "hash_ids": list(range(1_000_000))}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:1]))
    result = invoke("run", path, "--config", config, "-o", tmp_path / "out", "--arm", "warm")
    assert result.exit_code == 2
    assert "--length-scale 0.0" in result.output
