"""The files of a sustained run: written together once it is complete, read back for its table."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.home_case.fleet import HomeCaseError
from bench.home_case.samples import ProxySample
from bench.routers.records import EngineCounters
from launch.hardware.gpus import GpuInventory
from replayer.records.runs import RecordError, Run, read_run
from replayer.report.page import BreakdownError, Row, read_breakdown

SCHEMA = 1
RUN = "run.jsonl.gz"
BREAKDOWN = "breakdown.jsonl.gz"
TELEMETRY = "telemetry.csv.gz"
SUSTAINED = "sustained.json"
NAMES = (RUN, BREAKDOWN, TELEMETRY, SUSTAINED)


class FleetEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of the fleet."""

    name: str
    kind: str
    version: str
    role: str
    transport: str | None = None
    devices: list[str] = []
    pool_tokens: int = 0
    counters: EngineCounters = EngineCounters()
    """Increase during the run."""


class ProxyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The proxy: what it reported before the run, and what it used during it."""

    version: str
    policy: dict[str, Any]
    """Policy and planner with their parameters, as ``GET /policy`` reports them."""
    admission: dict[str, Any]
    """As ``GET /admission`` reports it."""
    settings: dict[str, Any] = {}
    """Its settings file without secrets."""
    counters: dict[str, float] = {}
    """Increase of its counters, by series; 0 is left out."""
    cpu_s: float | None = None
    """Processor time during the replay, once-a-second readings of ``/stats`` included; None: its process was gone."""
    rss_most_bytes: int = 0
    descriptors_most: int = 0
    samples: list[ProxySample] = []
    """One in five seconds, from before the first request until the fleet was idle."""


class SustainedRecord(msgspec.Struct, kw_only=True):
    """Everything about a run besides its requests, the proxy's rows and the GPUs' samples."""

    schema: int = SCHEMA
    fleet: str
    hardware: str
    limit_s: float
    """Longest replay, wall seconds."""
    cut: bool
    """True: the limit ended the replay; requests in flight then are not in the run."""
    replay_s: float
    """Wall seconds."""
    machine: dict[str, Any] = {}
    gpus: GpuInventory = GpuInventory()
    model: str
    context_tokens: int | None = None
    engines: list[FleetEngine]
    proxy: ProxyFacts
    idle_after_s: float | None = None
    """Wall seconds from the end of the replay until nothing was left; None: something was left."""
    leaks: list[str] = []
    telemetry: str = ""
    """Reason for missing or incomplete GPU telemetry."""
    problems: list[str] = []
    """Reasons to distrust the figures."""


class SustainedRun(NamedTuple):
    """A run as read back."""

    record: SustainedRecord
    run: Run
    rows: list[Row]
    telemetry: str | None
    """CSV text; None without GPUs."""


def write_files(folder: Path, record: SustainedRecord, plain: Mapping[str, bytes]) -> None:
    """Write a run's files, those of an earlier run replaced; nothing of it is there before everything is on disk.

    Args:
        folder: folder that exists.
        record: `SUSTAINED`.
        plain: `RUN`, `BREAKDOWN` and, with GPUs, `TELEMETRY` -> contents to compress.
    """
    contents = {name: gzip.compress(data, mtime=0) for name, data in plain.items()}
    contents[SUSTAINED] = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    partial = {name: folder / f".{name}.partial" for name in contents}
    try:
        for name, data in contents.items():
            partial[name].write_bytes(data)
        for name in NAMES:
            if name in partial:
                partial[name].replace(folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)


def read_files(folder: Path) -> SustainedRun:
    """Read a run's files. Raises HomeCaseError."""
    try:
        record = msgspec.json.decode((folder / SUSTAINED).read_bytes(), type=SustainedRecord)
        if record.schema != SCHEMA:
            raise HomeCaseError(f"{folder / SUSTAINED}: schema {record.schema}, this version reads {SCHEMA}")
        with tempfile.TemporaryDirectory(prefix="home-case-") as scratch:
            unpacked = Path(scratch)
            for name in (RUN, BREAKDOWN):
                (unpacked / name).write_bytes(gzip.decompress((folder / name).read_bytes()))
            run, rows = read_run(unpacked / RUN), read_breakdown(unpacked / BREAKDOWN)
        telemetry = folder / TELEMETRY
        text = gzip.decompress(telemetry.read_bytes()).decode() if telemetry.exists() else None
    except (OSError, EOFError, msgspec.MsgspecError, RecordError, BreakdownError, UnicodeDecodeError) as error:
        raise HomeCaseError(f"{folder}: not the files of a sustained run ({error})") from error
    return SustainedRun(record, run, rows, text)
