"""Record of one run: ``arm.json`` beside its request records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from launch.arm import BREAKDOWN_FILE, PROCESSORS_FILE, RUN_FILE
from launch.doctor.facts import EnginePython
from launch.experiment.records.environment import HostLoad
from launch.freshness.proof import FRESH_FILE
from launch.hardware.telemetry import TELEMETRY_FILE
from replayer.records.runs import RequestRecord, Run

ARM_FILE = "arm.json"
KEPT_FILES = (RUN_FILE, BREAKDOWN_FILE, FRESH_FILE, TELEMETRY_FILE, PROCESSORS_FILE, ARM_FILE)
"""Files of a run whose hashes are noted, where they exist."""


class ArmRecord(msgspec.Struct, kw_only=True):
    """``arm.json``: settings and conditions of one run."""

    schema: int = 1
    arm: str
    repeat: int
    seed: int
    """Of the repeat."""
    noise_seed: int
    """Seed the run was started with: different for every arm where arms draw their own noise."""
    order: int
    attempt: int
    backend: str
    policy: dict[str, Any]
    """``name``, ``params`` as given, and ``resolved``: every parameter, defaults included."""
    offload: dict[str, Any]
    """Likewise, with ``planner`` for the name."""
    admission: dict[str, Any] = {}
    """Likewise, and ``max_hold_s``; empty in records made before there were admission rules."""
    instances: int
    kv_capacity_tokens: int | None = None
    """KV pool of one instance in tokens; None where it was not reported."""
    started_unix_s: float
    finished_unix_s: float | None = None
    load_before: HostLoad | None = None
    environment_changes: list[str] = []
    """Differences from ``environment.json``; empty without any."""
    engines: list[EnginePython] = []
    """Versions and transfer path of the Pythons that this arm's vLLM engines run with; empty with simulated ones."""
    git_commit: str | None = None
    git_dirty: bool | None = None
    warnings: list[str] = []
    fleet: dict[str, Any] | None = None
    """Every setting of the live fleet."""
    command: list[str] | None = None
    """Of the simulator."""


@dataclass
class Measured:
    """Results of a run."""

    run: Run
    instances: int
    kv_capacity_tokens: int | None = None
    warnings: list[str] = field(default_factory=list)
    fleet: dict[str, Any] | None = None
    command: list[str] | None = None


@dataclass(frozen=True)
class Callbacks:
    """Callbacks on the progress of a run."""

    phase: Callable[[str], None] = lambda phase: None
    record: Callable[[RequestRecord], None] = lambda record: None
