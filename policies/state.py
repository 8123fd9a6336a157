"""Fleet state for routing: index, ledger, sessions and hotspots behind one interface.

``snapshot`` reads, ``commit`` counts; both are synchronous and receive the time as an argument, so the proxy in real
time and a simulation in virtual time run the same code. Switching the policy leaves the state unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf

from policies.admission.accounts import TURNS_PER_INSTANCE, SessionAccounts
from policies.admission.residency import Residency
from policies.admission.room import ONE_PART, Parts, Room
from policies.admission.turns import Turn
from policies.costs.book import CostBook, Workload
from policies.costs.order import PrefillOrder
from policies.costs.step_watch import WatchedStream
from policies.holds import Holds, KvHold
from policies.hotspots import HotspotTracker, is_hotspot
from policies.ledger import Lease, Ledger
from policies.offload.designation import designate
from policies.offload.specialists import Specialists
from policies.pairs import PairBreaker
from policies.predict.predictor import Predictor, Promised
from policies.predict.prefix_index import Insertion, PrefixIndex
from policies.replicas.shared_sessions import SharedSessions
from policies.sessions import SessionTable
from policies.snapshot import FleetSnapshot
from policies.types import Connector, Decision, RequestView, Role, Transport
from policies.views import KnownInstance, Viewer


class Commitment:
    """Resources reserved by one decision: a lease per leg, an offload slot, and index entries that can be retracted."""

    __slots__ = (
        "_added",
        "_hold",
        "_in_flight",
        "_lives",
        "_not_yet_on_decode",
        "_promised",
        "_released",
        "_restarts",
        "_state",
        "_turn",
        "decode",
        "first_token_s",
        "prefill",
        "stream",
        "workload",
    )

    def __init__(
        self,
        state: FleetState,
        decode: Lease,
        prefill: Lease | None,
        added: dict[str, Insertion],
        not_yet_on_decode: int,
        workload: Workload,
        promised: Promised,
        turn: Turn,
    ) -> None:
        self._state = state
        self._turn, self._released = turn, False
        self._promised = promised
        self._added = added
        self._not_yet_on_decode = not_yet_on_decode
        self._hold: KvHold | None = None
        self._in_flight = prefill is not None
        known = state._instances
        self._lives = (known[decode.instance], None if prefill is None else known[prefill.instance])
        self._restarts = known[decode.instance].restarts
        self.decode = decode
        self.prefill = prefill
        self.workload = workload
        """Work of D and P, for the cost models."""
        self.stream: WatchedStream | None = None
        """Its answer, while D streams it."""
        self.first_token_s: float | None = None
        """Seconds to D's first token, if it was to prefill it from the beginning."""

    @property
    def decode_known(self) -> bool:
        """True if D is still in the fleet: neither removed nor replaced by another engine of its name."""
        return self._state._instances.get(self.decode.instance) is self._lives[0]

    @property
    def decode_unchanged(self) -> bool:
        """True if D is still in the fleet and has not restarted since."""
        return self.decode_known and self._lives[0].restarts == self._restarts

    @property
    def prefill_known(self) -> bool:
        """True if P is still in the fleet; False without a P."""
        return self.prefill is not None and self._state._instances.get(self.prefill.instance) is self._lives[1]

    @property
    def pair_known(self) -> bool:
        """True if both ends are still in the fleet, so the hand-off's times may be learned."""
        return self.decode_known and self.prefill_known

    def end_prefill(self) -> None:
        """The P leg has finished and its KV waits for D: release P's lease, count the hold. Later calls do nothing."""
        if self.prefill is not None and self.prefill.release():
            self._promised.kept(self.prefill.instance)
            if self.prefill_known:
                self._hold = self._state.holds.take(self.prefill.instance, self.prefill.context_tokens)

    def hold_on_decode(self) -> KvHold:
        """Count the room on D of an abandoned pull until it ends; the caller releases the hold."""
        tokens, holds = self.decode.context_tokens, self._state.holds
        return holds.take(self.decode.instance, tokens) if self.decode_known else holds.untracked(tokens)

    def handed_over(self) -> None:
        """D has answered its first token, so it has the KV: the offload has ended. Later calls do nothing."""
        if self._hold is not None:
            self._hold.release()
        self._end_offload()

    def fall_back(self, orphaned_until_s: float = 0.0) -> None:
        """The offload failed: end it and count the prefill on D instead. Later calls do nothing.

        KV that P holds for it stays counted there until ``orphaned_until_s``.
        """
        if self._hold is not None:
            self._hold.orphan(orphaned_until_s)
        self._end_offload()
        _, new_tokens, cached_tokens, *_ = self.workload.decode
        seconds = self._state.costs.prefill.seconds(new_tokens, cached_tokens)
        self.decode.add_prefill(self._not_yet_on_decode, seconds)
        self._not_yet_on_decode = 0

    def retract(self, instance: str) -> None:
        """Remove the blocks that were added for an instance that never computed them."""
        self._promised.broken(instance)
        insertion = self._added.pop(instance, None)
        if insertion is not None:
            self._state.index.retract(insertion)

    def release(self, now_s: float | None = None, hold_s: float = 0.0, cached_tokens: int | None = None) -> None:
        """Release everything still held; an unpulled hold stays for ``hold_s``. Later calls do nothing.

        ``now_s``: the time; None: that of the last decision. ``cached_tokens``: as reported by the engine.
        """
        if not self._released:
            self._released = True
            state = self._state
            state.accounts.ended(self._turn, now_s, cached_tokens, state.costs.prefill)
        if self._hold is not None:
            self._hold.orphan((now_s or 0.0) + hold_s)
        if self.stream is not None:
            self._state.costs.watch.ended(self.stream, now_s)
            self.stream = None
        self._end_offload()
        self.decode.release()
        self._promised.kept()

    def _end_offload(self) -> None:
        if self.prefill is not None:
            self.prefill.release()
        if self._in_flight:
            self._in_flight = False
            self._state.offloads_in_flight -= 1


