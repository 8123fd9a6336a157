"""Property test: after any sequence of operations every block has exactly the owners that reference it."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sim.core.handoff import LoadFailurePolicy, Pull
from tests.sim.sim_engines import accounted, d_leg, drain, make_engine, make_request, p_leg


class EngineMachine(RuleBasedStateMachine):
    """Random submits, aborts, steps, interrupts, pulls and waits on a pool that is too small."""

    @initialize(policy=st.sampled_from(list(LoadFailurePolicy)))
    def start(self, policy: LoadFailurePolicy) -> None:
        self.engine = make_engine(
            num_blocks=20,
            max_num_batched_tokens=12,
            max_num_seqs=4,
            max_model_len=60,
            abort_timeout_s=5.0,
            load_failure_policy=policy,
            engine_id="p",
        )
        self.now_s = 0.0
        self.count = 0
        self.names: list[str] = []
        self.pulls: list[Pull] = []
        self.transfers: list[str] = []

    def name(self) -> str:
        self.count += 1
        self.names.append(f"r{self.count}")
        return self.names[-1]

    @rule(length=st.integers(1, 40), family=st.integers(0, 2), output=st.integers(1, 15))
    def submit(self, length: int, family: int, output: int) -> None:
        self.engine.submit(make_request(self.name(), [family] * length, output), self.now_s)

    @rule(length=st.integers(1, 40), family=st.integers(0, 2))
    def submit_p_leg(self, length: int, family: int) -> None:
        self.transfers.append(f"t{self.count % 3}")
        self.engine.submit(p_leg(self.name(), [family] * length, self.transfers[-1]), self.now_s)

    @rule(length=st.integers(1, 40), family=st.integers(0, 2))
    def submit_d_leg(self, length: int, family: int) -> None:
        self.engine.submit(d_leg(self.name(), [family] * length), self.now_s)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.names)))

    @rule(horizon_s=st.floats(0, 1))
    def step(self, horizon_s: float) -> None:
        end_s = self.engine.step_end_s
        if end_s is not None:
            self.engine.end_step()
            self.now_s = max(self.now_s, end_s)
        self.engine.begin_step(self.now_s, self.now_s + horizon_s)
        self.pulls += self.engine.take_pulls()

    @rule(share=st.floats(0, 1))
    def interrupt(self, share: float) -> None:
        end_s = self.engine.step_end_s
        if end_s is not None and end_s > self.now_s:
            self.now_s += share * (end_s - self.now_s)
            self.engine.interrupt(self.now_s)

    @rule(seconds=st.floats(0, 4))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), arrives=st.booleans())
    def settle_pull(self, data: st.DataObject, arrives: bool) -> None:
        pull = self.pulls.pop(data.draw(st.integers(0, len(self.pulls) - 1)))
        if arrives:
            self.engine.finish_pull(pull.request_id)
        else:
            self.engine.fail_pull(pull.request_id, self.now_s)

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), blocks=st.integers(1, 10))
    def serve_pull(self, data: st.DataObject, blocks: int) -> None:
        transfer = data.draw(st.sampled_from(self.transfers))
        self.engine.serve_pull(transfer, "p", blocks, 0, 0, self.now_s)

    @rule()
    def reset_cache(self) -> None:
        self.engine.reset_prefix_cache()

    @invariant()
    def every_block_has_its_owners(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        assert accounted(engine)
        scheduler = engine.scheduler
        owners = [*scheduler.running, *scheduler.waiting, *scheduler.pulling.values(), *engine._orphans.values()]
        holds = [*engine.holds._open.values(), *engine.holds._sending]
        holdings = [owner.blocks for owner in owners] + [hold.blocks for hold in holds]
        assert scheduler.pool.references() + sum(each.loose for each in holdings) == sum(map(len, holdings))
        assert len(scheduler.running) <= 4

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        if engine.step_end_s is not None:
            engine.end_step()
        for name in self.names:
            engine.abort(name)
        for pull in self.pulls + engine.take_pulls():
            engine.finish_pull(pull.request_id)
        # After one more step, later than any hold lasts, only blocks of silently failed pulls may be missing.
        self.now_s += 1000.0
        if engine.state().leaked_blocks < engine.config.num_blocks:
            engine.submit(make_request("last", [9]), self.now_s)
            drain(engine, self.now_s)
            engine.submit(make_request("very last", [9]), self.now_s + 1)
            drain(engine, self.now_s + 1)
        state = engine.state()
        assert (state.used_blocks, state.held_blocks, state.running, state.waiting, state.pulling) == (0, 0, 0, 0, 0)
        if engine.config.load_failure_policy is not LoadFailurePolicy.HANG:
            assert state.leaked_blocks == 0
            assert state.free_blocks == engine.config.num_blocks
        assert engine.live_requests == 0


EngineMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestEngineMachine = EngineMachine.TestCase
