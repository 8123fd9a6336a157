"""Two models behind one proxy: usage of the script, its runs on engines that run, and the table of kept runs."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from bench.gpu.model_engines import NOTE_FILE, ModelEngine, app
from bench.routers.records import EngineCounters
from replayer.records.runs import RequestRecord, RunHeader, encode_line, read_run
from tests.bench.routers.test_small_engines import ended_with_the_test
from tests.bench.routers.test_small_engines import run as start_engines
from tests.integration.fleet import ROOT, free_ports

SCRIPT = ROOT / "bench" / "gpu" / "two_models.sh"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script's end. It inherits none of its own variables."""
    own = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    return subprocess.run(
        [str(SCRIPT), *arguments], env=own | environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_usage_names_every_variable_that_the_script_reads() -> None:
    ended = run()
    assert ended.returncode == 2
    assert "bench/gpu/two_models.sh OUTPUT first.jsonl second.jsonl" in ended.stdout
    read = set(re.findall(r"\$\{([A-Z_]+):[-+?]", SCRIPT.read_text(encoding="utf-8"))) - {"PYTHONPATH"}
    assert {"ENGINES", "PROXY_TREE", "BUDGET_S"} <= read
    assert not [name for name in sorted(read) if name not in ended.stdout]


def test_a_folder_without_engines_is_refused(tmp_path: Path) -> None:
    ended = run(str(tmp_path / "out"), "first.jsonl", "second.jsonl", ENGINES=str(tmp_path))
    assert ended.returncode == 2
    assert "give the folder of small_engines.sh" in ended.stdout


def test_no_run_begins_that_could_end_after_the_budget(tmp_path: Path) -> None:
    ended = run(str(tmp_path / "out"), "first.jsonl", "second.jsonl", BUDGET_S="10", RUN_S="60")
    assert ended.returncode == 1
    assert "no time for never_hold, repeat 0" in ended.stdout
    assert not list((tmp_path / "out").iterdir())


def test_the_table_has_a_row_for_each_model_and_arm(tmp_path: Path) -> None:
    for arm, repeat, seconds, held in (
        ("never_hold", 0, 4.0, 0),
        ("never_hold", 1, 6.0, 0),
        ("working_set", 0, 1.0, 2),
    ):
        folder = tmp_path / f"{arm}-{repeat}"
        folder.mkdir()
        counters = EngineCounters(prompt_tokens=100.0, cached_tokens=25.0, lookup_tokens=900.0, hit_tokens=800.0)
        rows = [ModelEngine(name=name, url="", model=name, during=counters, held=held) for name in ("first", "second")]
        # This version of the engine counts no cached tokens.
        rows[1].during = EngineCounters(prompt_tokens=100.0, lookup_tokens=100.0, hit_tokens=50.0)
        (folder / NOTE_FILE).write_bytes(msgspec.json.encode(rows))
        record = RequestRecord(
            request_id="r",
            session_id="s",
            turn=1,
            chat_id=1,
            trace_timestamp_s=0.0,
            scheduled_s=0.0,
            ttft_s=seconds / 2,
            e2e_s=seconds,
            finished_s=seconds,
            prompt_tokens=100,
            cached_tokens=10,
            ok=True,
        )
        lines = encode_line(RunHeader()) + encode_line(record)
        (folder / "first.jsonl.gz").write_bytes(gzip.compress(lines))
        (folder / "second.jsonl").write_bytes(lines)
    result = CliRunner().invoke(app, ["table", str(tmp_path), "never_hold", "working_set"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[2:] == [
        "| first | `never_hold` | 2 | 2/2 | 4.00, 6.00 | 2.0, 3.0 | 3.0 | 4, 6 | 0.10, 0.10 | 0.25, 0.25 | 0, 0 |",
        "| first | `working_set` | 1 | 1/1 | 1.00 | 0.5 | 0.5 | 1 | 0.10 | 0.25 | 2 |",
        "| second | `never_hold` | 2 | 2/2 | 4.00, 6.00 | 2.0, 3.0 | 3.0 | 4, 6 | 0.10, 0.10 | 0.50, 0.50 | 0, 0 |",
        "| second | `working_set` | 1 | 1/1 | 1.00 | 0.5 | 0.5 | 1 | 0.10 | 0.50 | 2 |",
    ]
    result = CliRunner().invoke(app, ["table", str(tmp_path), "session_cap"])
    assert result.exit_code == 2
    assert "no finished run of session_cap" in result.output


def test_the_page_shows_the_kept_runs() -> None:
    kept = ROOT / "docs" / "results" / "two-models-h200-mps"
    result = CliRunner().invoke(app, ["table", str(kept), "never_hold", "before", "working_set"])
    assert result.exit_code == 0, result.output
    page = (ROOT / "docs" / "admission.md").read_text(encoding="utf-8")
    for line in result.output.splitlines()[2:]:
        _, model, arm, _, ok, e2e, ttft, longest, _, _, hits, held, _ = line.split("|")
        assert ok.strip() in {"336/336", "180/180"}
        shown = " `working_set`, before " if arm == " `before` " else arm
        assert f"|{'|'.join((model, shown, e2e, ttft, longest, hits, held))}|" in page


@pytest.mark.fleet
def test_runs_on_engines_that_run_begin_with_empty_caches(tmp_path: Path) -> None:
    for name in ("first", "second"):
        rows = [
            {"timestamp": 100 * turn, "input_length": 1_024, "output_length": 4, "hash_ids": [1, 2]}
            for turn in range(2)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fleet, port = tmp_path / "fleet", free_ports(3)
    with ended_with_the_test(fleet):
        started = start_engines(
            fleet,
            SIMULATED="1",
            PER_GPU="2",
            NAMES="first,second",
            ENGINE_SPEED="20",
            FIRST_PORT=str(port),
            PROXY_PORT=str(port + 2),
        )
        assert started.returncode == 0, started.stdout + started.stderr
        traces = [str(tmp_path / f"{name}.jsonl") for name in ("first", "second")]
        given = {"ENGINES": str(fleet), "ENGINE_SPEED": "20", "REPEATS": "1", "LONGEST": "2000"}
        ended = run(str(tmp_path / "out"), *traces, **given)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| second | `working_set` | 1 | 2/2 |" in ended.stdout
    for arm in ("never_hold", "working_set"):
        folder = tmp_path / "out" / f"{arm}-0"
        engines = msgspec.json.decode((folder / NOTE_FILE).read_bytes(), type=list[ModelEngine])
        assert [engine.model for engine in engines] == ["first", "second"]
        for engine in engines:
            assert engine.proof is not None
            assert (engine.proof.warm_hit_tokens > 0, engine.proof.empty_hit_tokens) == (True, 0)
            records = read_run(folder / f"{engine.model}.jsonl").records
            # The same prompt in both runs: nothing of the first is left for the second.
            assert [bool(record.cached_tokens) for record in records] == [False, True]
            assert engine.during.lookup_tokens == 2 * 1_024
    again = run(str(tmp_path / "out"), *traces, **given)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "done" not in again.stdout
