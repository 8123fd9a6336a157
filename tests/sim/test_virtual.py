"""The virtual fleet's interface: only events are returned, other engines are not affected, idle engines cost
nothing."""

from __future__ import annotations

import math

import pytest

from sim.core.engine import Engine
from sim.core.sequence import Request, keyed_request
from sim.core.types import EngineConfig
from sim.virtual import VirtualFleet
from tests.sim.sim_engines import BLOCK, TIMING, make_engine, make_request, transfer_seconds


def quiet_engine(num_blocks: int = 64) -> Engine:
    config = EngineConfig(num_blocks, BLOCK, max_num_batched_tokens=10, max_model_len=num_blocks * BLOCK)
    return Engine(config, TIMING, transfer_seconds, report_progress=False)


def keyed(name: str, prompt_tokens: int, max_tokens: int, first: int = 1) -> Request:
    keys = list(range(first, first + prompt_tokens // BLOCK))
    return keyed_request(name, keys, prompt_tokens, max_tokens, first << 32)


def test_the_only_news_are_first_tokens_and_ends() -> None:
    fleet = VirtualFleet({"e": quiet_engine()})
    fleet.submit("e", keyed("a", 35, 9))
    ((name, first),) = fleet.advance(5.0)
    assert (name, first.first, first.tokens, first.finish_reason) == ("e", True, 1, None)
    assert fleet.now_s == first.time_s
    ((_, last),) = fleet.advance(5.0)
    assert (last.first, last.tokens, last.finish_reason) == (False, 8, "length")
    decodes_s = sum(TIMING.decode(1, 36 + step) for step in range(8))
    assert last.time_s - first.time_s == pytest.approx(decodes_s)
    assert fleet.advance(5.0) == []
    assert fleet.now_s == 5.0
    assert fleet.advance() == []
    assert fleet.now_s == 5.0
    assert fleet.next_s() == math.inf


def test_time_stops_at_the_limit_and_cuts_no_run() -> None:
    fleet = VirtualFleet({"e": quiet_engine()})
    fleet.submit("e", keyed("a", 8, 40))
    (news,) = fleet.advance()
    at_s = fleet.now_s
    end_s = fleet.next_s()
    assert fleet.advance(at_s + 0.05) == []
    assert (fleet.now_s, fleet.next_s()) == (at_s + 0.05, end_s)
    assert fleet.engines["e"].counters.generation_tokens == 1
    ((_, event),) = fleet.advance()
    assert (event.tokens, event.time_s) == (39, end_s)
    assert news[1].first


def test_idle_engines_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    begin_step = Engine.begin_step

    def watched(self: Engine, now_s: float, horizon_s: float = math.inf) -> float | None:
        begun.append(self.config.engine_id)
        return begin_step(self, now_s, horizon_s)

    monkeypatch.setattr(Engine, "begin_step", watched)
    fleet = VirtualFleet({f"e{number}": make_engine(engine_id=f"e{number}") for number in range(200)})
    for number in range(30):
        fleet.submit("e7", make_request(f"r{number}", [number] * 20, 5))
        while fleet.advance():
            pass
    assert set(begun) == {"e7"}


def test_what_can_never_be_served_is_refused_where_it_is_sent() -> None:
    fleet = VirtualFleet({"e": quiet_engine(4)})
    with pytest.raises(ValueError, match="no room"):
        fleet.submit("e", keyed("long", 16, 1))


def test_an_abort_lets_those_who_wait_for_blocks_in_at_once() -> None:
    fleet = VirtualFleet({"e": quiet_engine(8)})
    fleet.submit("e", keyed("big", 20, 8))
    fleet.submit("e", keyed("next", 20, 1, first=100))
    assert [event.request_id for _, event in fleet.advance()] == ["big"]
    assert fleet.advance(fleet.now_s + 0.015) == []
    aborted_s = fleet.now_s
    assert fleet.abort("e", "big")
    assert not fleet.abort("e", "big")
    ((_, event),) = fleet.advance()
    assert (event.request_id, event.finish_reason) == ("next", "length")
    # The decode step in flight ends first; two chunks of 10 tokens follow.
    chunks_s = sum(TIMING.mixed(TIMING.chunk(10, before), 0, 0) for before in (0, 10))
    assert event.time_s < aborted_s + 0.0101 + chunks_s


def test_a_look_in_the_midst_of_a_run_shows_the_blocks_as_of_then() -> None:
    fleet = VirtualFleet({"e": quiet_engine()})
    engine = fleet.engines["e"]
    fleet.submit("e", keyed("a", 8, 41))
    fleet.advance()
    start_s, end_s = fleet.now_s, fleet.next_s()
    used = []
    for share in (0.0, 0.25, 0.5, 0.75):
        now_s = start_s + share * (end_s - start_s)
        assert fleet.advance(now_s) == []
        engine.catch_up(now_s)
        used.append(round(engine.kv_usage * 64))
    # 8 prompt tokens; the steps of 40 tokens take about the same time each.
    assert used == [3, 5, 8, 10]
    assert fleet.next_s() == end_s
    ((_, event),) = fleet.advance()
    assert (event.tokens, event.time_s) == (40, end_s)
    assert engine.state().free_blocks == 64


def test_keyed_requests_share_prompts_and_never_output() -> None:
    fleet = VirtualFleet({"e": quiet_engine()})
    keys = [1, 2, 3, 4]
    for number in range(3):
        fleet.submit("e", keyed_request(f"r{number}", keys, 17, 12, 1000 * (number + 1)))
        events = [event for news in iter(fleet.advance, []) for _, event in news]
        assert events[0].cached_tokens == (16 if number else 0)
    assert keys == [1, 2, 3, 4]
    # 17 + 12 tokens, the last one's KV never computed: 7 full blocks, of which 3 hold output.
    assert fleet.engines["e"].scheduler.pool.cached_keys() == {
        *keys,
        *(1000 * (number + 1) + block for number in range(3) for block in range(3)),
    }
