"""The fast engine equals the plain one: same times, tokens, hits, evictions and queue in random fleet workloads."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import given, note, settings

from sim.core.engine import Engine
from sim.core.handoff import LoadFailurePolicy, Pull
from sim.core.sequence import KvTransfer, Request, keyed_request
from sim.core.timing import StepTiming
from sim.core.types import EngineConfig, TokenEvent
from sim.virtual import VirtualFleet
from tests.sim.plain_engine import PlainEngine
from tests.sim.sim_engines import BLOCK, TIMING, d_leg, make_request, p_leg, transfer_seconds

NAMES = ("a", "b")


class Spec(NamedTuple):
    """One request of a workload."""

    at_s: float
    engine: str
    kind: str
    family: int
    length: int
    own: int
    output: int
    abort_s: float | None
    priority: int


class Case(NamedTuple):
    """A workload and the fleet it runs on."""

    specs: list[Spec]
    blocks: int
    budget: int
    most: int
    policy: LoadFailurePolicy
    timing: StepTiming
    by_priority: bool
    threshold: int


# No round numbers: sums of equal times in another order would differ only in the last bit.
UNEVEN = TIMING._replace(decode_s=0.0100371, decode_context_s=1.0739e-6, prefill_s=0.0010173, prefill_token_s=0.0010297)
TIMINGS = (
    UNEVEN,
    UNEVEN._replace(frontend_s=0.05, frontend_token_s=0.001, decode_experts_s=0.004, mixed_stream_s=0.001),
    # The floor applies to short chunks only.
    UNEVEN._replace(prefill_floor_s=0.02, prefill_context_s=1e-4),
)
SPECS = st.builds(
    Spec,
    st.floats(0, 3),
    st.sampled_from(NAMES),
    st.sampled_from(["plain"] * 6 + ["keyed", "keyed", "P", "D", "D"]),
    st.integers(0, 2),
    st.integers(1, 60),
    st.integers(0, 12),
    st.integers(1, 30),
    st.one_of(st.none(), st.none(), st.floats(0, 4)),
    st.sampled_from([0, 0, 1, 2, -5]),
)
CASES = st.builds(
    Case,
    st.lists(SPECS, min_size=1, max_size=14),
    st.sampled_from([20, 30, 200]),
    st.sampled_from([3, 7, 12, 16, 40]),
    st.integers(1, 5),
    st.sampled_from(list(LoadFailurePolicy)),
    st.sampled_from(TIMINGS),
    st.booleans(),
    st.sampled_from([0, 0, 2, 5, 9]),
)


def request_of(number: int, spec: Spec) -> Request:
    """Prompts of a family share their prefix; equal prompts generate equal text."""
    return plain_request_of(number, spec)._replace(priority=spec.priority)


def plain_request_of(number: int, spec: Spec) -> Request:
    """The same without a priority."""
    name, ids = f"r{number}", [spec.family] * spec.length + [100 + spec.own] * (spec.own % 5)
    other = NAMES[spec.engine == NAMES[0]]
    if spec.kind == "keyed":
        keys = [spec.family << 20 | block for block in range(len(ids) // BLOCK)]
        return keyed_request(name, keys, len(ids), spec.output, (1 << 40) + (number << 10), None)
    if spec.kind == "P":
        return p_leg(name, ids, f"t{spec.own % 3}")
    if spec.kind == "D":
        return d_leg(name, ids, f"t{spec.own % 3}", other, max_tokens=spec.output)
    return make_request(name, ids, spec.output)


class StaggeredFleet(VirtualFleet):
    """A fleet in which every D waits for an unknown transfer a little longer than the last one, which avoids ties."""

    def _request_pull(self, name: str, pull: Pull, gives_up_s: float) -> None:
        super()._request_pull(name, pull, gives_up_s + 7.31e-5 * (int(pull.request_id[1:]) + 1))


class ObservedRun(NamedTuple):
    """All observable results of a run."""

    tokens: dict[str, list[tuple[float, int]]]
    ends: dict[str, tuple[float, str | None, int, str | None]]
    firsts: dict[str, float]
    free_blocks: list[tuple[int, ...]]
    """Free blocks of each engine at each observation."""
    end_s: float


def free_blocks(engine: Any, now_s: float) -> int:
    """Free blocks at ``now_s``, also during a run of steps."""
    if isinstance(engine, PlainEngine):
        return len(engine.pool.free)
    engine.catch_up(now_s)
    return int(engine.scheduler.pool.free_blocks)


def play(
    case: Case, kind: type[Any], until_s: list[float], looks_s: list[float], **options: Any
) -> tuple[ObservedRun, dict[str, Any]]:
    """Run a workload on engines of one kind, stopping (and so cutting runs) at ``until_s``, observing at
    ``looks_s``."""
    engines = {
        name: kind(
            EngineConfig(
                num_blocks=case.blocks,
                block_tokens=BLOCK,
                max_num_batched_tokens=case.budget,
                max_num_seqs=case.most,
                max_model_len=case.blocks * BLOCK,
                kv_bytes_per_token=1000,
                engine_id=name,
                abort_timeout_s=2.0,
                load_failure_policy=case.policy,
                priority_scheduling=case.by_priority,
                long_prefill_token_threshold=case.threshold,
            ),
            case.timing,
            transfer_seconds,
            **options,
        )
        for name in NAMES
    }
    fleet = StaggeredFleet(engines)
    for number, spec in enumerate(case.specs):
        fleet.submit(spec.engine, request_of(number, spec), spec.at_s)
    aborts = [(spec.abort_s, f"r{n}", spec.engine) for n, spec in enumerate(case.specs) if spec.abort_s is not None]
    stops = sorted([*aborts, *((at_s, "", "") for at_s in until_s), *((at_s, "", "look") for at_s in looks_s)])
    outcome = ObservedRun({}, {}, {}, [], 0.0)

    def keep(event: TokenEvent) -> None:
        outcome.tokens.setdefault(event.request_id, []).append((event.time_s, event.tokens))
        if event.first:
            outcome.firsts[event.request_id] = event.time_s
        if event.finish_reason is not None:
            end = (event.time_s, event.finish_reason, event.cached_tokens, event.transfer_id)
            outcome.ends[event.request_id] = end

    for at_s, name, engine in stops:
        if name or engine:
            while news := fleet.advance(at_s):
                for _, event in news:
                    keep(event)
            if name:
                fleet.abort(engine, name)
            else:
                outcome.free_blocks.append(tuple(free_blocks(each, at_s) for each in engines.values()))
        else:
            for _, event in fleet.run(at_s):
                keep(event)
    while news := fleet.advance():
        for _, event in news:
            keep(event)
    return outcome._replace(end_s=fleet.now_s), engines


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def assert_same(plain: ObservedRun, fast: ObservedRun, every_token: bool) -> None:
    assert fast.firsts.keys() == plain.firsts.keys()
    assert fast.free_blocks == plain.free_blocks
    assert fast.ends.keys() == plain.ends.keys()
    for name, at_s in plain.firsts.items():
        assert fast.firsts[name] == near(at_s)
    for name, (at_s, *rest) in plain.ends.items():
        assert fast.ends[name] == (near(at_s), *rest)
        assert sum(count for _, count in fast.tokens[name]) == sum(count for _, count in plain.tokens[name])
    if not every_token:
        return
    for name, events in fast.tokens.items():
        # The last token of a run is available when the run ends; the plain engine has the same number then.
        seen = 0
        for at_s, count in events:
            seen += count
            assert count == 0 or plain.tokens[name][seen - 1][0] == near(at_s)


@pytest.mark.parametrize("progress", [True, False])
@given(case=CASES, until_s=st.lists(st.floats(0, 5), max_size=4), looks_s=st.lists(st.floats(0, 5), max_size=4))
@settings(max_examples=120, deadline=None)
def test_the_fast_engine_is_the_plain_one(
    progress: bool, case: Case, until_s: list[float], looks_s: list[float]
) -> None:
    note(f"{case} {until_s} {looks_s}")
    plain, slow_engines = play(case, PlainEngine, until_s, looks_s)
    fast, engines = play(case, Engine, until_s, looks_s, report_progress=progress)
    assert_same(plain, fast, progress)
    for name, engine in engines.items():
        slow, pool = slow_engines[name], engine.scheduler.pool
        assert engine.counters == slow.counters
        assert pool.evictions == slow.pool.evictions
        assert pool.reuse_order() == slow.reuse_order()
        assert pool.cached_keys() == set(slow.pool.cached)
        assert pool.cached_blocks == len(slow.pool.cached)
        state = engine.state()
        owners = (*slow.running, *slow.waiting, *slow.pulling.values())
        used = {block for sequence in owners for block in sequence.blocks}
        held = {block for hold in slow.holds.holdings() for block in hold} - used
        leaked = {block for sequence in slow.orphans.values() for block in sequence.blocks} - held - used
        assert (state.used_blocks, state.held_blocks, state.leaked_blocks) == (len(used), len(held), len(leaked))
        assert state.free_blocks == len(slow.pool.free)


def test_the_workloads_of_the_comparison_reach_the_corners() -> None:
    seen = {
        "preemptions": 0,
        "ordered": 0,
        "evictions": 0,
        "copies": 0,
        "aborts": 0,
        "pulled": 0,
        "errors": 0,
        "fused": 0,
        "shared": 0,
    }

    @given(case=CASES)
    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    def collect(case: Case) -> None:
        copies = shared = 0
        publish = PlainEngine.publish

        def watch(self: PlainEngine, sequence: Any) -> None:
            nonlocal copies, shared
            publish(self, sequence)
            copies += len(self.pool.copies)
            shared += sum(each.computed < each.request.prompt_tokens for each in self.running) > 1

        PlainEngine.publish = watch  # type: ignore[method-assign]
        try:
            plain, engines = play(case, PlainEngine, [], [])
        finally:
            PlainEngine.publish = publish  # type: ignore[method-assign]
        seen["copies"] += copies
        seen["shared"] += shared
        for engine in engines.values():
            seen["preemptions"] += engine.counters.preemptions
            seen["ordered"] += case.by_priority and engine.counters.preemptions
            seen["evictions"] += engine.pool.evictions
            seen["aborts"] += engine.counters.finished.get("abort", 0)
            seen["pulled"] += engine.counters.external_tokens > 0
            seen["errors"] += engine.counters.finished.get("error", 0)
        fast, _ = play(case, Engine, [], [])
        seen["fused"] += sum(count > 1 for events in fast.tokens.values() for _, count in events)
        assert plain.end_s == near(fast.end_s) or not math.isfinite(fast.end_s)

    collect()
    assert all(count >= 5 for count in seen.values()), seen


def test_a_transfer_is_unknown_to_the_wrong_engine_even_when_the_right_one_holds_it() -> None:
    """Only P's own hold of a transfer answers the pulls sent to P."""
    request = d_leg("d", range(30), "t", "a")
    kinds: tuple[type[Any], ...] = (PlainEngine, Engine)
    for kind in kinds:
        config = EngineConfig(64, BLOCK, max_model_len=256, engine_id="a", load_failure_policy=LoadFailurePolicy.FAIL)
        fleet = VirtualFleet({name: kind(config, TIMING, transfer_seconds) for name in NAMES})
        fleet.submit("b", request._replace(kv_transfer=KvTransfer(False, True, "t", "a", "a")))
        fleet.submit("b", p_leg("p", range(30), "t"), 1.0)
        events = [event for _, event in fleet.run()]
        assert [(event.request_id, event.finish_reason) for event in events] == [("p", "length"), ("d", "error")]
        assert events[-1].time_s == pytest.approx(480.0)
