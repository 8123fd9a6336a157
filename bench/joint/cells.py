"""One cell: the same requests once with each policy, and the ratios of their figures with intervals."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from bench.cells.arenas import prepared
from bench.cells.placement import PlacementFigures, PlacementRatios, judged_sessions, placement_arm, ratios_of
from bench.tournament.results import GridCell
from policies.registry import make_routing
from policies.types import Role
from sim.offline.setup import parsed_params

BASELINE = "warm"


class JointCell(msgspec.Struct, frozen=True, kw_only=True):
    """Both policies in one cell with one seed."""

    cell: GridCell
    seed: int
    sessions: int
    turns: int
    warm: PlacementFigures
    joint: PlacementFigures
    ratios: PlacementRatios
    """``joint`` divided by ``warm``."""


class JointWork(msgspec.Struct, frozen=True, kw_only=True):
    """One cell to run, as plain data for another process."""

    folder: str
    cell: GridCell
    seed: int
    params: list[str] = []
    """``KEY=VALUE``: parameters of ``joint``."""
    base_params: list[str] = []
    """Those of ``warm``."""
    profile: str = ""
    """Hardware profile of the engines; empty: that of the tournament's settings."""
    transport: str | None = "nvlink"
    """Of the profile; over it the engines hand over KV. None: they have no connector."""
    scheduling_policy: str = "fcfs"
    """Of the engines; ``priority``: they compute waiting prompts in the policies' order (`policies.costs.order`)."""


def report(work: JointWork) -> JointCell:
    """Run one cell with both policies.

    Raises:
        TournamentError: no such trace, or no request to judge.
    """
    stage = prepared(work.folder, work.cell, work.seed, work.profile)
    role = Role.KV_BOTH if work.transport else Role.NONE
    options = replace(stage.options, role=role, transport=work.transport, scheduling_policy=work.scheduling_policy)
    session_of = judged_sessions(stage)
    warm = placement_arm(stage, options, make_routing(BASELINE, parsed_params(work.base_params)))
    joint = placement_arm(stage, options, make_routing("joint", parsed_params(work.params)))
    return JointCell(
        cell=stage.cell,
        seed=stage.seed,
        sessions=stage.sessions,
        turns=session_of.size,
        warm=warm.figures,
        joint=joint.figures,
        ratios=ratios_of(joint, warm, session_of, stage.seed),
    )