class FleetState:
    """Index, ledger, sessions and hotspots of one fleet."""

    def __init__(
        self,
        index: PrefixIndex | None = None,
        ledger: Ledger | None = None,
        sessions: SessionTable | None = None,
        hotspots: HotspotTracker | None = None,
        seed: int = 0,
        costs: CostBook | None = None,
    ) -> None:
        """``seed`` is that of the requests' block hashes (`policies.predict.blocks`)."""
        self.index = PrefixIndex() if index is None else index
        self.predictor = Predictor(self.index, seed)
        self.ledger = Ledger() if ledger is None else ledger
        self.sessions = SessionTable() if sessions is None else sessions  # an empty table is falsy
        self.hotspots = HotspotTracker() if hotspots is None else hotspots
        self.pairs = PairBreaker()
        self.holds = Holds()
        self.costs = CostBook() if costs is None else costs
        self.accounts = SessionAccounts(residency=Residency(self.predictor, self.sessions))
        self.specialists = Specialists()
        self.shared: SharedSessions | None = None
        """Sessions that other replicas serve too; None: there are none."""
        self.offloads_in_flight = 0
        self.producers: set[str] = set()
        """Instances that only prefill for others."""
        self._instances: dict[str, KnownInstance] = {}
        self._sequence = 0

    @property
    def instances(self) -> list[str]:
        """Names of all registered instances, in the order they were added."""
        return list(self._instances)

    def add_instance(
        self,
        instance: str,
        role: Role = Role.NONE,
        host: str = "",
        transport: Transport | None = None,
        connector: Connector = Connector.MOONCAKE,
        *,
        ordered: bool = False,
    ) -> None:
        """Register an instance, or update these properties of a known one. Idempotent (`KnownInstance`)."""
        (self.producers.add if role is Role.KV_PRODUCER else self.producers.discard)(instance)
        if known := self._instances.get(instance):
            known.role, known.host, known.transport, known.connector = role, host, transport, connector
            known.ordered = ordered
            return
        self._instances[instance] = KnownInstance(role, host, transport, connector, ordered=ordered)
        self.accounts.add_instance(instance)
        self.index.add_instance(instance)
        self.predictor.add_instance(instance)

    def remove_instance(self, instance: str) -> Callable[[], int]:
        """Remove an instance: blocks, pins and learned values. Its leases stay in the totals until released.

        Returns a function that reads the number of its unreleased leases.
        """
        self._instances.pop(instance, None)
        self.producers.discard(instance)
        self.accounts.remove_instance(instance)
        self.index.remove_instance(instance)
        self.predictor.remove_instance(instance)
        self.sessions.remove_instance(instance)
        if self.shared is not None:
            self.shared.forget(instance)
        self.holds.forget(instance)
        self.pairs.forget(instance)
        self.costs.forget(instance)
        self.specialists.forget(instance)
        return self.ledger.remove_instance(instance)

    def restarted(self, instance: str) -> None:
        """Drop blocks, pins and recent load of an instance that restarted with an empty cache."""
        self.index.clear_instance(instance)
        self.predictor.restarted(instance)
        self.accounts.restarted(instance)
        self.sessions.remove_instance(instance)
        if self.shared is not None:
            self.shared.forget(instance)
        self.ledger.forget_recent(instance)
        self.holds.forget(instance)
        self.specialists.restarted(instance)
        self.costs.restarted(instance)
        if known := self._instances.get(instance):
            known.restarts += 1

    def set_capacity(self, instance: str, kv_capacity_tokens: int, block_tokens: float) -> None:
        """Set the engine's KV pool in tokens, which bounds its shadow index."""
        known = self._instances[instance]
        known.kv_capacity_tokens = kv_capacity_tokens
        if kv_capacity_tokens and block_tokens:
            self.index.add_instance(instance, max(1, int(kv_capacity_tokens / block_tokens)), block_tokens)

    def set_usage(self, instance: str, kv_used_tokens: int) -> None:
        """Set the KV in use as the engine reported it, in tokens."""
        known = self._instances[instance]
        known.kv_used_tokens = kv_used_tokens
        known.promised_at_report_tokens = self.ledger.promised_tokens(instance)

    def expected_tokens(self, instance: str, now_s: float) -> int:
        """KV in tokens that requests in flight and holds account for; an engine reporting more has a leak."""
        return self.ledger.promised_tokens(instance) + self.holds.tokens(instance, now_s)

    def pool_tokens(self, instances: Collection[str]) -> int:
        """Sum of the KV pools of ``instances`` in tokens; 0 if that of one is unknown."""
        return self.room(instances, ONE_PART).pool_tokens

    def room(self, instances: Collection[str], parts: Parts) -> Room:
        """Pools and prefills of ``instances``; ``parts``: those of the fleet that have no model in common."""
        account_of, unused, remote = self.ledger.accounts.get, self.ledger.unused, self.ledger.remote
        each, pools, smallest, prefilling = [], 0, inf, 0
        # One loop, because it runs for every request.
        for name, known in self._instances.items():
            if name in instances:
                pool, own = known.kv_capacity_tokens, account_of(name, unused).prefilling
                if remote and name in remote:
                    own += remote[name].prefilling
                each.append((name, pool, own))
                pools += pool
                prefilling += own
                smallest = min(smallest, pool)
        return Room(pools if smallest else 0, len(each), prefilling, tuple(each), parts=parts)

    def snapshot(
        self, request: RequestView, now_s: float, eligible: Collection[str], prefill_only: Collection[str] = ()
    ) -> FleetSnapshot:
        """Fleet snapshot for one request: ``eligible`` instances may decode, ``prefill_only`` ones only prefill."""
        context_id = request.context_id
        if self.shared is not None and context_id:
            self._learn_context(request, self.shared)
        matched = self.predictor.match(request, now_s)
        class_blocks = min(self.hotspots.class_blocks, len(request.block_hashes))
        viewer = Viewer(request, matched, class_blocks, self.ledger, self.sessions.counts, self.holds, now_s)
        views = tuple(viewer.views(self._instances, eligible))
        return FleetSnapshot(
            instances=views,
            sequence=self._sequence,
            pinned=self.sessions.instance_of(context_id, now_s) if context_id else None,
            hotspot=self.hotspots.view(request.block_hashes),
            offloads_in_flight=self.offloads_in_flight,
            broken_pairs=self.pairs.broken(now_s),
            costs=self.costs.at(now_s, eligible, prefill_only),
            prefill_instances=(*views, *viewer.views(self._instances, prefill_only)) if prefill_only else (),
            specialists=self.specialists.stretches(now_s),
            contexts=self.specialists.contexts_without(context_id or request.request_id),
        )

    def commit(
        self, request: RequestView, fleet: FleetSnapshot, decision: Decision, now_s: float, slowdown: float = 0.0
    ) -> Commitment:
        """Count the decision: leases, index entries, session pin, hotspot streak. No await after the snapshot.

        ``slowdown``: that of the order of prefills (`policies.costs.order`); 0: none.
        """
        self._sequence += 1
        holders = sum([view.holds_class for view in fleet.instances])
        chosen = fleet.view(decision.decode_on)
        assert chosen is not None
        self.hotspots.record(
            request.block_hashes,
            to_holder=chosen.holds_class,
            alarmed=is_hotspot(fleet.hotspot.share, holders, len(fleet.instances) - holders),
        )
        if context_id := request.context_id:
            self.sessions.pin(context_id, decision.decode_on, now_s)
            if self.shared is not None:
                self.shared.ran(context_id, decision.decode_on, request.prompt_tokens, now_s)
        prefill_lease, prefill = None, None
        added: dict[str, Insertion] = {}
        promised = self.predictor.promised()
        order, known = PrefillOrder(self.costs.prefill, now_s, slowdown, request.has_priority), self._instances
        new_tokens = new_on_decode = decision.new_tokens
        if decision.prefill_on is not None:
            prefill = fleet.prefill_view(decision.prefill_on)
            assert prefill is not None
            new_on_prefill = request.prompt_tokens - prefill.cached_tokens
            queued = order.queued(new_on_prefill, prefill.cached_tokens, ordered=known[prefill.instance].ordered)
            prefill_lease = self.ledger.acquire(prefill.instance, new_on_prefill, request.prompt_tokens, now_s, queued)
            added[prefill.instance] = self.index.insert(prefill.instance, request.block_hashes, request.block_tokens)
            promised.add(prefill.instance, request)
            self.offloads_in_flight += 1
            new_on_decode = 0
        queued = order.queued(new_on_decode, decision.cached_tokens, ordered=known[decision.decode_on].ordered)
        decode_lease = self.ledger.acquire(decision.decode_on, new_on_decode, request.prompt_tokens, now_s, queued)
        added[decision.decode_on] = self.index.insert(decision.decode_on, request.block_hashes, request.block_tokens)
        promised.add(decision.decode_on, request)
        workload = Workload.of(request, chosen, prefill, self.offloads_in_flight, self.costs.bytes_per_token)
        not_yet_on_decode = new_tokens - new_on_decode
        on, cached = (prefill or chosen)[:2]
        elsewhere = fleet.cached_elsewhere(on) if request.session_id else 0
        turn = self.accounts.sent(request, decision.decode_on, cached, self.costs.prefill, now_s, elsewhere)
        in_use, costs, memory = self.accounts.in_use, self.costs, TURNS_PER_INSTANCE * self.accounts.instances
        designate(self.specialists, in_use, costs, request, fleet, decision, cached, now_s, memory)
        return Commitment(self, decode_lease, prefill_lease, added, not_yet_on_decode, workload, promised, turn)

    def share(self, shared: SharedSessions, turn: int = 0) -> None:
        """Share sessions with other replicas from now on.

        Args:
            shared: the sessions.
            turn: random number of this replica; replicas that all began with turn 0 would send their n-th requests, and
                all requests for which instances are equal, to the same instance at the same time.
        """
        self.shared = self.accounts.shared = shared
        self._sequence += turn

    def pinned_elsewhere(self, context_id: str, instance: str, context_tokens: int, at_s: float) -> None:
        """Another replica sent a request of a context to an instance; the latest such news counts, own ones included.

        Args:
            context_tokens: length of its prompt.
            at_s: time of its decision.
        """
        assert self.shared is not None
        if instance in self._instances and self.shared.ran_elsewhere(context_id, instance, context_tokens, at_s):
            self.sessions.pin(context_id, instance, at_s)
            self.accounts.ran_elsewhere(context_id)

    def _learn_context(self, request: RequestView, shared: SharedSessions) -> None:
        """Take what another replica sent of this session as cached there: its turns continue each other."""
        context = shared.unlearned(request.context_id or "")
        if context is not None and request.block_tokens:
            blocks = request.block_hashes[: int(context.tokens // request.block_tokens)]
            if blocks:
                self.index.insert(context.instance, blocks, request.block_tokens)
