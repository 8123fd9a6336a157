"""Mooncake JSONL: timestamp (ms), input_length, output_length, hash_ids of 512 tokens; no session ids.

Sessions are derived: a request continues the one whose whole prompt (its full blocks, two at least) it begins with,
provided that the last of these blocks belongs to that conversation alone. Mooncake published no sessions
to check this with.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from replayer.records.json_errors import BAD_JSON
from replayer.traces.formats.bailian import check_lengths, id_array
from replayer.traces.formats.checks import Number
from replayer.traces.formats.source import iter_lines
from replayer.traces.trace import TraceError, TraceRequest


class _Row(msgspec.Struct):
    timestamp: Number
    input_length: int
    output_length: int
    hash_ids: list[int]


_DECODER = msgspec.json.Decoder(_Row, strict=False)  # as in `bailian`


def read(path: Path, unit_s: float, notes: list[str]) -> Iterator[TraceRequest]:
    """Requests in file order, each a session until `derive_sessions` is called.

    Raises:
        TraceError: names file, line and remedy.
    """
    for index, (line_number, line) in enumerate(iter_lines(path)):
        where = f"{path}:{line_number}"
        try:
            row = _DECODER.decode(line)
        except BAD_JSON as error:
            raise TraceError(
                f"{where}: not a Mooncake request ({error}); correct the line, or cut the file before it"
            ) from None
        check_lengths(where, row.input_length, row.output_length)
        yield TraceRequest(
            chat_id=index,
            session_id=f"s{index}",
            timestamp_s=row.timestamp * unit_s,
            input_length=row.input_length,
            output_length=row.output_length,
            hash_ids=id_array(row.hash_ids, where),
        )


def derive_sessions(requests: list[TraceRequest], block_tokens: int) -> int:
    """Name sessions by prefix chaining, in place (requests must be in time order).

    Returns:
        The number of sessions found.
    """
    tip_of: dict[int, TraceRequest] = {}
    owner: dict[int, str | None] = {}
    sessions = 0
    for request in requests:
        full = request.full_blocks(block_tokens)
        previous = None
        for index in range(full - 1, 0, -1):
            block = request.hash_ids[index]
            candidate = tip_of.get(block)
            if candidate is not None and owner.get(block) == candidate.session_id:
                previous = candidate
                break
        if previous is None:
            request.session_id, request.parent_chat_id, request.turn = f"s{sessions}", -1, 1
            sessions += 1
        else:
            request.session_id = previous.session_id
            request.parent_chat_id = previous.chat_id
            request.turn = previous.turn + 1
            del tip_of[previous.hash_ids[previous.full_blocks(block_tokens) - 1]]
        for index in range(full):
            block = request.hash_ids[index]
            # A block of two conversations (a system prompt) belongs to neither and cannot link turns.
            if owner.setdefault(block, request.session_id) != request.session_id:
                owner[block] = None
        if full:
            tip_of[request.hash_ids[full - 1]] = request
    return sessions
