"""The commands, against simulated engines over HTTP. Times are not checked here: the virtual tests do that."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from bench.instruments.cli import register
from bench.instruments.record import InstrumentRecord, read_record, write_record
from proxy.settings import load_settings
from sim.hardware import load_profile
from tests.sim.server.test_http import EngineProcess

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[EngineProcess, EngineProcess]]:
    engines: list[EngineProcess] = []
    try:
        for _ in range(2):
            engines.append(
                EngineProcess.start(
                    *("--profile", "h200", "--transport", "nvlink", "--flush-ms", "0.1", "--engine-speed", "5")
                )
            )
        yield engines[0], engines[1]
    finally:
        for engine in engines:
            engine.stop()


def run(*arguments: object) -> Result:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, [str(each) for each in arguments])


def url(engine: EngineProcess) -> str:
    return f"http://127.0.0.1:{engine.port}"


def running(engine: EngineProcess) -> list[str]:
    lines = engine.client.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith("vllm:num_requests_running{")]


def test_interference_writes_a_record_and_leaves_the_engine_idle(
    pair: tuple[EngineProcess, EngineProcess], tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    result = run(
        *("measure", "interference", "--url", url(pair[0]), "--streams", "1,3", "--prefill-tokens", "2048,8192"),
        *(
            "--repeats",
            1,
            "--before-tokens",
            4,
            "-o",
            record,
            "--figures",
            tmp_path,
            "--hardware",
            "simulated",
            "--json",
        ),
    )
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    written = read_record(record)
    assert shown["rows"] == written.rows
    assert [(row["streams"], row["prefill_tokens"]) for row in written.rows] == [
        (1, 2048),
        (1, 8192),
        (3, 2048),
        (3, 8192),
    ]
    assert all(row["before"]["tokens"] >= 4 * row["streams"] for row in written.rows)
    assert (written.instrument, written.hardware) == ("interference", "simulated")
    assert (written.engines[0].model, written.engines[0].pool_tokens) == ("warm-sim", 738_432)
    assert (tmp_path / "interference.svg").read_text().startswith("<?xml")
    assert running(pair[0])[0].endswith(" 0.0")


def test_a_prefill_longer_than_the_engine_takes_is_refused_before_anything_is_sent(
    pair: tuple[EngineProcess, EngineProcess],
) -> None:
    result = run("measure", "interference", "--url", url(pair[0]), "--prefill-tokens", "2048,99999999")
    assert result.exit_code == 2
    assert "--prefill-tokens 99999999: the engine takes" in result.output
    assert "2048" not in result.output.replace("--prefill-tokens 99999999", "")


def test_a_record_without_rows_is_not_shown_as_nothing(tmp_path: Path) -> None:
    write_record(tmp_path / "empty.json", InstrumentRecord(instrument="interference", rows=[]))
    result = run("measure", "show", tmp_path / "empty.json")
    assert result.exit_code == 2
    assert "no rows to show" in " ".join(result.output.split())


def test_transfer_is_verified_and_counted(pair: tuple[EngineProcess, EngineProcess], tmp_path: Path) -> None:
    source, target = pair
    result = run(
        *("measure", "transfer", "--url", url(source), "--url", url(target), "--kv-bytes-per-token", 98_304),
        *("--from-bootstrap", f"http://127.0.0.1:{source.bootstrap_port}", "--tokens", "1024,4096", "--repeats", 1),
        *("--background", "0,2", "--concurrent", "1,2", "--figures", tmp_path, "--json"),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == 2 * (1 + 2) * 2
    assert all(row["pulled"] and row["same_text"] for row in rows)
    assert {row["size_bytes"] for row in rows} == {1_024 * 98_304, 4_096 * 98_304}
    assert json.loads(result.stdout)["warnings"] == []
    figures = {"transfer_time.svg", "transfer_bandwidth.svg"}
    assert {path.name for path in tmp_path.iterdir()} == figures
    (tmp_path / "record.json").write_text(result.stdout)
    again = run("measure", "show", tmp_path / "record.json", "--figures", tmp_path / "again", "--json")
    assert json.loads(again.stdout)["rows"] == rows
    assert {path.name for path in (tmp_path / "again").iterdir()} == figures


def test_records_of_hooks_must_be_there_and_hold_the_hand_offs(
    pair: tuple[EngineProcess, EngineProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.instruments.hooked.hook_file._WAIT_S", 0.0)
    source, target = pair
    records = tmp_path / "records.jsonl"
    command = (
        *("measure", "transfer", "--url", url(source), "--url", url(target), "--kv-bytes-per-token", 98_304),
        *("--from-bootstrap", f"http://127.0.0.1:{source.bootstrap_port}", "--tokens", 1_024, "--repeats", 1),
        *("--hook-records", records, "--json"),
    )
    missing = run(*command)
    assert missing.exit_code == 2
    assert "measure hooks apply" in missing.output
    records.touch()
    overwriting = run(*command, "--output", records)
    assert overwriting.exit_code == 2
    assert "is an input and would be overwritten" in overwriting.output
    result = run(*command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["stages"] for row in found["rows"]] == [None]
    assert found["warnings"] == [f"1 of 1 hand-offs lack records in {records}: do both engines have hooks?"]


def test_calibrate_writes_a_profile_that_serving_and_the_simulator_read(
    pair: tuple[EngineProcess, EngineProcess], tmp_path: Path
) -> None:
    arguments = (
        *("calibrate", "--url", url(pair[0]), "--kv-bytes-per-token", 98_304, "--max-num-seqs", 64, "--name", "trial"),
        *("--output", tmp_path / "hardware", "--repeats", 1, "--largest-tokens", 8_192),
    )
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "serve --hardware" in result.output
    folder = tmp_path / "hardware"
    assert sorted(path.name for path in folder.iterdir()) == ["trial.yaml", "trial_points.yaml", "trial_record.json"]
    profile = load_profile(str(folder / "trial.yaml"))
    assert profile.transports == {}
    assert profile.cost_constants is not None
    settings = load_settings(hardware=str(folder / "trial.yaml"), instances=[{"url": "http://127.0.0.1:1"}])
    assert settings.hardware == str(folder / "trial.yaml")
    again = run(*arguments)
    assert again.exit_code == 2
    assert "already there" in again.output
    refit = run("calibrate", "--record", folder / "trial_record.json", "--name", "copy", "--output", folder)
    assert refit.exit_code == 0, refit.output
    copy = load_profile(str(folder / "copy.yaml"))
    assert (copy.name, copy.step, copy.cost_constants) == ("copy", profile.step, profile.cost_constants)
    record = ("--record", folder / "trial_record.json")
    twice = run("calibrate", *record, *record, "--name", "other", "--output", folder)
    assert twice.exit_code == 2
    assert "further records are those of `measure interference` and `measure transfer`" in " ".join(
        twice.output.split()
    )


def test_a_fit_that_cannot_run_loses_no_measurement(
    pair: tuple[EngineProcess, EngineProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bench.instruments.calibration", None)
    result = run(
        *("calibrate", "--url", url(pair[0]), "--kv-bytes-per-token", 98_304, "--max-num-seqs", 64, "--name", "trial"),
        *("--output", tmp_path, "--repeats", 1, "--largest-tokens", 8_192),
    )
    assert result.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["trial_record.json"]
    assert "calibrate --record" in " ".join(result.output.split())


def test_a_busy_fleet_is_refused(pair: tuple[EngineProcess, EngineProcess], tmp_path: Path) -> None:
    body = {"model": "warm-sim", "prompt": [1, 2, 3], "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    with pair[0].client.stream("POST", "/v1/completions", json=body) as answer:
        pieces = answer.iter_bytes()  # held: a collected iterator closes the answer
        next(pieces)
        result = run("calibrate", "--url", url(pair[0]), "--kv-bytes-per-token", 1, "--output", tmp_path)
    assert result.exit_code == 2
    assert "the fleet is busy" in result.output
    assert "1 running" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("measure", "interference"), "give a fleet file"),
        (("measure", "interference", "no-such-fleet"), "no fleet file"),
        (("measure", "interference", "sim-4x", "--engine", "inst-9"), "no engine 'inst-9'"),
        (("measure", "interference", "--url", "http://127.0.0.1:9", "--model", "m"), "is the fleet up?"),
        (("measure", "transfer", "--url", "http://127.0.0.1:9", "--kv-bytes-per-token", "1"), "needs two engines"),
        (("measure", "transfer", "--url", "http://127.0.0.1:9"), "give --kv-bytes-per-token"),
        (("measure", "interference", "--url", "http://127.0.0.1:1"), "start it, correct --url, or give --model"),
        (("measure", "interference", "sim-4x", "--url", "http://127.0.0.1:1"), "sim-4x and --url are both given"),
        (("calibrate", "--record", "no-such-file"), "No such file"),
        (("calibrate", "--record", "pyproject.toml"), "not a record of an instrument"),
        (("measure", "show", "pyproject.toml"), "not a record of an instrument"),
        (("calibrate", "sim-4x", "--name", "mine_points"), "not ending in _points"),
        (("calibrate", "sim-4x", "--api-key-env", "NO_SUCH_VARIABLE"), "is not set"),
        (("measure", "interference", "sim-4x", "--set", "sim.time_scale=5"), "instruments measure wall time"),
    ],
)
def test_mistakes_end_with_a_remedy(arguments: tuple[str, ...], expected: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())


def test_a_key_that_cannot_be_sent_is_blamed_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAD_KEY", "secret\nx")
    result = run("measure", "interference", "--url", "http://127.0.0.1:1", "--api-key-env", "BAD_KEY")
    assert result.exit_code == 2
    assert "--api-key-env: BAD_KEY has" in result.output
    assert "secret" not in result.output


def test_a_fleet_file_gives_names_sizes_and_addresses(tmp_path: Path) -> None:
    from bench.instruments.targets import targets_of

    found = targets_of(Path("elastic-2x-kv-both"), (), ())
    assert [each.name for each in found.engines] == ["inst-0", "inst-1"]
    assert found.engines[1].bootstrap_url == "http://127.0.0.1:8999"
    assert (found.kv_bytes_per_token, found.transport, found.max_num_seqs) == (98_304, "nvlink", 64)
    assert found.expert_miss == 0.9375
    sim: dict[str, Any] = {"kind": "sim", "count": 1, "sim": {"profile": "h200"}}
    path = tmp_path / "one.yaml"
    path.write_text(yaml.safe_dump(sim))
    assert targets_of(path, (), ()).max_num_batched_tokens == 8_192
