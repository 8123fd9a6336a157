"""A cell's capacity, saturation, hot set and stretch of the trace, on hand-made traces."""

from __future__ import annotations

import msgspec
import pytest

from bench.tournament.capacity import MeanWork, busy_s, mean_work, pace, saturation, work_of
from bench.tournament.hotset import HEADROOM, hot_set_tokens, pool_tokens
from bench.tournament.settings import Sizes
from bench.tournament.timeline import Timeline, calls_of, timeline
from bench.tournament.workload import build
from replayer.replay.plan import PlanOptions, make_plan
from replayer.traces.trace import Trace, TraceRequest
from sim.hardware import load_profile

PROFILE = load_profile("h200")
TIMING = PROFILE.timing
BLOCK = 64


def _request(session: str, turn: int, at_s: float, ids: list[int], output: int = 10, **more: object) -> TraceRequest:
    return TraceRequest(
        chat_id=0,
        session_id=session,
        turn=turn,
        timestamp_s=at_s,
        input_length=len(ids) * BLOCK,
        output_length=output,
        hash_ids=ids,
        **more,  # type: ignore[arg-type]
    )


def _trace(requests: list[TraceRequest]) -> Trace:
    return Trace(requests=sorted(requests, key=lambda each: each.timestamp_s), block_tokens=BLOCK, name="by hand")


def _line(trace: Trace, load: float = 0.8) -> Timeline:
    return timeline(calls_of(trace, PROFILE), pace(work_of(trace, PROFILE), PROFILE, load))


@pytest.fixture
def alone() -> Trace:
    """Eight sessions of one turn, ten seconds apart; nothing shared."""
    return _trace([_request(f"s{n}", 1, 10.0 * n, list(range(100 * n, 100 * n + 10))) for n in range(8)])


@pytest.fixture
def talks() -> Trace:
    """Four sessions of three turns; all begin with the same two blocks, and each turn repeats the one before."""
    requests = []
    for n in range(4):
        for turn in range(1, 4):
            own = list(range(1000 * (n + 1), 1000 * (n + 1) + 4 * turn))
            think_s = 2.0 if turn > 1 else None
            requests.append(_request(f"t{n}", turn, 5.0 * n + 3.0 * turn, [0, 1, *own], think_time_s=think_s))
    return _trace(requests)


def test_work_is_what_an_endless_cache_leaves(talks: Trace) -> None:
    work = work_of(talks, PROFILE)
    # First turns: 6 blocks, of which the first session computes all and the others 4; later turns add 4 blocks each.
    assert work.new_tokens == BLOCK * (6 + 3 * 4 + 8 * 4) / 12
    assert work.chunks == 1
    assert work.output_tokens == 10
    assert work.context_tokens == pytest.approx(BLOCK * (6 + 10 + 14) / 3 + 5)


def test_a_decoding_instance_is_busy_for_its_share_of_steps() -> None:
    work = MeanWork(new_tokens=1.0, chunks=0.0, chunk_s=0.0, output_tokens=640.0, context_tokens=1000.0)
    assert busy_s(work, PROFILE, 64.0) == pytest.approx(10 * TIMING.decode(64, 64_000))
    assert saturation(work, PROFILE) == pytest.approx(1 / busy_s(work, PROFILE, 64.0))


def test_a_prefilling_instance_is_busy_for_its_chunks() -> None:
    work = mean_work([(65_536, 0, 1)], PROFILE)
    chunks = [TIMING.chunk(8192, 8192 * n) for n in range(8)]
    steps = sum(TIMING.mixed(chunk_s, 0, 0) for chunk_s in chunks)
    # Meanwhile the engine decodes 64 streams, whose contexts are the prompt itself.
    streams = 8 * (TIMING.mixed_stream_s * 64 + TIMING.decode_context_s * 64 * 65_536.5)
    assert busy_s(work, PROFILE, 64.0) == pytest.approx(steps + streams, rel=1e-6)


def test_twice_the_work_halves_the_saturation() -> None:
    light = mean_work([(8192, 0, 200)], PROFILE)
    heavy = msgspec.structs.replace(light, chunks=2 * light.chunks, chunk_s=2 * light.chunk_s, output_tokens=400.0)
    assert saturation(heavy, PROFILE) == pytest.approx(saturation(light, PROFILE) / 2)


def test_the_batch_grows_with_load_and_makes_the_rate() -> None:
    work = mean_work([(20_000, 10_000, 300)], PROFILE)
    streams = [pace(work, PROFILE, load).streams for load in (0.3, 0.5, 0.8, 0.9)]
    assert streams == sorted(streams)
    assert 1 <= streams[0] < streams[-1] < PROFILE.max_num_seqs
    at = pace(work, PROFILE, 0.8)
    assert 1 / busy_s(work, PROFILE, at.streams) == pytest.approx(0.8 * saturation(work, PROFILE))
    # Little's law: streams = rate x decode time of a request.
    assert at.streams == pytest.approx(0.8 * saturation(work, PROFILE) * at.token_s * 300)
    assert pace(work, PROFILE, 1.2) == pace(work, PROFILE, 0.9)


