"""``RoutingSession``: the one routing step, used by the live router and by the offline simulation.

It joins the fleet's state, the policy, the planner and the class thresholds, and takes the time as an argument, so the
proxy on the wall clock and a simulation in virtual time decide, count and learn alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from policies.admission.base import MAX_HOLD_S, NO_INSTANCES, AdmissionRule, Admit
from policies.admission.gate import AdmissionGate
from policies.admission.line import Held
from policies.admission.never_hold import NeverHold
from policies.admission.room import ONE_PART, Parts
from policies.classes import ClassThresholds
from policies.costs.evictions import recomputed_s
from policies.decide import decide
from policies.offload.base import OffloadPlanner
from policies.replicas.parts import LEAST_INSTANCES
from policies.routing.base import RoutingPolicy
from policies.snapshot import FleetSnapshot
from policies.state import Commitment, FleetState
from policies.types import Decision, InstanceView, RequestView

CACHED_SHARE = 0.5
"""Share of a prompt that an instance must have cached to be chosen for it although its pool has no room."""

LONE_HOLDERS = 2
"""Most instances that hold a prefix which only its own session has: where it ran, and where it ran before."""


class Routed(NamedTuple):
    """A decision that has been counted."""

    decision: Decision
    commitment: Commitment
    prefill_view: InstanceView | None
    """P's view at the decision if the prefill is offloaded."""


def with_room(request: RequestView, fleet: FleetSnapshot, room_on: frozenset[str]) -> FleetSnapshot:
    """The fleet less instances without room, unless they have most of the prompt cached; all if none is left."""
    enough = CACHED_SHARE * request.prompt_tokens
    views = tuple([view for view in fleet.instances if view.instance in room_on or view.cached_tokens >= enough])
    return _among(views, fleet) if views else fleet


def with_part(fleet: FleetSnapshot, part: frozenset[str]) -> FleetSnapshot:
    """The fleet less instances outside the part, except those that alone have more of the prompt cached.

    If more than ``LONE_HOLDERS`` instances outside have more of it than the best one inside, its beginning is one that
    many sessions share; then only the session's own instance remains. All of the fleet if fewer than
    ``LEAST_INSTANCES`` of the part are candidates: others are down, or serve another model.
    """
    own = [view.cached_tokens for view in fleet.instances if view.instance in part]
    if len(own) < LEAST_INSTANCES:
        return fleet
    most = max(own)
    longer = [view.instance for view in fleet.instances if view.cached_tokens > most and view.instance not in part]
    if len(longer) > LONE_HOLDERS:
        longer = [name for name in longer if name == fleet.pinned]
    kept = tuple([view for view in fleet.instances if view.instance in part or view.instance in longer])
    return _among(kept, fleet)


def _among(kept: tuple[InstanceView, ...], fleet: FleetSnapshot) -> FleetSnapshot:
    """The fleet with these candidates only; the others may not prefill either, and those that only prefill stay."""
    if not fleet.prefill_instances:
        return fleet._replace(instances=kept)
    left_out = {view.instance for view in fleet.instances} - {view.instance for view in kept}
    senders = tuple([view for view in fleet.prefill_instances if view.instance not in left_out])
    return fleet._replace(instances=kept, prefill_instances=senders)


class LegTime(NamedTuple):
    """Predicted and actual time of a leg, in seconds."""

    predicted_s: float
    actual_s: float


