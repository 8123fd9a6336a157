"""The command group: help, output formats, figures, bad input, and the document it writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.analysis import cli
from bench.analysis.caching.study import CachePolicy
from bench.analysis.commands.cache import POLICIES
from bench.analysis.document import DOCUMENT, Block, blocks, chosen, render, rewritten, traces_folder
from bench.analysis.output import Sheet, markdown
from replayer.traces.formats import bailian
from replayer.traces.synth import SynthOptions, synthetic_trace

COMMANDS = ("cache", "workload", "roofline", "kv-wall", "pd-cost")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("analysis") / "small.jsonl.gz"
    bailian.write(path, synthetic_trace(SynthOptions(requests=60, seed=3, length_scale=0.1)).requests)
    return path


def arguments(command: str, trace: Path) -> list[str]:
    return [command, *([str(trace)] if command in ("cache", "workload", "kv-wall") else [])]


def test_the_group_registers_under_its_name() -> None:
    app = typer.Typer()
    app.command("other")(lambda: None)
    cli.register(app)
    result = CliRunner().invoke(app, ["analyse", "--help"])
    assert result.exit_code == 0
    assert all(command in result.output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command: str) -> None:
    group = typer.main.get_command(cli.application())
    assert isinstance(group, typer.core.TyperGroup)
    for parameter in group.commands[command].params:
        assert getattr(parameter, "help", None), f"{command} {parameter.name}"
    assert len(group.commands[command].help or "") > 100


@pytest.mark.parametrize("command", COMMANDS)
def test_every_word_of_a_table_is_whole_on_a_narrow_terminal(command: str, trace: Path) -> None:
    runner, given = CliRunner(env={"COLUMNS": "80"}), arguments(command, trace)
    table = runner.invoke(cli.application(), given).output
    assert "…" not in table
    page = runner.invoke(cli.application(), [*given, "--markdown"]).output
    cells = [line.strip("| ") for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    words = {word for line in cells for word in line.split() if len(word) <= 20}
    assert words - set(table.split()) - {"|"} == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_tables_json_markdown_and_figures(command: str, trace: Path, tmp_path: Path) -> None:
    runner, given = CliRunner(), arguments(command, trace)
    if command == "kv-wall":
        given += ["--splits", "0+8,4+4"]  # the document's table of a public trace has all of the default
    table = runner.invoke(cli.application(), [*given, "--figures", str(tmp_path / "new" / "folder")])
    assert table.exit_code == 0, table.output
    figures = sorted((tmp_path / "new" / "folder").glob("*.svg"))
    assert figures
    assert all("<svg" in figure.read_text() and "nan" not in figure.read_text() for figure in figures)
    as_json = runner.invoke(cli.application(), [*given, "--json"])
    assert as_json.exit_code == 0, as_json.output
    assert isinstance(json.loads(as_json.stdout), dict)
    as_markdown = runner.invoke(cli.application(), [*given, "--markdown"])
    assert as_markdown.exit_code == 0, as_markdown.output
    lines = as_markdown.stdout.splitlines()
    widths = [line.count("|") for line in lines if line.startswith("|")]
    assert len(widths) > 4
    # The output is the same again: no random numbers are used.
    assert runner.invoke(cli.application(), [*given, "--markdown"]).stdout == as_markdown.stdout
    both = runner.invoke(cli.application(), [*given, "--json", "--markdown"])
    assert both.exit_code == 2


@pytest.mark.parametrize("options", [["cache"], ["workload"], ["workload", "--stream"], ["kv-wall"]])
def test_a_trace_is_read_with_the_options_that_its_errors_name(options: list[str], tmp_path: Path) -> None:
    def run(*more: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.application(), [options[0], str(path), *options[1:], *more])
        return done.exit_code, " ".join(done.output.split())

    path = tmp_path / "deltas_in_ms.jsonl"
    row = {"type": "text", "input_length": 640, "output_length": 9}
    rows = [
        row
        | {"chat_id": i, "parent_chat_id": i - 1 if i % 2 else -1, "turn": 1 + i % 2, "timestamp": 60_000 * i}
        | {"hash_ids": list(range(20 * i, 20 * i + 10))}
        for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert (run()[0], "--time-unit" in run()[1]) == (2, True)
    code, output = run("--time-unit", "ms")
    assert (code, "--allow-deltas" in output) == (2, True)
    code, output = run("--time-unit", "ms", "--allow-deltas")
    assert code == 0, output
    if options[0] == "workload":
        assert "40 requests, 20 sessions, 2,340 s" in output


def test_sessions_are_no_option_of_a_streamed_trace(trace: Path) -> None:
    streamed = ["workload", str(trace), "--stream", "--sessions", "single"]
    assert CliRunner().invoke(cli.application(), streamed).exit_code == 2


@pytest.mark.parametrize("command", ["cache", "workload", "kv-wall"])
def test_a_bad_trace_says_what_to_do(command: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0}\n')
    for given in (path, tmp_path / "missing.jsonl"):
        result = CliRunner().invoke(cli.application(), [command, str(given)])
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pools", "big"], "'big' is neither tokens"),
        (["--pools", "0x"], "above 0"),
        (["--pools", "1"], "does not hold one block"),
        (["--policies", "fifo"], "--policies: unknown fifo; known: infinite, lru"),
        (["--placements", ""], "--placements: unknown nothing"),
    ],
)
def test_bad_options_of_cache(options: list[str], said: str, trace: Path) -> None:
    result = CliRunner().invoke(cli.application(), ["cache", str(trace), *options])
    assert result.exit_code == 2
    assert said in result.output.replace("\n", " ")


def test_the_command_offers_every_cache_policy() -> None:
    assert tuple(policy.value for policy in CachePolicy) == POLICIES


def test_a_figure_s_bytes_depend_on_its_input_only(tmp_path: Path) -> None:
    drawn = []
    for name in ("one", "two"):
        CliRunner().invoke(cli.application(), ["pd-cost", "--figures", str(tmp_path / name)])
        (path,) = (tmp_path / name).glob("*.svg")
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1]


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.analysis", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert all(command in done.stdout for command in COMMANDS)


def test_markdown_keeps_a_cell_in_its_column() -> None:
    assert markdown(Sheet("T", ("a|b", "c"), [("x|y", "1")], notes=["n"])).splitlines() == [
        "**T**",
        "",
        "| a\\|b | c |",
        "| --- | ---: |",
        "| x\\|y | 1 |",
        "",
        "n",
    ]


def test_parts_of_a_document_are_replaced_and_nothing_else() -> None:
    text = (
        "before\n<!-- TABLES 2 analyse pd-cost --x 1 -->\nold\n<!-- end -->\nafter\n<!-- analyse b -->\n<!-- end -->\n"
    )
    assert [(part.arguments, part.tables, part.text) for part in blocks(text)] == [
        ("pd-cost --x 1", (2,), "old\n"),
        ("b", (), ""),
    ]
    after = rewritten(text, lambda part: f"new {part.arguments}\n")
    assert after == text.replace("old\n", "new pd-cost --x 1\n").replace("analyse b -->\n", "analyse b -->\nnew b\n")
    assert chosen("**a**\n\n1\n\n**b**\n\n2\n", (2,)) == "**b**\n\n2\n"
    assert chosen("**a**\n\n1\n\n**b**\n\n2\n", ()) == "**a**\n\n1\n\n**b**\n\n2\n"


DOCUMENTED = blocks(DOCUMENT.read_text(encoding="utf-8"))


def commands_of(text: str) -> set[str]:
    return set(re.findall(r"analyse ([a-z-]+)", text))


def test_the_document_shows_every_command() -> None:
    assert {part.arguments.split()[0] for part in DOCUMENTED} == set(COMMANDS)
    assert commands_of(DOCUMENT.read_text(encoding="utf-8")) >= set(COMMANDS)


def rendered(part: Block) -> str:
    """The output of `render`, computed in this process."""
    given = part.arguments.replace("$TRACES", str(traces_folder())).split()
    result = CliRunner().invoke(cli.application(), [*given, "--markdown"])
    assert result.exit_code == 0, result.output
    return chosen(result.stdout, part.tables)


@pytest.mark.parametrize(
    "part", [part for part in DOCUMENTED if not part.needs_traces], ids=lambda part: part.arguments
)
def test_the_document_s_tables_are_what_the_commands_print(part: Block) -> None:
    assert rendered(part) == part.text


def test_the_document_is_written_by_the_real_command() -> None:
    part = next(part for part in DOCUMENTED if part.arguments.startswith("pd-cost"))
    assert render(part) == part.text


@pytest.mark.traces
@pytest.mark.parametrize(
    "part",
    [part for part in DOCUMENTED if part.arguments.startswith("workload") or "--handoff arrival" in part.arguments],
    ids=lambda part: part.arguments,
)
def test_the_document_s_tables_of_public_traces(part: Block) -> None:
    if not traces_folder().is_dir():
        pytest.skip(f"public traces not found at {traces_folder()}; set WARMROUTE_TRACES")
    assert rendered(part) == part.text
