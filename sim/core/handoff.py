"""KV hand-off between engines as vLLM 0.18.1's MooncakeConnector does it: what P holds, and how a pull can fail."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sim.core.blocks import Holding
from sim.core.sequence import KvTransfer


class LoadFailurePolicy(StrEnum):
    """D's handling of a request whose KV does not arrive. ``HANG`` is vLLM 0.18.1; later versions added the others."""

    HANG = "hang"
    FAIL = "fail"
    RECOMPUTE = "recompute"


class PullFailure(StrEnum):
    """Reasons for which a pull did not happen."""

    INVALID_PARAMS = "invalid_params"
    UNREACHABLE = "unreachable"
    STALE_ENGINE_ID = "stale_engine_id"
    UNKNOWN_TRANSFER = "unknown_transfer"
    FAULT = "fault"


def failure_delay_s(failure: PullFailure, abort_timeout_s: float) -> float:
    """Engine seconds until D sees that a pull failed: 0, except for a transfer id that P may still get to hold."""
    return abort_timeout_s if failure is PullFailure.UNKNOWN_TRANSFER else 0.0


class Pull(NamedTuple):
    """A KV request of D. The engine's driver gets the KV from P and reports it with ``finish_pull``."""

    request_id: str
    params: KvTransfer
    blocks: int
    """Blocks D lacks; only these are transferred."""
    streams: int
    """Requests running on D."""
    transfers: int
    """Other pulls D has in flight."""


class PullAnswer(NamedTuple):
    """P's answer to a pull: seconds until D has the KV, or the reason for which it will not get it."""

    seconds: float
    failure: PullFailure | None = None


@dataclass(slots=True)
class HeldBlocks:
    """Blocks of a finished P leg, kept for the engine that pulls them with the transfer id."""

    transfer_id: str
    blocks: Holding
    free_at_s: float
    """Engine time at which the blocks may be freed: the expiry, or the end of the transfer."""
    sent: bool = False


class HoldTable:
    """P's side: blocks held per transfer id. A hold serves one pull; expired holds are freed when P next steps."""

    def __init__(self) -> None:
        self._open: dict[str, HeldBlocks] = {}
        self._sending: list[HeldBlocks] = []
        self.expired = 0

    def __len__(self) -> int:
        return len(self._open) + len(self._sending)

    def holdings(self) -> list[Holding]:
        """Every block held."""
        return [hold.blocks for hold in (*self._open.values(), *self._sending)]

    def sending(self, now_s: float) -> int:
        """Transfers in flight at ``now_s``."""
        return sum(hold.free_at_s > now_s for hold in self._sending if hold.sent)

    def add(self, transfer_id: str, blocks: Holding, expires_s: float) -> None:
        """Hold ``blocks``. A second hold under the same id replaces the first, which is freed at the next step."""
        previous = self._open.pop(transfer_id, None)
        if previous is not None:
            previous.free_at_s = -math.inf
            self._sending.append(previous)
        self._open[transfer_id] = HeldBlocks(transfer_id, blocks, expires_s)

    def can_send(self, transfer_id: str, now_s: float) -> bool:
        """True if a pull of ``transfer_id`` would be served: held, not expired, not pulled before."""
        hold = self._open.get(transfer_id)
        return hold is not None and hold.free_at_s > now_s

    def send(self, transfer_id: str, done_s: float) -> None:
        """Start the transfer that ends at ``done_s`` (``can_send`` returned True)."""
        hold = self._open.pop(transfer_id)
        hold.sent = True
        hold.free_at_s = done_s
        self._sending.append(hold)

    def reap(self, now_s: float) -> list[Holding]:
        """Remove the holds that are sent or expired by ``now_s``; returns the blocks to release."""
        if not self._open and not self._sending:
            return []
        gone = [hold for hold in self._sending if hold.free_at_s <= now_s]
        if gone:
            self._sending = [hold for hold in self._sending if hold.free_at_s > now_s]
        late = [hold for hold in self._open.values() if hold.free_at_s <= now_s]
        for hold in late:
            del self._open[hold.transfer_id]
        self.expired += len(late)
        return [hold.blocks for hold in (*gone, *late)]

    def next_free_s(self) -> float:
        """Engine time at which the next hold may be freed (infinite: none is held)."""
        return min((hold.free_at_s for hold in (*self._open.values(), *self._sending)), default=math.inf)
