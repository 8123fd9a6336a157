"""FleetState under any interleaving of request and instance events."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from policies.classes import ClassThresholds
from policies.decide import decide
from policies.hotspots import HotspotTracker
from policies.ledger import Phase
from policies.offload.threshold import Threshold
from policies.predict.prefix_index import PrefixIndex
from policies.registry import make_routing, routing_policies
from policies.sessions import SessionTable
from policies.state import Commitment, FleetState
from policies.types import Role
from tests.policies.builders import ask_ids

NAMES = [f"inst-{i}" for i in range(4)]
THRESHOLDS = ClassThresholds(32, 64)
PLANNER = Threshold(max_in_flight=2, min_decode_requests=0)
CAPACITY_BLOCKS = 30
POLICIES = {name: make_routing(name) for name in routing_policies()}


class FleetStateMachine(RuleBasedStateMachine):
    commitments = Bundle("commitments")

    @initialize()
    def start(self) -> None:
        self.state = FleetState(PrefixIndex(CAPACITY_BLOCKS), None, SessionTable(3, 50.0), HotspotTracker(2, 10))
        self.now_s = 0.0
        self.open: list[Commitment] = []
        for name in NAMES[:2]:
            self.state.add_instance(name, Role.KV_BOTH)

    @rule(
        target=commitments,
        policy=st.sampled_from(sorted(POLICIES)),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        session_id=st.sampled_from([None, "s1", "s2", "s3", "s4", "s5"]),
        step_s=st.sampled_from([0.0, 0.0, 1.0, 30.0]),
    )
    def decide_and_commit(self, policy: str, prompt: list[int], session_id: str | None, step_s: float) -> Commitment:
        if not self.state.instances:
            self.state.add_instance(NAMES[0], Role.KV_BOTH)
        self.now_s += step_s
        request = ask_ids([half for half in prompt for _ in range(16)], session_id=session_id)
        fleet = self.state.snapshot(request, self.now_s, self.state.instances)
        decision = decide(request, fleet, POLICIES[policy], PLANNER, THRESHOLDS)
        before, offloads = self.state.ledger.totals(), self.state.offloads_in_flight
        commitment = self.state.commit(request, fleet, decision, self.now_s)
        after = self.state.ledger.totals()
        legs = 1 if decision.prefill_on is None else 2
        assert decision.prefill_on != decision.decode_on
        assert after["requests"] == before["requests"] + legs
        assert after["promised_tokens"] == before["promised_tokens"] + legs * request.prompt_tokens
        assert self.state.offloads_in_flight == offloads + legs - 1 <= PLANNER.max_in_flight
        again = self.state.snapshot(request, self.now_s, self.state.instances)
        assert sum(view.requests for view in again.instances) == sum(v.requests for v in fleet.instances) + legs
        assert again.sequence == fleet.sequence + 1
        self.open.append(commitment)
        return commitment

    @rule(commitment=commitments)
    def first_token(self, commitment: Commitment) -> None:
        commitment.decode.first_token()

    @rule(commitment=commitments)
    def end_prefill(self, commitment: Commitment) -> None:
        commitment.end_prefill()

    @rule(commitment=commitments)
    def handed_over(self, commitment: Commitment) -> None:
        commitment.handed_over()

    @rule(commitment=commitments, hold_s=st.sampled_from([0.0, 20.0]))
    def fall_back(self, commitment: Commitment, hold_s: float) -> None:
        commitment.fall_back(self.now_s + hold_s)

    @rule(commitment=commitments, name=st.sampled_from(NAMES))
    def retract(self, commitment: Commitment, name: str) -> None:
        commitment.retract(name)

    @rule(commitment=commitments, hold_s=st.sampled_from([0.0, 20.0]))
    def release(self, commitment: Commitment, hold_s: float) -> None:
        commitment.release(self.now_s + hold_s)
        assert commitment.decode.phase is Phase.RELEASED

    @rule(commitment=consumes(commitments))
    def release_twice(self, commitment: Commitment) -> None:
        commitment.release()
        totals, offloads = self.state.ledger.totals(), self.state.offloads_in_flight
        commitment.release()
        assert (self.state.ledger.totals(), self.state.offloads_in_flight) == (totals, offloads)

    @rule(name=st.sampled_from(NAMES), role=st.sampled_from(Role))
    def add_instance(self, name: str, role: Role) -> None:
        self.state.add_instance(name, role)

    @rule(name=st.sampled_from(NAMES))
    def remove_instance(self, name: str) -> None:
        self.state.remove_instance(name)

    @rule(name=st.sampled_from(NAMES), used=st.integers(0, 400))
    def restart_or_report(self, name: str, used: int) -> None:
        if name in self.state.instances:
            if used == 0:
                self.state.restarted(name)
                assert self.state.index.blocks(name) == 0
            self.state.set_usage(name, used)

    @invariant()
    def nothing_is_ever_negative_or_over_its_bound(self) -> None:
        assert all(value >= 0 for value in self.state.ledger.totals().values())
        assert self.state.holds.total() >= 0
        assert self.state.offloads_in_flight >= 0
        assert len(self.state.sessions) <= 3
        fleet = self.state.snapshot(ask_ids([0] * 40), self.now_s, self.state.instances)
        for view in fleet.instances:
            assert self.state.index.blocks(view.instance) <= CAPACITY_BLOCKS
            assert 0 <= view.prefilling <= view.requests
            taken = view.kv_used_tokens + view.kv_promised_tokens
            numbers = (view.requests, view.pending_prefill_tokens, view.decoding_tokens, taken)
            assert min(*numbers, view.recent_tokens, view.cached_tokens, view.sessions) >= 0

    @invariant()
    def the_totals_are_the_sum_of_the_open_leases(self) -> None:
        leases = [leg for c in self.open for leg in (c.decode, c.prefill) if leg and leg.phase is not Phase.RELEASED]
        totals = self.state.ledger.totals()
        assert totals["requests"] == len(leases)
        assert totals["prefilling"] == sum(leg.phase is Phase.PREFILL for leg in leases)
        assert totals["promised_tokens"] == sum(leg.context_tokens for leg in leases)
        assert totals["decoding_tokens"] == sum(leg.context_tokens for leg in leases if leg.phase is Phase.DECODE)
        assert totals["pending_prefill_tokens"] == sum(leg.new_tokens for leg in leases if leg.phase is Phase.PREFILL)

    def teardown(self) -> None:
        for commitment in self.open:
            commitment.release()
        assert not any(self.state.ledger.totals().values())
        assert self.state.offloads_in_flight == 0
        assert self.state.holds.total() == 0
        for name in NAMES:
            load = self.state.ledger.load(name, self.now_s)
            assert (load.requests, load.pending_prefill_tokens, load.decoding_tokens, load.promised_tokens) == (0,) * 4


TestFleetState = FleetStateMachine.TestCase
TestFleetState.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
