"""Trace formats, one module each, and the detection of a file's format."""

from __future__ import annotations

from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from replayer.records.json_errors import BAD_JSON
from replayer.traces.formats.lengths import AZURE, BURSTGPT, columns_of
from replayer.traces.formats.source import is_empty, is_tar, iter_json_members, iter_lines, refuse_other_files
from replayer.traces.trace import TraceError

_OTHERS = "to convert another format see 'A trace of your own' in docs/replayer.md"


class Format(StrEnum):
    """Formats that can be read."""

    BAILIAN = "bailian"
    MOONCAKE = "mooncake"
    WEKA = "weka"
    AGENT_TEXT = "agent-text"
    AZURE = "azure"
    BURSTGPT = "burstgpt"


_OF_COLUMNS = {AZURE: Format.AZURE, BURSTGPT: Format.BURSTGPT}


def detect_format(path: Path) -> Format:
    """The format of a trace by its content.

    Raises:
        TraceError: no such file, an empty one, or none of the known formats.
    """
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder; give a trace file, or make one with `warmroute trace synth`")
    if path.is_dir() or is_tar(path):
        if next(iter_json_members(path), None) is None:
            raise TraceError(f"{path}: has no .json file; a folder or archive must have kv-cache-tester traces")
        return Format.WEKA
    if is_empty(path):
        raise TraceError(f"{path}: the file is empty")
    refuse_other_files(path)
    first = next(islice(iter_lines(path), 1), None)
    if first is None:
        raise TraceError(f"{path}: the file has only blank lines")
    if path.name.removesuffix(".gz").removesuffix(".zst").endswith(".json"):
        return Format.WEKA
    number, line = first
    columns = columns_of(line)
    if columns is not None:
        return _OF_COLUMNS[columns]
    try:
        row: Any = msgspec.json.decode(line)
    except BAD_JSON as error:
        raise TraceError(
            f"{path}:{number}: not a JSON object ({error}); traces are JSONL, one object per line, or CSV with the "
            "columns of Azure (TIMESTAMP, ContextTokens, GeneratedTokens) or BurstGPT (Timestamp, Request tokens, "
            f"Response tokens); {_OTHERS}"
        ) from None
    keys = set(row) if isinstance(row, dict) else set()
    if "requests" in keys:
        return Format.WEKA
    if {"input", "output", "session_id", "timestamp"} <= keys:
        return Format.AGENT_TEXT
    if {"timestamp", "input_length", "output_length", "hash_ids"} <= keys:
        return Format.BAILIAN if keys & {"chat_id", "session_id", "parent_chat_id"} else Format.MOONCAKE
    raise TraceError(
        f"{path}:{number}: unknown trace format (keys: {', '.join(sorted(map(str, keys))) or 'none'}); known "
        "are Bailian (chat_id, timestamp, input_length, output_length, hash_ids), Mooncake (the same without chat_id), "
        f"kv-cache-tester (requests) and agent text (timestamp, input, output, session_id); {_OTHERS}"
    )
