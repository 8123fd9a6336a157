"""Working set: a session waits while no instance's KV pool can hold its context beside those in use there."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple

from policies.admission.base import NO_INSTANCES, AdmissionReason, AdmissionView, Admit, Hold, SessionView
from policies.costs.evictions import recomputed_s
from policies.routing.base import require
from policies.types import RequestView


class _Room(NamedTuple):
    instances: list[str]
    """Those that have room."""
    evicting_none: list[str]
    """Those whose pool holds it beside all contexts in use, to the last token."""
    beside_active: bool
    """True if one has room beside its contexts in flight, those of kept sessions not counted."""
    kept_tokens: int
    """Contexts of kept sessions, as far as they count."""
    free_tokens: float
    """Most room of an instance."""


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Holds a request of a session that is not in flight while both of these are true:

    - *No room*: on every instance, the contexts in flight, those of kept sessions and this prompt exceed ``fill`` of
      the KV pool, less ``spare_contexts`` contexts of the fleet's average size: a pool holds whole contexts only, and
      those in it grow. Kept contexts count up to ``kept_share`` of the pool, times the share of turns that another one
      follows: those of agents that return are protected, those of chats that do not take no room. An instance whose
      contexts are all idle and not worth protecting has room for a prompt of any length.
    - *Busy*: at least ``least_prefilling`` requests per instance wait for their first token, or every instance has a
      session in flight. Otherwise an engine would idle. It is left idle if a kept session is expected back there
      before as much time has passed as computing again would take what this prompt evicts: ``return_gap_s / 2``, as
      gaps have begun, over the kept sessions that return.

    While others are held, or recomputing evicted prefixes took over ``lost_share`` of the fleet's time of the last half
    minute (`policies.admission.accounts`), and in any case over ``packing_share`` of it, a session that has room is
    sent to one of the instances that have it: two that fit the pools in sum would evict each other on one instance
    while another has room. Where contexts cost little to compute, the routing policy's other reasons weigh more. A kept
    session's turn needs room beside the contexts in flight only, and leaves its cached context only for an instance
    that evicts nothing in use. A session is kept until nearly all that return have done so, at most ``keep_s``
    (`policies.admission.return_gaps`), unless the prefix index says that its context was evicted: then its next turn
    costs as much as a new session's. Complexity: O(instances), O(1) for a session in flight.
    """

    keep_s: float = 30.0
    fill: float = 0.95
    spare_contexts: float = 0.75
    kept_share: float = 0.5
    least_prefilling: float = 0.1
    lost_share: float = 0.3
    packing_share: float = 0.05
    name: ClassVar[str] = "working_set"

    def __post_init__(self) -> None:
        require(self.keep_s >= 0, "working_set: keep_s must not be negative")
        require(self.fill > 0, "working_set: fill must be above 0")
        require(self.spare_contexts >= 0, "working_set: spare_contexts must not be negative")
        require(0 <= self.kept_share <= 1, "working_set: kept_share must be within 0..1")
        require(self.least_prefilling >= 0, "working_set: least_prefilling must not be negative")
        require(0 <= self.lost_share <= 1, "working_set: lost_share must be within 0..1")
        require(0 <= self.packing_share <= 1, "working_set: packing_share must be within 0..1")

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        if session.in_flight:
            return Admit(AdmissionReason.RESIDENT)
        if not fleet.pool_tokens:
            return Admit(AdmissionReason.RESIDENT if session.kept else AdmissionReason.POOLS_UNKNOWN)
        past_cliff = fleet.held or session.waited_s or fleet.lost_share > self.lost_share
        packs = bool(past_cliff) and fleet.lost_share > self.packing_share
        room = self._room(request, session, fleet, packs)
        if session.kept and room.beside_active:
            return Admit(AdmissionReason.RESIDENT, frozenset(room.evicting_none) if packs else NO_INSTANCES)
        if room.instances:
            return Admit(AdmissionReason.ROOM, frozenset(room.instances) if packs else NO_INSTANCES)
        if self._idle(fleet) and not self._returns_soon(request, fleet):
            return Admit(AdmissionReason.IDLE_FLEET)
        used_tokens = fleet.active_tokens + request.prompt_tokens + room.kept_tokens
        return Hold(
            AdmissionReason.WORKING_SET,
            used_tokens,
            fleet.pool_tokens,
            own_tokens=request.prompt_tokens,
            free_tokens=max(0, int(room.free_tokens)),
        )

    def longest_sent(self, fleet: AdmissionView, kept: bool) -> float:
        """As `policies.admission.selection.SelectiveRule`. O(instances)."""
        if not fleet.pool_tokens or self._idle(fleet):
            return inf
        sessions, tokens = fleet.active_sessions + fleet.kept_sessions, fleet.active_tokens + fleet.kept_tokens
        kept_share = 0.0 if kept else self.kept_share * fleet.return_share
        most = -inf
        for _, pool, active_sessions, active, _, kept_tokens, _ in fleet.by_instance:
            protected = min(kept_tokens, int(kept_share * pool))
            if not (active_sessions or protected):
                return inf
            most = max(most, self.fill * pool - active - protected)
        # A new session's prompt is part of the average context, too; one token more than it comes to, for rounding.
        share = self.spare_contexts / (sessions if kept else sessions + 1)
        return (most - share * tokens) / (1.0 if kept else 1.0 + share) + 1.0

    def _idle(self, fleet: AdmissionView) -> bool:
        """True if an engine has nothing to do, or none has anything in use. O(instances)."""
        if fleet.prefilling < self.least_prefilling * fleet.instances:
            return any(not each.active_sessions for each in fleet.by_instance)
        return not fleet.active_sessions and not fleet.kept_sessions

    def _returns_soon(self, request: RequestView, fleet: AdmissionView) -> bool:
        """True if on every idle engine time is worth less than what this prompt would evict. O(instances)."""
        sessions, tokens = fleet.active_sessions + fleet.kept_sessions, fleet.active_tokens + fleet.kept_tokens
        if fleet.prefill is None or not sessions:
            return False
        for use in fleet.by_instance:
            if use.active_sessions:
                continue
            returning = fleet.return_share * use.kept_sessions
            evicted = min(use.kept_tokens, request.prompt_tokens + use.kept_tokens - self.fill * use.pool_tokens)
            lost_s = fleet.return_share * recomputed_s(evicted, tokens / sessions, fleet.prefill)
            if fleet.return_gap_s / 2 >= lost_s * returning:
                return False
        return True

    def _room(self, request: RequestView, session: SessionView, fleet: AdmissionView, packs: bool) -> _Room:
        """Room of the instances; up to the first that has some, unless it ``packs``: then all are needed."""
        own = request.prompt_tokens
        sessions, tokens = fleet.active_sessions + fleet.kept_sessions, fleet.active_tokens + fleet.kept_tokens
        if not session.kept:
            sessions, tokens = sessions + 1, tokens + own
        spare = self.spare_contexts * tokens / max(1, sessions)
        kept_share = 0.0 if session.kept else self.kept_share * fleet.return_share
        instances: list[str] = []
        evicting_none: list[str] = []
        beside_active, all_kept, best = False, 0, 0.0
        # A loop with few calls: it runs for every request.
        fill = self.fill
        for name, pool, active_sessions, active, _, kept_tokens, _ in fleet.by_instance:
            most = int(kept_share * pool)
            kept = kept_tokens if kept_tokens < most else most
            filled = fill * pool
            free = filled - spare - active
            beside_active = beside_active or own <= free or not active_sessions
            all_kept += kept
            if own <= free - kept or not (active_sessions or kept):
                instances.append(name)
                if not packs:
                    break
            if own + active + kept_tokens <= filled:
                evicting_none.append(name)
            best = max(best, free - kept)
        return _Room(instances, evicting_none, beside_active, all_kept, best)
