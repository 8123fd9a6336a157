"""A count of every block's owner: free, used by a live request, held for another engine, or leaked."""

from __future__ import annotations

from sim.core.blocks import BlockRun, Holding
from sim.core.handoff import HoldTable
from sim.core.scheduler import Scheduler
from sim.core.types import EngineState


def count_state(scheduler: Scheduler, holds: HoldTable, orphans: list[Holding], waiting: int) -> EngineState:
    """Count what the parts of an engine own. Costs a pass over all runs in use.

    ``orphans``: blocks of requests that are gone and whose transfer was never reported. ``waiting``: requests that are
    live and not running.
    """
    pool = scheduler.pool
    owners = (*scheduler.running, *scheduler.waiting, *scheduler.pulling.values())
    used, loose_used = _distinct([sequence.blocks for sequence in owners])
    held, loose_held = _distinct(holds.holdings())
    leaked, loose_leaked = _distinct(orphans)
    return EngineState(
        running=len(scheduler.running),
        waiting=waiting - len(scheduler.pulling),
        pulling=len(scheduler.pulling),
        total_blocks=pool.num_blocks,
        free_blocks=pool.free_blocks,
        used_blocks=_blocks(used) + loose_used,
        held_blocks=_blocks(held - used) + loose_held,
        leaked_blocks=_blocks(leaked - used - held) + loose_leaked,
        cached_blocks=pool.cached_blocks,
        holds=len(holds),
        expired_holds=holds.expired,
        evictions=pool.evictions,
    )


def _distinct(holdings: list[Holding]) -> tuple[set[BlockRun], int]:
    """(the runs that any of them references, their loose blocks)"""
    runs = {run for holding in holdings for run in holding.backwards()}
    return runs, sum(holding.loose for holding in holdings)


def _blocks(runs: set[BlockRun]) -> int:
    return sum(len(run.keys) for run in runs)
