"""Kept results: a small file per simulation with the figures and their resamples, from which all tables are made."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterable
from pathlib import Path
from urllib.parse import quote

import msgspec

from bench.tournament.settings import TournamentError

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = (
    "sim/core/*.py",
    "sim/offline/*.py",
    "sim/virtual.py",
    "sim/hardware.py",
    "policies/*.py",
    "policies/predict/*.py",
    "policies/routing/base.py",
    "replayer/records/idle.py",
    "replayer/records/sessions.py",
    "replayer/replay/own_prefix.py",
    "replayer/replay/plan.py",
    "replayer/traces/trace.py",
    "bench/tournament/capacity.py",
    "bench/tournament/timeline.py",
    "bench/tournament/hotset.py",
    "bench/tournament/workload.py",
    "bench/tournament/arena.py",
)
"""Sources that affect a simulation's result besides trace, settings and policy."""
_COSTS = (
    "policies/costs/book.py",
    "policies/costs/formulas.py",
    "policies/costs/estimates.py",
    "policies/costs/order.py",
    "policies/costs/published.py",
    "policies/costs/transfer_constants.py",
    "policies/costs/transfers.py",
)
"""The learned cost models: they affect only the results of policies that use them."""


class GridCell(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One combination of the grid."""

    trace: str
    load: float
    pool: float
    fleet: int

    def __str__(self) -> str:
        return f"{self.trace} load {self.load:g} pool {self.pool:g} x{self.fleet}"


class MetricSample(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of one simulation, in seconds."""

    value: float
    resampled: list[float]
    """The metric in each resample of sessions; equal draws for every policy of a cell and seed."""


class SessionTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the sessions of which every turn is judged (`replayer.records.sessions`)."""

    sessions: int
    completed: int
    """Those without a failed turn; the figures are of these."""
    mean_s: float
    """Completion time in seconds: first turn due to last turn's end."""
    p50_s: float
    p90_s: float
    slowdown_mean: float
    """Completion over idle time, a factor."""
    slowdown_p50: float
    slowdown_p90: float


class EntrantResult(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in one cell with one seed."""

    cell: GridCell
    seed: int
    label: str
    made_of: str
    """Digest of everything that affects the result."""
    requests: int
    warming: int
    judged: int
    sessions: int
    failed: int
    ttft_p50_s: float
    ttft_p90: MetricSample
    e2e_p50: MetricSample
    e2e_p90_s: float
    tpot_p50_s: float
    apc: float
    """Cached prompt tokens over prompt tokens of the judged requests."""
    session_times: SessionTimes | None = None
    """None where no session was completed, and in older results."""

    @property
    def sources(self) -> str:
        """Digest of the simulator's sources that made it."""
        return self.made_of.split("-")[1] if "-" in self.made_of else ""


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a trace, measured before the simulations."""

    name: str
    made_of: str
    """Digest of everything that affects these figures."""
    family: str
    file: str
    requests: int
    sessions: int
    saturation: float
    """Requests per second and instance."""
    attained: float
    """Throughput of one overloaded instance over the saturation computed for the same requests."""
    latency_s: float
    """Mean nominal latency at the load of the hot set."""
    hot_set_tokens: float
    """Hot set of one instance in tokens."""
    pools: dict[str, int]
    """Tokens of an instance's pool by pool factor."""
    floored: list[str]
    """Factors whose pool is larger than requested, so that the largest request fits."""


def sources_digest() -> str:
    """Digest of the source files that affect every simulation's result."""
    return _digest([path for pattern in _SOURCES for path in sorted(ROOT.glob(pattern))], leave_out=_COSTS)


def costs_digest() -> str:
    """Digest of the cost-model sources, for policies that read ``FleetSnapshot.costs``."""
    return _digest([ROOT / name for name in _COSTS])


def _digest(paths: Iterable[Path], leave_out: Container[str] = ()) -> str:
    digest = hashlib.sha256()
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        if name not in leave_out:
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class Store:
    """Results in a folder, one file for each cell, seed and policy; written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, cell: GridCell, seed: int, label: str) -> Path:
        """Path of a result's file."""
        place = f"load-{cell.load:g}_pool-{cell.pool:g}_fleet-{cell.fleet}_seed-{seed}"
        return self.folder / "results" / cell.trace / place / f"{quote(label, safe='+')}.json"

    def read(self, cell: GridCell, seed: int, label: str) -> EntrantResult | None:
        """A kept result, or None if there is none.

        Raises:
            TournamentError: the file is not a result.
        """
        path = self.path(cell, seed, label)
        try:
            return msgspec.json.decode(path.read_bytes(), type=EntrantResult)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise TournamentError(f"{path}: {error}; delete it and run again") from error

    def write(self, result: EntrantResult) -> None:
        """Keep a result."""
        _write_whole(self.path(result.cell, result.seed, result.label), msgspec.json.encode(result))

    def read_facts(self) -> dict[str, TraceFacts]:
        """The facts of all traces kept, by name.

        Raises:
            TournamentError: a file is not such facts.
        """
        found = {}
        for path in sorted((self.folder / "traces").glob("*.json")):
            try:
                facts = msgspec.json.decode(path.read_bytes(), type=TraceFacts)
            except msgspec.MsgspecError as error:
                raise TournamentError(f"{path}: {error}; delete it and run again") from error
            found[facts.name] = facts
        return found

    def write_facts(self, facts: TraceFacts) -> None:
        """Keep a trace's facts."""
        _write_whole(self.folder / "traces" / f"{facts.name}.json", msgspec.json.encode(facts))


def _write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_bytes(content)
    partial.replace(path)
