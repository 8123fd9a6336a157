"""The record of a measurement: one JSON file with every row, and all that is needed to repeat it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from bench.figures.machine import machine

SCHEMA = 1


class EngineNote(msgspec.Struct, kw_only=True):
    """An engine as it was measured."""

    name: str
    url: str
    model: str
    version: str | None = None
    """vLLM's, from ``/version``; None where it has none."""
    pool_tokens: int | None = None
    max_num_batched_tokens: int | None = None
    """Of the fleet file; None: the engine's default, or not known."""


class InstrumentRecord(msgspec.Struct, kw_only=True):
    """One run of one instrument."""

    schema: int = SCHEMA
    instrument: str
    started_unix_s: float = msgspec.field(default_factory=time.time)
    finished_unix_s: float | None = None
    machine: dict[str, str] = msgspec.field(default_factory=machine)
    """Machine on which the instrument ran; ``hardware`` is the engines'."""
    hardware: str = ""
    fleet: str = ""
    engines: list[EngineNote] = []
    seed: int = 0
    nonce: str = ""
    """With the seed, the source of every prompt."""
    facts: Any = None
    """Facts about the engine that a calibration does not measure (`CalibratedEngine`); None: another instrument."""
    plan: Any = None
    rows: Any = None
    warnings: list[str] = []


def write_record(path: Path, record: InstrumentRecord) -> None:
    """Write a record as JSON, one value a line; `read_record` reads it."""
    record.finished_unix_s = time.time()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def read_record(path: Path) -> InstrumentRecord:
    """Read a record; its rows are plain values.

    Raises:
        msgspec.MsgspecError: not a record.
        OSError: it cannot be read.
    """
    return msgspec.json.decode(path.read_bytes(), type=InstrumentRecord)