def test_the_hot_set_of_sessions_that_never_overlap_is_their_share_of_the_time(alone: Trace) -> None:
    line = _line(alone, 0.8)
    alive_s = line.sessions[0].end_s
    rate = 0.01 / (8 * 0.8)  # of the reference fleet one request in a hundred seconds
    expected = 10 * BLOCK * alive_s / 100 / 8
    assert hot_set_tokens(line, rate) <= 10 * BLOCK / 8
    many = [hot_set_tokens(line, rate * 100 * factor) for factor in (1, 10)]
    assert many[1] == pytest.approx(10 * many[0], rel=0.3)
    assert many[0] == pytest.approx(100 * expected, rel=0.5)


def test_common_blocks_are_hot_once_and_copies_have_blocks_of_their_own(talks: Trace) -> None:
    line = _line(talks)
    assert [turn.common for turn in line.sessions[0].turns] == [2, 2, 2]
    alive_s = line.sessions[0].end_s
    rate = 1000 * line.requests / alive_s / (8 * 0.8)
    tokens = 8 * hot_set_tokens(line, rate)
    alive = 4000  # 1,000 repetitions of the trace are alive at a time, four sessions each
    # A session holds 4, 8 or 12 own blocks, depending on its turn.
    assert alive * 4 * BLOCK < tokens < alive * 12 * BLOCK
    assert tokens % BLOCK == pytest.approx(0.0, abs=BLOCK)


def test_a_pool_is_in_whole_blocks_and_holds_the_largest_request(talks: Trace) -> None:
    line = _line(talks)
    largest = 14 * BLOCK + 10
    assert pool_tokens(2.0, 10_000.0, line) == (20_032, False)
    tokens, floored = pool_tokens(0.25, 1000.0, line)
    assert floored
    assert tokens % BLOCK == 0
    assert tokens >= HEADROOM * largest


def test_a_stretch_starts_in_mid_stream_and_is_judged_in_the_middle(talks: Trace) -> None:
    line = _line(talks)
    rate = 2.0
    workload = build(line, rate, 2, 1, Sizes(requests=60), "x")
    requests = workload.trace.requests
    assert [each.chat_id for each in requests] == list(range(len(requests)))
    assert [each.timestamp_s for each in requests] == sorted(each.timestamp_s for each in requests)
    judged_s = 60 * 2**0.5 / rate
    assert len(workload.judged) == pytest.approx(rate * judged_s, rel=0.2)
    assert workload.time_scale == pytest.approx(line.period_s * rate / line.requests)
    sessions = workload.trace.sessions()
    warmed = [turns for turns in sessions.values() if turns[0].output_length == 1]
    assert len(warmed) == workload.warming > 0
    begins_s = min(turns[1].timestamp_s for turns in warmed)
    for turns in warmed:
        # The warming turn is the one before the first of the stretch: its prompt is a prefix of that turn's.
        assert len(turns) > 1
        assert list(turns[1].hash_ids[: len(turns[0].hash_ids)]) == list(turns[0].hash_ids)
        assert len(turns[1].hash_ids) == len(turns[0].hash_ids) + 4
        assert turns[0].timestamp_s < begins_s
        assert turns[0].chat_id not in workload.judged
    assert len({name.split("~")[1] for name in sessions}) == workload.copies > 2


def test_sessions_are_whole_if_every_turn_of_the_trace_is_judged(talks: Trace) -> None:
    workload = build(_line(talks), 2.0, 2, 1, Sizes(requests=60), "x")
    sessions = workload.trace.sessions()
    assert 0 < len(workload.whole) < len(sessions)
    for name, turns in sessions.items():
        judged = [request.chat_id in workload.judged for request in turns]
        assert (name in workload.whole) == (len(turns) == 3 and all(judged))


def test_copies_share_what_all_sessions_share_and_nothing_else(talks: Trace) -> None:
    workload = build(_line(talks), 2.0, 2, 1, Sizes(requests=60), "x")
    owners: dict[int, set[str]] = {}
    for request in workload.trace.requests:
        assert list(request.hash_ids[:2]) == list(workload.trace.requests[0].hash_ids[:2])
        for block in request.hash_ids[2:]:
            owners.setdefault(block, set()).add(request.session_id)
    assert all(len(names) == 1 for names in owners.values())


def test_think_times_are_left_alone_at_any_load(talks: Trace) -> None:
    line = _line(talks)
    for rate in (1.0, 8.0):
        workload = build(line, rate, 2, 1, Sizes(requests=60), "x")
        plan = make_plan(workload.trace, PlanOptions(time_scale=1.0, think_scale=1.0, idle_gap_cap_s=None))
        steps = [step for session in plan.sessions for step in session.steps]
        paced = [step for step in steps if step.after_end]
        assert paced
        assert {step.wait_s for step in paced} == {2.0}


def test_another_seed_is_another_stretch_and_the_same_seed_the_same(talks: Trace) -> None:
    line, sizes = _line(talks), Sizes(requests=30)
    one, again, other = (build(line, 2.0, 2, seed, sizes, "x") for seed in (1, 1, 2))
    assert one.trace.requests == again.trace.requests
    assert one.judged == again.judged
    assert one.trace.requests != other.trace.requests


def test_requests_without_sessions_are_warmed_too(alone: Trace) -> None:
    workload = build(_line(alone), 1.0, 2, 1, Sizes(requests=40), "x")
    assert workload.warming == pytest.approx(30, abs=2)
    assert all(len(turns) == 1 for turns in workload.trace.sessions().values())
