"""Converts public traces of other formats into the trace format, for ``docs/tournament.md``.

``python -m bench.public_traces azure AzureLLMInferenceTrace_code.csv azure_code.jsonl`` and ``... ragpulse
FOLDER ragpulse.jsonl``. Blocks have 16 tokens. ``claude-code`` and ``agents`` put sessions that are published one a
file together.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.public_traces import agents as published
from replayer.traces.formats import bailian
from replayer.traces.trace import TraceRequest

BLOCK_TOKENS = 16
_COMPONENTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
"""Of a RAGPulse prompt, in its order."""
_LENGTHS = ("1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search")

app = typer.Typer(add_completion=False, help=__doc__)


def azure_requests(rows: Iterable[dict[str, str]]) -> Iterator[TraceRequest]:
    """Requests of an Azure LLM inference trace of 2023: lengths only, so each has blocks and a session of its own.

    Raises:
        KeyError: a column is missing.
        ValueError: a field is no time, or no number.
    """
    began_s, first_block = None, 0
    kept = (row for row in rows if int(row["ContextTokens"]) > 0)
    for number, row in enumerate(kept):
        seconds, _, fraction = row["TIMESTAMP"].partition(".")
        at_s = datetime.fromisoformat(seconds).timestamp() + float(f"0.{fraction or 0}")
        began_s = at_s if began_s is None else began_s
        tokens = int(row["ContextTokens"])
        blocks = range(first_block, first_block + -(-tokens // BLOCK_TOKENS))
        first_block = blocks.stop
        yield TraceRequest(
            chat_id=number,
            session_id=f"s{number}",
            timestamp_s=round(at_s - began_s, 6),
            input_length=tokens,
            output_length=int(row["GeneratedTokens"]),
            hash_ids=list(blocks),
        )


def ragpulse_requests(rows: Iterable[dict[str, Any]], lengths: dict[str, int]) -> Iterator[TraceRequest]:
    """Requests of RAGPulse: a prompt is its components with their published lengths, cut into chained blocks.

    Args:
        rows: those of ``0_trace.jsonl``.
        lengths: tokens of each component; others are left out, as are prompts of none that is known.
    """
    blocks: dict[tuple[int, tuple[tuple[str, int], ...]], int] = {}
    turns: Counter[str] = Counter()
    number = 0
    for row in sorted(rows, key=lambda each: float(each["timestamp"])):
        components = [name for part in _COMPONENTS for name in row["hash_ids"].get(part, [])]
        tokens = [(name, at) for name in components for at in range(lengths.get(name, 0))]
        if not tokens:
            continue
        chain, parent = [], -1
        for first in range(0, len(tokens), BLOCK_TOKENS):
            key = (parent, tuple(tokens[first : first + BLOCK_TOKENS]))
            parent = blocks.setdefault(key, len(blocks))
            chain.append(parent)
        session = str(row["session_id"])
        turns[session] += 1
        yield TraceRequest(
            chat_id=number,
            session_id=session,
            turn=turns[session],
            timestamp_s=float(row["timestamp"]),
            input_length=len(tokens),
            output_length=int(row["output_length"]),
            hash_ids=chain,
        )
        number += 1


@app.command()
def azure(
    source: Annotated[Path, typer.Argument(help="AzureLLMInferenceTrace_*.csv of 2023.")],
    output: Annotated[Path, typer.Argument(help="Trace to write, JSONL.")],
) -> None:
    """Convert an Azure LLM inference trace."""
    with source.open(encoding="utf-8", newline="") as file:
        bailian.write(output, azure_requests(csv.DictReader(file)))


@app.command()
def ragpulse(
    folder: Annotated[Path, typer.Argument(help="Folder `data` of RAGPulse.")],
    output: Annotated[Path, typer.Argument(help="Trace to write, JSONL.")],
) -> None:
    """Convert RAGPulse."""
    lengths: dict[str, int] = {}
    for name in _LENGTHS:
        for row in _read(folder / f"{name}.jsonl"):
            lengths[next(value for key, value in row.items() if key.endswith("_id"))] = row["token_length"]
    bailian.write(output, ragpulse_requests(_read(folder / "0_trace.jsonl"), lengths))


@app.command()
def claude_code(
    folder: Annotated[Path, typer.Argument(help="Folder `traces` of kv-cache-tester.")],
    output: Annotated[Path, typer.Argument(help="Archive to write, .tar.")],
    sessions: Annotated[int, typer.Option(min=1, help="Number of sessions.")] = 60,
    skip: Annotated[int, typer.Option(min=0, help="Sessions of the same order to leave out first.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 1,
    without: Annotated[list[str] | None, typer.Option(help="A file to leave out. Repeatable.")] = None,
) -> None:
    """Draw sessions of Claude Code."""
    try:
        print(published.pack(published.draw_sessions(folder, seed, skip, sessions, without or ()), output), "sessions")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def agents(
    folder: Annotated[Path, typer.Argument(help="A folder of lmcache-agent-trace, such as `magagent`.")],
    output: Annotated[Path, typer.Argument(help="Trace to write, JSONL.")],
) -> None:
    """Merge agents' sessions as text, one a file."""
    try:
        rows = published.merged_text(folder)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


if __name__ == "__main__":
    app()
