"""Freshness over a whole experiment: no engine may serve two of its runs, whatever each run's own proof shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from launch.freshness.gpus import FOREIGN
from launch.freshness.proof import FRESH_FILE, FreshProof
from launch.run.processes import ManagedProcess

SIMULATED = "simulated"


class SimulatedProof(msgspec.Struct, frozen=True, kw_only=True):
    """Proof of a simulated run: it runs in a separate process."""

    schema: int = 1
    kind: str = SIMULATED
    reason: str = "a separate simulator process, which begins with empty caches"
    pid: int
    process_started_unix_s: float
    engines: list[Any] = []
    gpus: None = None


@dataclass(frozen=True)
class Known:
    """Engines that have served a run of the experiment."""

    engine_ids: dict[str, str] = field(default_factory=dict)
    """Engine id -> run that it served."""
    processes: dict[tuple[int, float], str] = field(default_factory=dict)
    """(pid, start time in Unix seconds) -> run that it served."""

    def add(self, run: str, proof: FreshProof | SimulatedProof) -> None:
        """Remember the engines of a run."""
        for engine_id in _engine_ids(proof):
            self.engine_ids.setdefault(engine_id, run)
        for process in _processes(proof):
            self.processes.setdefault(process, run)

    def problems(self, proof: FreshProof | SimulatedProof) -> list[str]:
        """Reasons against a run with this proof, given the earlier runs; empty without any."""
        found = []
        if isinstance(proof, FreshProof):
            found += [f"{engine.instance}: {problem}" for engine in proof.engines for problem in engine.problems]
            if proof.gpus.status == FOREIGN:
                found += proof.gpus.foreign
            if not proof.engines:
                found.append("its proof names no engine")
        for engine_id in _engine_ids(proof):
            if engine_id in self.engine_ids:
                found.append(f"engine id {engine_id} served {self.engine_ids[engine_id]} before")
        for pid, started in _processes(proof):
            if (pid, started) in self.processes:
                found.append(
                    f"process {pid}, started {started:.2f}, served {self.processes[pid, started]} before: its caches "
                    "are warm"
                )
        return found


def read_proof(folder: Path) -> FreshProof | SimulatedProof | None:
    """The proof of one run's folder; None when there is none that can be read."""
    try:
        content = (folder / FRESH_FILE).read_bytes()
        values = msgspec.json.decode(content)
        if isinstance(values, dict) and values.get("kind") == SIMULATED:
            return msgspec.convert(values, SimulatedProof)
        return msgspec.convert(values, FreshProof)
    except (OSError, msgspec.MsgspecError):
        return None


def known_engines(folders: Iterable[tuple[str, Path]]) -> Known:
    """The engines of runs, given as (name, folder); folders without a proof are passed over."""
    known = Known()
    for name, folder in folders:
        proof = read_proof(folder)
        if proof is not None:
            known.add(name, proof)
    return known


def simulated_proof(process: ManagedProcess) -> SimulatedProof:
    """The proof of a simulator process that has just started."""
    return SimulatedProof(pid=process.pid, process_started_unix_s=process.created_unix_s)


def _engine_ids(proof: FreshProof | SimulatedProof) -> set[str]:
    return proof.engine_ids if isinstance(proof, FreshProof) else set()


def _processes(proof: FreshProof | SimulatedProof) -> list[tuple[int, float]]:
    if isinstance(proof, SimulatedProof):
        return [(proof.pid, proof.process_started_unix_s)]
    return [
        (engine.pid, engine.process_started_unix_s)
        for engine in proof.engines
        if engine.pid > 0 and engine.process_started_unix_s is not None
    ]
