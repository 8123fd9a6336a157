"""Agent text JSONL: timestamp (µs), input, output, session_id; prompts are text and token counts are estimates.

Blocks are cut every ``block_tokens`` x 4 characters and numbered by the text up to their end, so shared beginnings of
prompts become shared ids. A tokenizer cuts elsewhere: lengths and sharing are approximate.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from replayer.records.counted import counted
from replayer.records.json_errors import BAD_JSON
from replayer.traces.formats.source import iter_lines
from replayer.traces.trace import TraceError, TraceRequest

CHARACTERS_PER_TOKEN = 4


class _Row(msgspec.Struct):
    timestamp: float
    input: str
    output: str
    session_id: str


_DECODER = msgspec.json.Decoder(_Row)


def read(path: Path, unit_s: float, block_tokens: int, notes: list[str]) -> Iterator[TraceRequest]:
    """Requests in file order, with ``text`` set; turns are numbered by the loader, once sorted by time.

    Raises:
        TraceError: names file, line and remedy.
    """
    ids: dict[tuple[int, str], int] = {}
    width = block_tokens * CHARACTERS_PER_TOKEN
    empty = 0
    for index, (line_number, line) in enumerate(iter_lines(path)):
        try:
            row = _DECODER.decode(line)
        except BAD_JSON as error:
            raise TraceError(
                f"{path}:{line_number}: not an agent-text call ({error}); correct the line, or cut the file before it"
            ) from None
        if not row.input:
            empty += 1
            continue
        blocks = array("q")
        parent_block = -1
        for begin in range(0, len(row.input), width):
            parent_block = ids.setdefault((parent_block, row.input[begin : begin + width]), len(ids))
            blocks.append(parent_block)
        yield TraceRequest(
            chat_id=index,
            session_id=row.session_id,
            timestamp_s=row.timestamp * unit_s,
            input_length=-(-len(row.input) // CHARACTERS_PER_TOKEN),
            output_length=-(-len(row.output) // CHARACTERS_PER_TOKEN),
            hash_ids=blocks,
            type="text",
            text=row.input,
        )
    notes.append(f"token counts are estimates: {CHARACTERS_PER_TOKEN} characters per token")
    if empty:
        notes.append(f"{counted(empty, 'line')} with an empty prompt dropped")
