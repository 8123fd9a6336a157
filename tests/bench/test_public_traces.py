"""Public traces of other formats: what two requests share is shared after the conversion, and nothing else."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from typer.testing import CliRunner

from bench.public_traces.__main__ import app
from replayer.traces.loading import load_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,40,10
2023-11-16 18:15:47.0,0,5
2023-11-16 18:15:50.9951690,16,8
"""


def converted(format_name: str, source: Path, tmp_path: Path) -> list[dict[str, object]]:
    output = tmp_path / "trace.jsonl"
    answer = CliRunner().invoke(app, [format_name, str(source), str(output)])
    assert answer.exit_code == 0, answer.output
    assert load_trace(output).requests
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_requests_of_azure_share_nothing(tmp_path: Path) -> None:
    source = tmp_path / "azure.csv"
    source.write_text(AZURE)
    first, second = converted("azure", source, tmp_path)
    assert (first["input_length"], first["output_length"], first["hash_ids"]) == (40, 10, [0, 1, 2])
    assert (second["timestamp"], second["hash_ids"], second["session_id"]) == (4.314579, [3], "s1")


def test_prompts_of_ragpulse_share_the_blocks_up_to_the_first_other_token(tmp_path: Path) -> None:
    lengths = {
        "1_sys_prompt": "sys",
        "2_passages": "passage",
        "3_history": "h",
        "4_user_input": "u",
        "5_web_search": "w",
    }
    for name, kind in lengths.items():
        rows = [{f"{kind}_id": f"{kind}{number}", "token_length": 24} for number in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = {
        "3.0": {"sys_prompt": ["sys0"], "user_input": ["u1"]},
        "1.0": {"sys_prompt": ["sys0"], "user_input": ["u0"]},
        "4.0": {"user_input": ["unknown"]},
    }
    rows = [
        {"timestamp": at, "session_id": 7, "output_length": 5, "hash_ids": prompt} for at, prompt in prompts.items()
    ]
    (tmp_path / "0_trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = converted("ragpulse", tmp_path, tmp_path)
    assert [first["timestamp"], second["timestamp"]] == [1.0, 3.0]
    assert (first["input_length"], first["turn"], second["turn"]) == (48, 1, 2)
    # 24 tokens are shared: one whole block, and the second one holds the first token that differs.
    assert first["hash_ids"] == [0, 1, 2]
    assert second["hash_ids"] == [0, 3, 4]


def claude_session(folder: Path, number: int, tokens: int) -> None:
    calls = [{"t": 0.0, "type": "s", "in": tokens, "out": 10, "hash_ids": list(range(1, tokens // 64 + 1))}]
    entries = [*calls, {"t": 1.0, "type": "subagent", "requests": calls}]
    body = {"id": f"trace_{number}", "block_size": 64, "hash_id_scope": "local", "requests": entries}
    (folder / f"trace_{number}.json").write_text(json.dumps(body))


def drawn(folder: Path, output: Path, *options: str) -> list[str]:
    answer = CliRunner().invoke(app, ["claude-code", str(folder), str(output), *options])
    assert answer.exit_code == 0, answer.output
    assert load_trace(output).requests
    with tarfile.open(output) as archive:
        return archive.getnames()


def test_drawn_sessions_do_not_depend_on_those_that_are_missing(tmp_path: Path) -> None:
    folder, archive = tmp_path / "traces", tmp_path / "drawn.tar"
    folder.mkdir()
    for number in range(12):
        claude_session(folder, number, 640)
    claude_session(folder, 99, 200_000)
    first = drawn(folder, archive, "--sessions", "4")
    second = drawn(folder, archive, "--sessions", "4", "--skip", "4")
    assert len({*first, *second}) == 8
    assert "trace_99.json" not in drawn(folder, archive, "--sessions", "12")
    (folder / second[-1]).unlink()
    assert drawn(folder, archive, "--sessions", "4") == first
    assert drawn(folder, archive, "--sessions", "4", "--without", first[0]) == [*first[1:], second[0]]
    assert drawn(folder, archive, "--sessions", "4", "--seed", "2") != first


def unboxed(output: str) -> str:
    """An error's text without the box around it, whose lines break by the length of the path."""
    return " ".join(output.replace("│", " ").split())


def test_too_few_sessions_are_refused(tmp_path: Path) -> None:
    claude_session(tmp_path, 1, 640)
    answer = CliRunner().invoke(app, ["claude-code", str(tmp_path), str(tmp_path / "drawn.tar"), "--sessions", "2"])
    assert answer.exit_code == 2
    assert "1 sessions that qualify" in unboxed(answer.output)


def test_merged_agents_are_sessions_in_order_of_time(tmp_path: Path) -> None:
    folder = tmp_path / "agents"
    folder.mkdir()
    for name, times in (("b.openai_chat", (30, 10)), ("a.openai_chat", (20,))):
        rows = [{"timestamp": at * 1_000_000, "input": f"user: {name} {at}", "output": "x"} for at in times]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    merged = converted("agents", folder, tmp_path)
    assert [row["session_id"] for row in merged] == ["b", "a", "b"]


def test_a_folder_without_agents_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    output = tmp_path / "trace.jsonl"
    answer = CliRunner().invoke(app, ["agents", str(tmp_path), str(output)])
    assert answer.exit_code == 2
    assert "has no line in a file" in unboxed(answer.output)
    assert not output.exists()
