"""Working set: sessions wait while the contexts in use fill the KV pools and the fleet recomputes what it evicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.admission.base import AdmissionReason, AdmissionView, Admit, Hold, SessionView
from policies.routing.base import require
from policies.types import RequestView


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Holds a session that is not resident while all of these hold:

    - contexts in flight, contexts kept (idle for less than ``keep_s``) and this prompt exceed ``fill`` of the pools;
    - the fleet spent more than ``lost_share`` of its time recomputing prefixes it had evicted, or others are held;
    - room is expected within the bound on holding.
    """

    keep_s: float = 30.0
    fill: float = 0.95
    lost_share: float = 0.25
    patience: float = 1e9
    least_active: float = 4.0
    name: ClassVar[str] = "working_set"

    def __post_init__(self) -> None:
        require(self.keep_s >= 0, "working_set: keep_s must not be negative")
        require(self.fill > 0, "working_set: fill must be above 0")
        require(self.least_active >= 0, "working_set: least_active must not be negative")
        require(0 <= self.lost_share <= 1, "working_set: lost_share must be within 0..1")

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        if session.in_flight or (session.turns and session.idle_s < self.keep_s):
            return Admit(AdmissionReason.RESIDENT)
        if not fleet.pool_tokens:
            return Admit(AdmissionReason.POOLS_UNKNOWN)
        needed = fleet.active_tokens + fleet.kept_tokens + request.prompt_tokens
        if needed <= self.fill * fleet.pool_tokens:
            return Admit(AdmissionReason.ROOM)
        if not fleet.active_sessions and not fleet.kept_sessions:
            return Admit(AdmissionReason.IDLE_FLEET)
        if fleet.active_sessions < self.least_active * fleet.instances:
            return Admit(AdmissionReason.IDLE_FLEET)
        if fleet.lost_share <= self.lost_share and not fleet.held and not session.waited_s:
            return Admit(AdmissionReason.NO_LOSS)
        if not session.waited_s and fleet.expected_wait_s > self.patience * fleet.longest_hold_s:
            return Admit(AdmissionReason.TOO_LONG_A_WAIT)
        return Hold(AdmissionReason.WORKING_SET, needed, fleet.pool_tokens)
