"""The proxy's breakdown rows as a report needs them: predicted cached tokens by candidate, legs, stages, outcomes.

A row of the proxy has 2 KB and more, mostly the candidates' inputs; about a tenth is kept here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from replayer.records.json_errors import BAD_JSON

_CACHED_INPUTS = ("cached_tokens", "cached")
"""Names of a candidate's predicted cached tokens among a policy's inputs, in rows without ``cached_tokens``."""
_NEW_INPUT = "new_tokens"
"""Prompt minus predicted cached tokens, given by other policies."""


class BreakdownError(ValueError):
    """A breakdown file that cannot be read; the message names file and line."""


class Leg(msgspec.Struct, frozen=True):
    """Predicted and actual time of one leg, in wall seconds."""

    predicted_s: float
    actual_s: float


class BreakdownRow(msgspec.Struct, kw_only=True):
    """One request as the proxy saw it."""

    request_id: str = ""
    outcome: str = ""
    instance: str | None = None
    offload_reason: str | None = None
    prefill_instance: str | None = None
    request_class: str | None = None
    attempts: int = 0
    """Attempts that failed, hand-offs among them."""
    stages_ms: dict[str, float] = {}
    legs: dict[str, Leg] = {}
    believed: dict[str, float] = {}
    """Candidate -> cached tokens predicted there; empty where the policy does not report them."""
    candidates: tuple[str, ...] = ()


class _Score(msgspec.Struct):
    instance: str = ""
    inputs: dict[str, Any] = {}
    cached_tokens: float | None = None


class _Stored(msgspec.Struct):
    """The fields of a row that are read."""

    request_id: str | None = None
    outcome: str | None = None
    instance: str | None = None
    offload_reason: str | None = None
    prefill_instance: str | None = None
    request_class: str | None = msgspec.field(default=None, name="class")
    prompt_tokens: int | None = None
    attempts: list[Any] = []
    stages_ms: dict[str, Any] = {}
    legs: dict[str, Leg] = {}
    scores: list[_Score] = []


_DECODER = msgspec.json.Decoder(_Stored)


def read_rows(path: str | Path) -> list[BreakdownRow]:
    """Rows of the proxy's ``/breakdown?format=jsonl`` or its files, or of ``warmroute simulate --breakdown-output``.

    A last line that is cut off, by a crash or because it is still being written, is ignored.

    Raises:
        BreakdownError: a line is not a breakdown row.
        OSError: the file cannot be read.
    """
    rows = []
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    rows.append(_row(_DECODER.decode(line)))
                except BAD_JSON as error:
                    if rows and not line.endswith(b"\n"):
                        break
                    raise BreakdownError(f"{path}:{number}: not a breakdown row ({error})") from error
    return rows


def read_objects(path: str | Path) -> list[dict[str, Any]]:
    """Rows as written, with every field.

    Raises:
        BreakdownError: a line is not a JSON object.
        OSError: the file cannot be read.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if line.strip():
            try:
                rows.append(msgspec.json.decode(line, type=dict[str, Any]))
            except BAD_JSON as error:
                raise BreakdownError(f"{path}:{number}: not a breakdown row ({error})") from error
    return rows


def rows_of(stored: Iterable[Mapping[str, Any] | BreakdownRow]) -> list[BreakdownRow]:
    """Rows already in memory.

    Raises:
        BreakdownError: a row of another shape.
    """
    rows = []
    for number, row in enumerate(stored, 1):
        if isinstance(row, BreakdownRow):
            rows.append(row)
            continue
        try:
            rows.append(_row(msgspec.convert(row, _Stored)))
        except msgspec.ValidationError as error:
            raise BreakdownError(f"breakdown row {number}: {error}") from error
    return rows


def _row(stored: _Stored) -> BreakdownRow:
    believed = {}
    for score in stored.scores:
        cached = score.cached_tokens
        if cached is None:  # a row written before decisions carried it
            cached = _believed(score.inputs, stored.prompt_tokens)
        if cached is not None:
            believed[score.instance] = cached
    return BreakdownRow(
        request_id=stored.request_id or "",
        outcome=stored.outcome or "not reported",
        instance=stored.instance,
        offload_reason=stored.offload_reason,
        prefill_instance=stored.prefill_instance,
        request_class=stored.request_class,
        attempts=len(stored.attempts),
        stages_ms={name: float(ms) for name, ms in stored.stages_ms.items() if isinstance(ms, int | float)},
        legs=stored.legs,
        believed=believed,
        candidates=tuple(score.instance for score in stored.scores),
    )


def _believed(inputs: Mapping[str, Any], prompt_tokens: int | None) -> float | None:
    for name in _CACHED_INPUTS:
        if isinstance(cached := inputs.get(name), int | float):
            return float(cached)
    if prompt_tokens is not None and isinstance(new := inputs.get(_NEW_INPUT), int | float):
        return max(0.0, prompt_tokens - float(new))
    return None
