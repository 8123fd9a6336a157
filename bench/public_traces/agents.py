"""Sessions of agents that are published one a file: those of Claude Code (kv-cache-tester), and of agents as text."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

MOST_BYTES = 4 * 1024**2
MOST_TOKENS = 190_000


def in_drawn_order(names: Iterable[str], seed: int) -> list[str]:
    """File names in an order that depends on each name and the seed only, so that further files move no other."""
    return sorted(names, key=lambda name: sha256(f"{seed}/{name}".encode()).digest())


def most_tokens(entries: Iterable[dict[str, Any]]) -> int:
    """Tokens of the longest prompt with its answer, those of sub-agents included; 0 without a request."""
    return max((_tokens(entry) for entry in entries), default=0)


def _tokens(entry: dict[str, Any]) -> int:
    if "requests" in entry:
        return most_tokens(entry["requests"])
    return int(entry.get("in", 0)) + int(entry.get("out", 0))


def draw_sessions(folder: Path, seed: int, skip: int, count: int, without: Iterable[str]) -> Iterator[Path]:
    """Files of kv-cache-tester's ``traces``, drawn at random: ``count`` after the first ``skip`` that qualify.

    A file qualifies with at most `MOST_BYTES` and prompts that leave room for the answer within `MOST_TOKENS` tokens.

    Raises:
        ValueError: the folder has too few.
    """
    left_out, found = set(without), 0
    paths = {path.name: path for path in folder.glob("*.json") if path.name not in left_out}
    for name in in_drawn_order(paths, seed):
        if paths[name].stat().st_size > MOST_BYTES:
            continue
        if most_tokens(json.loads(paths[name].read_bytes())["requests"]) > MOST_TOKENS:
            continue
        found += 1
        if found > skip:
            yield paths[name]
        if found == skip + count:
            return
    raise ValueError(f"{folder} has {found} sessions that qualify, {skip + count} are needed; ask for fewer")


def pack(paths: Iterable[Path], output: Path) -> int:
    """Write the files to a tar archive, the same bytes for the same files; their number."""
    files = list(paths)
    with tarfile.open(output, "w") as archive:
        for path in files:
            content = path.read_bytes()
            member = tarfile.TarInfo(path.name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return len(files)


def merged_text(folder: Path) -> list[dict[str, Any]]:
    """Lines of agent text, one file a session, in order of time with the file as ``session_id``.

    Raises:
        ValueError: the folder has none.
    """
    rows = [
        json.loads(line) | {"session_id": path.name.split(".")[0]}
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    if not rows:
        raise ValueError(f"{folder} has no line in a file *.jsonl; give the folder of one agent")
    return sorted(rows, key=lambda row: float(row["timestamp"]))
