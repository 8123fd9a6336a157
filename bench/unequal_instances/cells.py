"""One cell played with every arm on a fleet of given speeds, and the table of all cells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from bench.cells.arenas import prepared
from bench.cells.arms import ArmSetup, play_beside, ratios_table
from bench.cells.placement import PlacementFigures, PlacementRatios
from bench.tournament.results import GridCell
from policies.registry import make_routing
from policies.routing.base import RoutingPolicy
from policies.types import Role
from sim.offline.setup import parsed_params, parsed_speeds

BASE = "warm,learned_slowness=false"


class UnequalWork(msgspec.Struct, frozen=True, kw_only=True):
    """One cell to play, as plain data for another process."""

    folder: str
    cell: GridCell
    seed: int
    speeds: str
    """Of the instances over the profile's, in turn (`sim.offline.options.SimOptions`)."""
    arms: list[str]
    """``POLICY[,KEY=VALUE...]``."""
    profile: str = ""
    """Hardware profile of the engines; empty: that of the tournament's settings."""


class UnequalCell(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the arms in one cell, and ratios to the base."""

    cell: GridCell
    seed: int
    speeds: str
    sessions: int
    turns: int
    base: PlacementFigures
    arms: dict[str, PlacementFigures]
    ratios: dict[str, PlacementRatios]


class UnequalDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A kept result."""

    kind: str
    schema: int
    machine: dict[str, str]
    profile: str
    cells: list[UnequalCell]


def policy_of(arm: str) -> RoutingPolicy:
    """The policy of ``POLICY[,KEY=VALUE...]``; raises UnknownPolicyError or PolicyParameterError."""
    name, *params = arm.split(",")
    return make_routing(name, parsed_params(params))


def mean_speed(speeds: Sequence[float], instances: int) -> float:
    """Mean over so many instances that have these speeds in turn."""
    return sum([speeds[number % len(speeds)] for number in range(instances)]) / instances


def play(work: UnequalWork) -> UnequalCell:
    """Play one cell with the base and every arm.

    Raises:
        TournamentError: no such trace, or no request to judge.
    """
    speeds = parsed_speeds(work.speeds)
    load = work.cell.load * mean_speed(speeds, work.cell.fleet)
    stage = prepared(work.folder, msgspec.structs.replace(work.cell, load=load), work.seed, work.profile)
    options = replace(stage.options, role=Role.NONE, transport=None, speeds=speeds)
    base, *arms = [ArmSetup(options, policy_of(arm)) for arm in (BASE, *work.arms)]
    played = play_beside(stage, base, dict(zip(work.arms, arms, strict=True)))
    return UnequalCell(
        cell=work.cell,
        seed=work.seed,
        speeds=work.speeds,
        sessions=stage.sessions,
        **played._asdict(),
    )


def table_of(cells: Sequence[UnequalCell]) -> list[str]:
    """A Markdown table, a row for each speeds and arm (`bench.cells.arms.ratios_table`)."""
    rows: dict[tuple[str, str], list[PlacementRatios]] = defaultdict(list)
    for cell in cells:
        for arm, ratios in cell.ratios.items():
            rows[cell.speeds, f"`{arm}`"].append(ratios)
    return ratios_table(("speeds", "policy"), rows.items())
