"""Simulates the missing part of the grid in a number of processes, the longest jobs first.

The results do not depend on the number of processes or the order: every simulation is a function of its cell, its seed
and its policy, and writes its own file.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec

from bench.tournament.arena import Arena
from bench.tournament.entrants import Entrant
from bench.tournament.results import GridCell, Store
from bench.tournament.settings import Grid, TournamentSettings


class CellJob(msgspec.Struct, frozen=True, kw_only=True):
    """One cell with one seed, for all entrants: they share its preparation."""

    cell: GridCell
    seed: int


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a job."""

    job: CellJob
    played: int
    """Simulations run."""
    kept: int
    """Results that already existed."""
    requests: int
    """Requests of one simulation."""
    cpu_s: float


def jobs_of(grid: Grid, traces: Sequence[str]) -> list[CellJob]:
    """All jobs, the longest first, so that no long job is left for the end."""
    jobs = [
        CellJob(cell=GridCell(trace=trace, load=load, pool=pool, fleet=fleet), seed=seed)
        for trace in sorted(traces)
        for load in grid.loads
        for pool in grid.pools
        for fleet in grid.fleets
        for seed in grid.seeds
    ]
    return sorted(jobs, key=lambda job: (-job.cell.fleet, -job.cell.load, job.cell, job.seed))


class Player:
    """Runs jobs in one process; traces read for one job are reused by the next."""

    def __init__(self, settings: TournamentSettings, traces: Path, out: Path, entrants: Sequence[Entrant]) -> None:
        self._settings = settings
        self._arena = Arena(settings, traces)
        self._store = Store(out)
        self._entrants = [(entrant, entrant.digest()) for entrant in entrants]

    def learn(self, trace: str) -> None:
        """Measure and keep a trace's facts, unless they exist."""
        made_of = self._arena.made_of(trace, self._settings.grid.pools, self._arena.ground(trace).rule)
        found = self._store.read_facts().get(trace)
        if found is None or found.made_of != made_of:
            self._store.write_facts(self._arena.ground(trace).facts(made_of))

    def play(self, job: CellJob) -> Done:
        """Simulate the missing results of a job."""
        started_s = time.process_time()
        made_of = self._arena.made_of(job.cell.trace, job.cell, job.seed)
        missing = []
        for entrant, digest in self._entrants:
            found = self._store.read(job.cell, job.seed, entrant.label)
            if found is None or found.made_of != f"{made_of}-{digest}":
                missing.append((entrant, digest))
        requests = 0
        if missing:
            stage = self._arena.stage(job.cell, job.seed)
            requests = stage.workload.requests
            for entrant, digest in missing:
                self._store.write(stage.play(entrant.make(), entrant.label, digest, entrant.admission_rule()))
        return Done(
            job=job,
            played=len(missing),
            kept=len(self._entrants) - len(missing),
            requests=requests,
            cpu_s=time.process_time() - started_s,
        )


_player: Player | None = None


def _start(settings: TournamentSettings, traces: Path, out: Path, entrants: Sequence[Entrant]) -> None:
    global _player  # noqa: PLW0603  one per worker process, made when the process starts
    _player = Player(settings, traces, out, entrants)


def _play(job: CellJob) -> Done:
    assert _player is not None
    return _player.play(job)


def _learn(trace: str) -> None:
    assert _player is not None
    _player.learn(trace)


def play_all(
    jobs: Sequence[CellJob],
    settings: TournamentSettings,
    traces: Path,
    out: Path,
    entrants: Sequence[Entrant],
    processes: int,
    on_done: Callable[[Done], None],
) -> None:
    """Measure the traces and run all jobs; an error in one ends the others, and finished results are kept.

    Args:
        jobs: Jobs in the order in which to start them.
        settings: Settings of the tournament.
        traces: Folder of traces.
        out: Folder of results.
        entrants: The policies.
        processes: Number of processes; 1: this process.
        on_done: Called with each job that ends, in the order in which they end.
    """
    names = sorted({job.cell.trace for job in jobs})
    if processes == 1:
        player = Player(settings, traces, out, entrants)
        for name in names:
            player.learn(name)
        for job in jobs:
            on_done(player.play(job))
        return
    pool = ProcessPoolExecutor(
        max_workers=processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(settings, traces, out, tuple(entrants)),
    )
    try:
        measured = [pool.submit(_learn, name) for name in names]
        for future in as_completed(pool.submit(_play, job) for job in jobs):
            on_done(future.result())
        for each in measured:
            each.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
