"""One cell: the same requests under ``warm``, and under ``migrate`` over every transport, with ratios and intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from bench.cells.placement import (
    PlacementArm,
    PlacementFigures,
    PlacementRatios,
    judged_sessions,
    placement_arm,
    ratios_of,
)
from bench.cells.ratios import four_digits
from bench.tournament.arena import PreparedCell
from bench.tournament.results import GridCell
from policies.costs.transfer_constants import KV_BYTES_PER_TOKEN
from policies.registry import make_routing
from policies.types import OffloadReason, Role, Transport
from replayer.compare.statistics.bootstrap import FloatArray
from sim.hardware import HardwareProfile, load_profile

FREE = "free"
"""NVLink at its idle times, whatever else runs: a bound for transports, since the model's contention is too high."""
PRICES = (Transport.RDMA.value, Transport.TCP.value, Transport.NVLINK.value, FREE)
ARMS: dict[str, dict[str, Any]] = {"migrate": {}, "always": {"priced": False}}
"""Arms and their parameters of ``migrate``: by price, and whenever a home is overloaded."""


class MigrationLegs(msgspec.Struct, frozen=True, kw_only=True):
    """Both legs of every hand-off of a run, judged or not; seconds, means."""

    hand_offs: int
    fell_back: int
    """Those after whose bound D computed the prompt itself; they are not in the means."""
    home_s: float = 0.0
    """From sending the P leg to its end: the queue at home and the new tokens."""
    home_queue_s: float = 0.0
    """Prefill queued at home at the decision, as the policy estimated it."""
    pull_s: float = 0.0
    """From sending the D leg to its first token."""
    gb_per_s: float = 0.0
    """KV of the prompts over the time of the pulls; a target that holds part of a prompt pulls less."""


class MovedTurns(msgspec.Struct, frozen=True, kw_only=True):
    """The judged turns that migrated, and the same turns under ``warm``; seconds, means."""

    turns: int
    ttft_s: float = 0.0
    ttft_stayed_s: float = 0.0
    e2e_s: float = 0.0
    e2e_stayed_s: float = 0.0


class MigrationArm(msgspec.Struct, frozen=True, kw_only=True):
    """One arm over one transport."""

    price: str
    arm: str
    figures: PlacementFigures
    moved: MovedTurns
    legs: MigrationLegs
    ratios: PlacementRatios
    """The arm divided by ``warm``."""


class MigrationCell(msgspec.Struct, frozen=True, kw_only=True):
    """All arms in one cell with one seed."""

    cell: GridCell
    seed: int
    sessions: int
    turns: int
    warm: PlacementFigures
    arms: list[MigrationArm]


def profiles(folder: Path) -> dict[str, Path]:
    """Profile by price, written below a folder: one engine, the h200's, for all; only the transfers differ.

    RDMA is the h20's, as published. ``free`` is the idle row of NVLink without contention.
    """
    steps, published = load_profile("h200"), load_profile("h20")
    plain = steps.model_dump(mode="json")
    nvlink = plain["transports"]["nvlink"]
    priced = {"rdma": published.transports["rdma"].model_dump(mode="json"), **plain["transports"]}
    found: dict[str, Path] = {}
    for name, transports in (
        ("h200-priced", priced),
        ("h200-free", {**priced, "nvlink": {**nvlink, "contention": 0.0, "rows": nvlink["rows"][:1]}}),
    ):
        profile = {**plain, "name": name, "transports": transports}
        HardwareProfile.model_validate(profile)
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(profile), encoding="utf-8")
        found |= dict.fromkeys([FREE] if name == "h200-free" else PRICES[:-1], path)
    return found


def compared(stage: PreparedCell, priced: Mapping[str, Path]) -> MigrationCell:
    """``warm`` and all arms in a prepared cell; ``priced``: the profile of each price."""
    options = replace(stage.options, role=Role.KV_BOTH)
    session_of = judged_sessions(stage)
    # Nothing is transferred under warm, so its run is the same over every transport.
    warm = placement_arm(stage, options, make_routing("warm"))
    arms = []
    for price, profile in priced.items():
        transport = Transport.NVLINK.value if price == FREE else price
        moving = replace(options, profile=str(profile), transport=transport, decisions=True)
        for name, params in ARMS.items():
            arm = placement_arm(stage, moving, make_routing("migrate", params))
            ratios = ratios_of(arm, warm, session_of, stage.seed)
            arms.append(
                MigrationArm(
                    price=price,
                    arm=name,
                    figures=arm.figures,
                    moved=moved_of(arm, warm),
                    legs=legs_of(arm),
                    ratios=ratios,
                )
            )
    return MigrationCell(
        cell=stage.cell,
        seed=stage.seed,
        sessions=stage.sessions,
        turns=session_of.size,
        warm=warm.figures,
        arms=arms,
    )


def legs_of(arm: PlacementArm) -> MigrationLegs:
    """Means over the hand-offs of a run that kept its decisions."""
    tried = [row for row in arm.rows if row["policy"] == "migrate" and "moved_s" in row["offload_inputs"]]
    done = [row for row in tried if row["offload_reason"] == OffloadReason.CHOSEN]
    fell_back = sum(str(row["offload_reason"]).startswith("fell_back") for row in tried)
    if not done:
        return MigrationLegs(hand_offs=0, fell_back=fell_back)
    home_s, pull_s = (_mean([row["legs"][leg]["actual_s"] for row in done]) for leg in ("prefill", "transfer"))
    tokens = sum(row["prompt_tokens"] for row in done)
    return MigrationLegs(
        hand_offs=len(done),
        fell_back=fell_back,
        home_s=home_s,
        home_queue_s=_mean([row["offload_inputs"]["prefill_queue_s"] for row in done]),
        pull_s=pull_s,
        gb_per_s=four_digits(tokens * KV_BYTES_PER_TOKEN / 1e9 / (pull_s * len(done))),
    )


def moved_of(arm: PlacementArm, warm: PlacementArm) -> MovedTurns:
    """Means over the turns that migrated, beside those of the same turns under ``warm``."""
    kept = arm.handed_off
    if not kept.any():
        return MovedTurns(turns=0)
    return MovedTurns(
        turns=int(kept.sum()),
        ttft_s=_mean(arm.ttft[kept]),
        ttft_stayed_s=_mean(warm.ttft[kept]),
        e2e_s=_mean(arm.e2e[kept]),
        e2e_stayed_s=_mean(warm.e2e[kept]),
    )


def _mean(values: Sequence[float] | FloatArray) -> float:
    return four_digits(float(np.mean(values)))
