"""kv-cache-tester traces: one JSON object per conversation, requests with ``t``, ``in``, ``out``, ``hash_ids``.

Special cases and their treatment:
- ``hash_id_scope: "local"``: ids count from 1 in every file, so they are renumbered per file; global ids are kept.
- Some versions have a call twice, streaming (``s``) and not (``n``): the second of such a pair is dropped.
- A sub-agent is a nested ``requests`` list under a marker. Its ``t`` is relative to the marker; where the first inner
  ``t`` is not before a marker later than 0, the file has times of the conversation, which are kept.
  A sub-agent becomes a session of its own; it shares its file's ids.
- Conversations can be idle for days: gaps longer than ``idle_gap_cap_s`` without a running call of the file are cut.
- Files do not give the times of conversations relative to each other: file i starts at i x ``spacing_s``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import msgspec

from replayer.records.json_errors import BAD_JSON
from replayer.traces.formats.bailian import check_lengths, id_array
from replayer.traces.formats.checks import Number
from replayer.traces.formats.source import iter_json_members
from replayer.traces.trace import TraceError, TraceRequest

DEFAULT_BLOCK_TOKENS = 64


class _Entry(msgspec.Struct):
    """A call, or (with ``requests``) a sub-agent's marker."""

    t: Number
    type: str = "n"
    input_length: int = msgspec.field(default=0, name="in")
    output_length: int = msgspec.field(default=0, name="out")
    hash_ids: list[int] = []
    api_time: Number | None = None
    think_time: Number | None = None
    agent_id: str | None = None
    requests: list[_Entry] | None = None


class _File(msgspec.Struct):
    requests: list[_Entry]
    id: str = ""
    block_size: int = DEFAULT_BLOCK_TOKENS
    hash_id_scope: str = "local"


class _Call(msgspec.Struct):
    start_s: float
    entry: _Entry
    agent: str
    where: str


_DECODER = msgspec.json.Decoder(_File, strict=False)  # as in `bailian`


class WekaOptions(msgspec.Struct, frozen=True):
    """Placement of conversations in time."""

    idle_gap_cap_s: float = 60.0
    spacing_s: float = 10.0


def _calls(entries: list[_Entry], base_s: float, agent: str, where: str) -> Iterator[_Call]:
    for index, entry in enumerate(entries):
        position = f"{where} requests[{index}]"
        start_s = base_s + entry.t
        if entry.requests is None:
            yield _Call(start_s, entry, agent, position)
        elif entry.requests:
            absolute = entry.t > 0 and min(inner.t for inner in entry.requests) >= entry.t
            # Numbered by place in the file: agent ids are not unique when an agent is restarted.
            name = f"{agent}/{entry.agent_id or 'agent'}@{index}"
            yield from _calls(entry.requests, base_s if absolute else start_s, name, position)


def _without_duplicates(calls: list[_Call]) -> tuple[list[_Call], int]:
    """Drop the second of a streaming/non-streaming pair: same agent, same ids, other type, overlapping in time."""
    kept: list[_Call] = []
    last_of: dict[tuple[str, int], _Call] = {}
    for call in calls:
        ids = call.entry.hash_ids
        key = (call.agent, ids[-1] if ids else -1)
        twin = last_of.get(key)
        if (
            twin is not None
            and {twin.entry.type, call.entry.type} == {"s", "n"}
            and twin.entry.hash_ids == ids
            and call.start_s - twin.start_s <= (twin.entry.api_time or 0.0) + 1.0
        ):
            continue
        last_of[key] = call
        kept.append(call)
    return kept, len(calls) - len(kept)


class _Warp:
    """Maps a file's time to time with idle gaps cut to the cap; order is kept."""

    def __init__(self, calls: list[_Call], cap_s: float) -> None:
        self._from_s: list[float] = []
        cuts: list[float] = []
        busy_until = 0.0
        for call in calls:
            excess = call.start_s - busy_until - cap_s
            if excess > 0:
                self._from_s.append(call.start_s)
                cuts.append(excess)
            busy_until = max(busy_until, call.start_s + (call.entry.api_time or 0.0))
        self._cut_s = [0.0, *accumulate(cuts)]

    def __call__(self, time_s: float) -> float:
        return time_s - self._cut_s[bisect_right(self._from_s, time_s)]

    @property
    def gaps(self) -> int:
        return len(self._from_s)


def read(path: Path, options: WekaOptions, notes: list[str]) -> Iterator[TraceRequest]:
    """Requests conversation by conversation (the loader sorts them by time).

    Raises:
        TraceError: names the file and the remedy.
    """
    offset = 0
    chat_id = 0
    dropped = gaps = agents = files = 0
    names: set[str] = set()
    block_tokens: int | None = None
    for position, (name, content) in enumerate(iter_json_members(path)):
        try:
            trace = _DECODER.decode(content)
        except BAD_JSON as error:
            remedy = "correct or remove the file"
            if content[:64].lstrip().startswith(b"["):
                remedy = "for requests of another format write one object on each line of a .jsonl file"
            raise TraceError(f"{name}: not a kv-cache-tester trace ({error}); {remedy}") from None
        if trace.hash_id_scope not in ("local", "global"):
            raise TraceError(f"{name}: hash_id_scope {trace.hash_id_scope!r}; known are 'local' and 'global'")
        if block_tokens not in (None, trace.block_size):
            raise TraceError(
                f"{name}: block_size {trace.block_size}, earlier files have {block_tokens}; load them separately"
            )
        block_tokens = trace.block_size
        base = trace.id or Path(name).stem
        label = base if base not in names else f"{base}~{position}"
        names.add(label)
        calls = sorted(_calls(trace.requests, 0.0, label, name), key=lambda call: call.start_s)
        calls, duplicates = _without_duplicates(calls)
        warp = _Warp(calls, options.idle_gap_cap_s)
        dropped, gaps, files = dropped + duplicates, gaps + warp.gaps, files + 1
        turns: dict[str, tuple[int, int]] = {}
        top = offset - 1
        for call in calls:
            entry = call.entry
            check_lengths(call.where, entry.input_length, entry.output_length)
            ids = id_array(entry.hash_ids, call.where)
            if trace.hash_id_scope == "local":
                for index, value in enumerate(ids):
                    ids[index] = value + offset
                top = max(top, max(ids, default=top))
            parent, turn = turns.get(call.agent, (-1, 0))
            turns[call.agent] = (chat_id, turn + 1)
            think_s = entry.think_time
            yield TraceRequest(
                chat_id=chat_id,
                parent_chat_id=parent,
                session_id=call.agent,
                turn=turn + 1,
                timestamp_s=round(warp(call.start_s) + (files - 1) * options.spacing_s, 6),
                input_length=entry.input_length,
                output_length=entry.output_length,
                hash_ids=ids,
                think_time_s=None if think_s is None else min(max(think_s, 0.0), options.idle_gap_cap_s),
                api_time_s=entry.api_time,
                type="coder",
                subagent=call.agent != label,
            )
            chat_id += 1
        agents += sum(agent != label for agent in turns)
        offset = top + 1
    notes.append(f"{files} conversations start {options.spacing_s:g} s apart: the files have no common clock")
    if dropped:
        notes.append(f"{dropped} second halves of streaming/non-streaming pairs dropped")
    if gaps:
        notes.append(f"{gaps} idle gaps cut to {options.idle_gap_cap_s:g} s")
    if agents:
        notes.append(f"{agents} sub-agents became sessions of their own")
