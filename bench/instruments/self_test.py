"""Self-test of a running fleet, for ``doctor --deep``: one tiny hand-off from and to every engine, verified."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.instruments.engine import BusyFleetError, InstrumentError, MeasuredEngine, refuse_busy
from bench.instruments.prompts import Prompts, TokenRange
from bench.instruments.targets import fleet_targets, opened
from bench.instruments.transfer import TransferPlan, measure_transfers
from launch.doctor.facts import HandOffTest
from launch.doctor.probes.deep import HandOffError
from launch.fleet.file import FleetFile
from policies.types import Role

TOKENS = 512
"""Prompt of a hand-off: whole blocks of every block size up to 512."""
_TIMEOUT_S = 60.0
"""Bound on one request: an engine whose pull hangs must not hang the doctor."""
_TOKEN_IDS = TokenRange(100, 1_000)
"""Ids that even a tiny test model has."""


class Pair(NamedTuple):
    """Instances of one hand-off, by their places in the fleet."""

    source: int
    target: int


def pairs(roles: Sequence[Role]) -> list[Pair]:
    """Hand-offs in which every engine that sends sends, and every one that receives receives.

    A ring: each sender gives to the receiver after it, so that two engines of role kv_both are tested each way.
    """
    senders = [place for place, role in enumerate(roles) if role in {Role.KV_BOTH, Role.KV_PRODUCER}]
    receivers = [place for place, role in enumerate(roles) if role in {Role.KV_BOTH, Role.KV_CONSUMER}]
    found = []
    for number in range(max(len(senders), len(receivers)) if senders and receivers else 0):
        source, place = senders[number % len(senders)], (number + 1) % len(receivers)
        target = receivers[place] if receivers[place] != source else receivers[(place + 1) % len(receivers)]
        if source != target:
            found.append(Pair(source, target))
    return found


def hand_offs(fleet: FleetFile, source: str) -> list[HandOffTest]:
    """Make the hand-offs of a running fleet.

    Args:
        fleet: the fleet.
        source: its file.

    Raises:
        HandOffError: it does not run, is busy, or has no two engines that exchange KV.
    """
    return asyncio.run(_make(fleet, source))


async def _make(fleet: FleetFile, source: str) -> list[HandOffTest]:
    chosen = pairs([member.role for member in fleet.members])
    if not chosen:
        raise HandOffError(
            "the fleet has no two engines that exchange KV", "give one a role that sends, another one that receives"
        )
    try:
        targets = fleet_targets(fleet, Path(source).stem)
    except InstrumentError as error:
        raise HandOffError(str(error)) from error
    try:
        async with opened(targets.engines, targets.model, None, _TIMEOUT_S) as engines:
            await refuse_busy(engines)
            prompts = Prompts(_TOKEN_IDS)
            return [
                await self_test(engines[pair.source], engines[pair.target], prompts, targets.kv_bytes_per_token)
                for pair in chosen
            ]
    except BusyFleetError as error:
        raise HandOffError(str(error), "run this again while the fleet is idle") from error
    except InstrumentError as error:
        raise HandOffError(str(error), "start the fleet with `warmroute up`, if it does not run") from error


async def self_test(
    source: MeasuredEngine, target: MeasuredEngine, prompts: Prompts, kv_bytes_per_token: float | None
) -> HandOffTest:
    """One hand-off and its verification; its failure is part of the result."""
    plan = TransferPlan(tokens=(TOKENS,), repeats=1)
    try:
        [row] = await measure_transfers(source, target, plan, prompts, kv_bytes_per_token or 0.0)
    except InstrumentError as error:
        return HandOffTest(source=source.name, target=target.name, error=str(error), tokens=TOKENS)
    pulled = row.pulled_tokens if row.pulled_tokens is not None else row.cached_tokens
    return HandOffTest(
        source=source.name,
        target=target.name,
        tokens=row.tokens,
        pulled_tokens=None if pulled is None else round(pulled),
        size_bytes=None if pulled is None or not kv_bytes_per_token else round(pulled * kv_bytes_per_token),
        same_text=row.same_text,
    )
