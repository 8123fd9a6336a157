"""Working set: sessions wait while the contexts in use exceed the KV pools and the fleet recomputes what it evicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.admission.base import AdmissionReason, AdmissionView, Admit, Hold, SessionView
from policies.routing.base import require
from policies.types import RequestView


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Holds a request of a session that is not in flight while all of these are true:

    - *No room*: contexts of sessions in flight, of kept sessions and this prompt exceed ``fill`` of the fleet's KV
      pools, so sending it evicts a context that may be needed. Kept contexts count up to ``kept_share`` of the pools:
      beyond that engines would idle for sessions of which many have ended. A kept session's own turn needs room beside
      those in flight only; when even they exceed the pools, it would lose its context while it waits in an engine's
      queue.
    - *Busy*: at least ``least_prefilling`` requests per instance wait for their first token. Below that engines would
      idle, and time that nobody uses is worth less than an eviction.
    - *They return in time*: of the sessions that return, at least ``return_share`` do so within ``keep_s``. Where they
      do not, as in chats with minutes between turns, a context that is kept saves nothing (the five-minute rule, Gray
      and Putzolu 1987).
    - *It hurts*: recomputing evicted prefixes took more than ``lost_share`` of the fleet's time of the last half minute
      (`policies.admission.accounts`), or others are held already.

    A session is kept for ``keep_s`` after its last request, unless the prefix index says that its context was evicted:
    then its next turn costs as much as a new session's. The second condition keeps the rule from costing throughput
    where the pools hold too few sessions to occupy the engines; the last two leave fleets alone that do not thrash.
    Complexity: O(1).
    """

    keep_s: float = 30.0
    fill: float = 0.95
    lost_share: float = 0.3
    least_prefilling: float = 0.75
    return_share: float = 0.35
    kept_share: float = 0.5
    name: ClassVar[str] = "working_set"

    def __post_init__(self) -> None:
        require(self.keep_s >= 0, "working_set: keep_s must not be negative")
        require(self.fill > 0, "working_set: fill must be above 0")
        require(self.least_prefilling >= 0, "working_set: least_prefilling must not be negative")
        require(0 <= self.lost_share <= 1, "working_set: lost_share must be within 0..1")
        require(0 <= self.return_share <= 1, "working_set: return_share must be within 0..1")
        require(0 <= self.kept_share <= 1, "working_set: kept_share must be within 0..1")

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        if session.in_flight:
            return Admit(AdmissionReason.RESIDENT)
        if not fleet.pool_tokens:
            return Admit(AdmissionReason.RESIDENT if session.kept else AdmissionReason.POOLS_UNKNOWN)
        room_tokens = self.fill * fleet.pool_tokens
        sent_tokens = fleet.active_tokens + request.prompt_tokens
        if session.kept:
            needed = sent_tokens
            if needed <= room_tokens:
                return Admit(AdmissionReason.RESIDENT)
        else:
            needed = sent_tokens + min(fleet.kept_tokens, int(self.kept_share * fleet.pool_tokens))
            if needed <= room_tokens:
                return Admit(AdmissionReason.ROOM)
        idle = not fleet.active_sessions and not fleet.kept_sessions
        if idle or fleet.prefilling < self.least_prefilling * fleet.instances:
            return Admit(AdmissionReason.IDLE_FLEET)
        if fleet.return_share < self.return_share:
            return Admit(AdmissionReason.NO_RETURN)
        if fleet.lost_share <= self.lost_share and not fleet.held and not session.waited_s:
            return Admit(AdmissionReason.NO_LOSS)
        return Hold(AdmissionReason.WORKING_SET, needed, fleet.pool_tokens)