class RoutingSession:
    """Decides, counts and learns for one fleet.

    Policy, planner, thresholds and ``hold_s`` may be replaced between two requests; index, sessions, ledger and learned
    times stay.

    Args:
        state: the fleet's mutable state; every instance is added to it by the caller.
        hold_s: seconds for which P keeps KV that D never pulled (the engines' abort timeout).
        guarded: a policy or planner that fails is replaced for that request, as ``decide`` describes; else it raises.
        admission: decides when a request is sent (``offer``); None: at once.
        max_hold_s: most seconds for which a request is held.
        explains_holds: as ``explains`` of the gate.
    """

    def __init__(
        self,
        state: FleetState,
        policy: RoutingPolicy,
        planner: OffloadPlanner,
        thresholds: ClassThresholds,
        hold_s: float = 480.0,
        *,
        guarded: bool = False,
        admission: AdmissionRule | None = None,
        max_hold_s: float = MAX_HOLD_S,
        explains_holds: bool = True,
    ) -> None:
        self.state = state
        self.policy = policy
        self.planner = planner
        self.thresholds = thresholds
        self.hold_s = hold_s
        self._guarded = guarded
        self.scored = True
        """Decisions of ``route`` have all candidates' scores; False: only where the policy needs them to choose."""
        self.gate = AdmissionGate(admission or NeverHold(), state.accounts, max_hold_s, explains=explains_holds)
        self.part = NO_INSTANCES
        """Instances on which this replica places new work (`policies.replicas.parts`); empty: all."""
        self.on_decided: Callable[[RequestView, FleetSnapshot, Decision], None] | None = None
        """Called with every decision and its snapshot after it was counted; None: by nobody."""

    def offer(
        self, request: RequestView, instances: Collection[str], now_s: float, parts: Parts = ONE_PART
    ) -> Admit | Held:
        """Decide whether a new request is routed now; a ``Held`` one waits until ``admitted`` returns it.

        Args:
            request: the request.
            instances: those that may decode, whatever the model.
            now_s: monotonic or virtual time.
            parts: those of the fleet that have no model in common.
        """
        gate = self.gate
        if gate.never_holds:
            return gate.sent_at_once
        return gate.offer(request, self.state.room(instances, parts), now_s)

    def admitted(
        self,
        instances: Collection[str],
        now_s: float,
        stuck: Collection[Held] = frozenset(),
        parts: Parts = ONE_PART,
    ) -> Held | None:
        """A held request that is to be routed now; call again until None, since each one that is routed takes room.

        Args:
            instances: as in ``offer``.
            now_s: as in ``offer``.
            stuck: requests that could not be routed now anyway.
            parts: as in ``offer``.
        """
        gate = self.gate
        return gate.examine(self.state.room(instances, parts), now_s, stuck) if gate else None

    def set_admission(self, rule: AdmissionRule, max_hold_s: float, now_s: float) -> None:
        """Another rule or bound, also for requests held now."""
        self.gate.set_rule(rule, max_hold_s, now_s)

    def route(
        self,
        request: RequestView,
        decoders: Collection[str],
        prefill_only: Collection[str],
        now_s: float,
        room_on: frozenset[str] = NO_INSTANCES,
    ) -> Routed:
        """Decide and count in one synchronous step: nothing may be awaited between snapshot and commit.

        Args:
            decoders: instances that may decode the request, and prefill it.
            prefill_only: instances that may prefill it for another one only.
            now_s: monotonic or virtual time.
            room_on: instances that the admission rule found room on (``Admit.instances``).

        Raises:
            NoCandidateError: ``decoders`` is empty.
        """
        fleet = self._snapshot(request, decoders, prefill_only, now_s)
        choice = self._choice(request, fleet, room_on)
        decision = decide(
            request,
            choice,
            self.policy,
            self.planner,
            self.thresholds,
            guarded=self._guarded,
            scored=self.scored,
        )
        slowdown: float = getattr(self.policy, "slowdown", 0.0)
        commitment = self.state.commit(request, fleet, decision, now_s, slowdown)
        if self.on_decided is not None:
            self.on_decided(request, choice, decision)
        prefill = fleet.prefill_view(decision.prefill_on) if decision.prefill_on is not None else None
        return Routed(decision, commitment, prefill)

    def explain(
        self,
        request: RequestView,
        policies: Mapping[str, RoutingPolicy],
        decoders: Collection[str],
        prefill_only: Collection[str],
        now_s: float,
        room_on: frozenset[str] = NO_INSTANCES,
    ) -> tuple[FleetSnapshot, dict[str, Decision]]:
        """The snapshot of the whole fleet, and the decisions of ``policies`` among what ``route`` would leave them.

        Nothing is counted. Raises NoCandidateError.
        """
        fleet = self._snapshot(request, decoders, prefill_only, now_s)
        choice = self._choice(request, fleet, room_on)
        return fleet, {
            name: decide(request, choice, policy, self.planner, self.thresholds, guarded=self._guarded)
            for name, policy in policies.items()
        }

    def _snapshot(
        self, request: RequestView, decoders: Collection[str], prefill_only: Collection[str], now_s: float
    ) -> FleetSnapshot:
        """The fleet, with what admission knows of others to whom a placement costs time."""
        fleet = self.state.snapshot(request, now_s, decoders, prefill_only)
        gate, accounts = self.gate, self.state.accounts
        if gate.never_holds or not fleet.instances:
            return fleet
        _, _, sessions, tokens = accounts.remote.beside(accounts.contexts())
        evicted_s: dict[str, float] = {}
        if tokens and accounts.prefill is not None:
            share, each = accounts.gaps.return_share, tokens / sessions
            evicted = accounts.homes.evicted(request, fleet.instances, *accounts.kept_at(request.context_id))
            evicted_s = {name: share * recomputed_s(lost, each, accounts.prefill) for name, lost in evicted.items()}
        held = gate.held_beside(request)
        return fleet._replace(held=held / len(fleet.instances), evicted_s=evicted_s) if held or evicted_s else fleet

    def _choice(self, request: RequestView, fleet: FleetSnapshot, room_on: frozenset[str]) -> FleetSnapshot:
        """The candidates that the policy chooses among."""
        choice = with_room(request, fleet, room_on) if room_on else fleet
        return with_part(choice, self.part) if self.part else choice

    def began(self, commitment: Commitment, now_s: float, *, streamed: bool = True) -> None:
        """The first bytes of an answer have come from D: its first token if it is ``streamed``, else perhaps all of it.

        Steps are watched by first tokens, and only where no other replica sends prefills too.
        """
        state, job, lease = self.state, commitment.workload.decode, commitment.decode
        lease.first_token()
        if streamed and lease.instance not in state.ledger.remote and commitment.decode_known:
            if lease.new_tokens:
                state.costs.ran_beside(job, now_s)
            commitment.stream = state.costs.watch.began(lease.instance, now_s)

    def answered(self, commitment: Commitment, tokens: int | None, now_s: float) -> None:
        """The last of ``tokens`` tokens of a stream has come from D; None: their number is not known."""
        if commitment.stream is not None and tokens is not None:
            self.state.costs.answered(commitment.stream, tokens, now_s)

    def prefilled(self, commitment: Commitment, seconds: float) -> LegTime:
        """Learn from D's first token of a request that ran co-located."""
        ordered = commitment.decode.due_s is not None
        if commitment.prefill is None:
            commitment.first_token_s = seconds
        return LegTime(self.state.costs.prefilled(commitment.workload.decode, seconds, ordered=ordered), seconds)

    def compare(self, commitment: Commitment, prompt_tokens: int, cached_tokens: int, now_s: float) -> None:
        """Learn how slow D is from an answer that has ended; the counts are those that it reported."""
        seconds = commitment.first_token_s
        if seconds is not None and commitment.decode_unchanged:
            self.state.costs.compare(commitment.workload.decode, prompt_tokens, cached_tokens, seconds, now_s)

    def prefilled_on_p(self, commitment: Commitment, seconds: float, now_s: float) -> LegTime:
        """Learn from a P leg that succeeded; its KV is held for D from now on."""
        commitment.end_prefill()
        job, lease = commitment.workload.prefill, commitment.prefill
        assert job is not None
        assert lease is not None
        if commitment.prefill_known:
            self.state.costs.ran_beside(job, now_s)
        return LegTime(self.state.costs.prefilled(job, seconds, ordered=lease.due_s is not None), seconds)

    def handed_over(self, commitment: Commitment, seconds: float, now_s: float) -> LegTime:
        """Learn from a D leg whose first token came after ``seconds``: the hand-off succeeded.

        Nothing is learned when P or D has left the fleet meanwhile: the pair does not exist any more.
        """
        commitment.handed_over()
        job = commitment.workload.transfer
        assert job is not None
        if not commitment.pair_known:
            return LegTime(self.state.costs.transfer.predict(job, now_s).seconds, seconds)
        self.state.pairs.record(job.pair, True, now_s)
        return LegTime(self.state.costs.transferred(commitment.workload, seconds, now_s), seconds)

    def handed_over_unseen(self, commitment: Commitment, now_s: float) -> None:
        """Count a hand-off that succeeded but whose first token, and so its time, was not observed."""
        commitment.handed_over()
        job = commitment.workload.transfer
        assert job is not None
        if commitment.pair_known:
            self.state.pairs.record(job.pair, True, now_s)
            self.state.costs.handed_over(job)

    def fell_back(self, commitment: Commitment, now_s: float, *, refused: bool = False) -> None:
        """Count a failed hand-off: D prefills after all, and the pair's breaker and failure rate are updated.

        ``refused``: an engine refused the request, maybe rightly. The pair has failed only if D then answers it
        (``pair_failed``).
        """
        commitment.fall_back(now_s + self.hold_s)
        if not refused:
            self.pair_failed(commitment, now_s)

    def pair_failed(self, commitment: Commitment, now_s: float) -> None:
        """Count a failure of the pair that a request was to be handed over by."""
        job = commitment.workload.transfer
        assert job is not None
        if commitment.pair_known:
            self.state.pairs.record(job.pair, False, now_s)
            self.state.costs.fell_back(job)
