"""Working set: sessions wait while the contexts in use exceed what the KV pools can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.admission.base import AdmissionReason, AdmissionView, Admit, Hold, SessionView
from policies.routing.base import require
from policies.types import RequestView


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Holds a request of a session that is not in flight while all of these are true:

    - *No room*: contexts in flight, those of kept sessions and this prompt exceed ``fill`` of the fleet's KV pools,
      less ``spare_contexts`` contexts of average size per instance, since a pool holds whole contexts only. Kept
      contexts count up to ``kept_share`` of the pools, times the share of turns that another one follows: those of
      agents that return are protected, those of chats that do not take no room.
    - *Busy*: at least ``least_prefilling`` requests per instance wait for their first token. Below that engines would
      idle, and time that nobody uses is worth less than an eviction.
    - *It hurts*: the contexts in flight and this prompt exceed the room by themselves, so it would wait in an engine's
      queue, where cached contexts are evicted before their turn; or recomputing evicted prefixes took more than
      ``lost_share`` of the fleet's time of the last half minute (`policies.admission.accounts`); or others are held.

    A kept session's own turn needs room beside the contexts in flight only. A session is kept until nearly all that
    return have done so, at most ``keep_s`` (`policies.admission.return_gaps`), unless the prefix index says that its
    context was evicted: then its next turn costs as much as a new session's. Complexity: O(1).
    """

    keep_s: float = 30.0
    fill: float = 0.95
    spare_contexts: float = 0.5
    kept_share: float = 0.5
    least_prefilling: float = 0.1
    lost_share: float = 0.3
    name: ClassVar[str] = "working_set"

    def __post_init__(self) -> None:
        require(self.keep_s >= 0, "working_set: keep_s must not be negative")
        require(self.fill > 0, "working_set: fill must be above 0")
        require(self.spare_contexts >= 0, "working_set: spare_contexts must not be negative")
        require(0 <= self.kept_share <= 1, "working_set: kept_share must be within 0..1")
        require(self.least_prefilling >= 0, "working_set: least_prefilling must not be negative")
        require(0 <= self.lost_share <= 1, "working_set: lost_share must be within 0..1")

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        if session.in_flight:
            return Admit(AdmissionReason.RESIDENT)
        if not fleet.pool_tokens:
            return Admit(AdmissionReason.RESIDENT if session.kept else AdmissionReason.POOLS_UNKNOWN)
        room_tokens = self._room_tokens(request, session, fleet)
        in_flight_tokens = fleet.active_tokens + request.prompt_tokens
        if session.kept:
            kept_tokens = 0
        else:
            kept_tokens = min(fleet.kept_tokens, int(self.kept_share * fleet.return_share * fleet.pool_tokens))
        if in_flight_tokens + kept_tokens <= room_tokens:
            return Admit(AdmissionReason.RESIDENT if session.kept else AdmissionReason.ROOM)
        nobody = not fleet.active_sessions and not fleet.kept_sessions
        if nobody or fleet.prefilling < self.least_prefilling * fleet.instances:
            return Admit(AdmissionReason.IDLE_FLEET)
        hurts = fleet.lost_share > self.lost_share or fleet.held or session.waited_s
        if in_flight_tokens <= room_tokens and not hurts:
            return Admit(AdmissionReason.NO_LOSS)
        return Hold(AdmissionReason.WORKING_SET, in_flight_tokens + kept_tokens, fleet.pool_tokens)

    def _room_tokens(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> float:
        sessions, tokens = fleet.active_sessions + fleet.kept_sessions, fleet.active_tokens + fleet.kept_tokens
        if not session.kept:
            sessions, tokens = sessions + 1, tokens + request.prompt_tokens
        return self.fill * fleet.pool_tokens - self.spare_contexts * fleet.instances * tokens / max(1, sessions)
