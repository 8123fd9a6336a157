"""Interference against a simulated engine whose step times are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bench.instruments.engine import BusyFleetError, Generated, InstrumentError, refuse_busy
from bench.instruments.interference import InterferencePlan, interference_sheet, measure_interference
from bench.instruments.prompts import Prompts
from bench.instruments.streams import Stream, decoding, quantiles
from sim.fit import model_prefill
from tests.bench.instruments.virtual import VirtualLab


def test_every_value_is_the_models() -> None:
    lab = VirtualLab("h200")
    plan = InterferencePlan(streams=(1, 8), prefill_tokens=(2_048, 32_768), repeats=1)
    rows = lab.run(measure_interference(lab.engines[0], plan, Prompts(nonce="n")))
    assert [(row.streams, row.prefill_tokens) for row in rows] == [(1, 2048), (1, 32768), (8, 2048), (8, 32768)]
    timing = lab.profile.timing
    for row in rows:
        model = model_prefill(timing, row.prefill_tokens, 0, row.streams, round(row.context_tokens), 8192)
        # The prefill joins at the end of the decode step in flight, so up to one step later than in the model.
        assert model.ttft_s <= row.ttft_s <= model.ttft_s + 1.1 * model.decode_s
        assert row.decode_s == pytest.approx(model.decode_s, rel=0.01)
        assert row.before.tpot_s == pytest.approx(model.decode_s, rel=0.05)
        assert row.longest_gap_s == pytest.approx(max(model.steps_s), rel=0.01)
        assert row.cached_tokens == 0
        assert row.during.tokens % row.streams == 0
        assert row.during.tpot_s == pytest.approx(row.ttft_s * row.streams / row.during.tokens)
    assert rows[3].penalty > rows[2].penalty > 1
    assert rows[3].stall_stream_s == pytest.approx(8 * rows[3].ttft_s * (1 - 1 / rows[3].penalty))
    assert [cells[:3] for cells in interference_sheet(rows).rows] == [
        ("1", "2,048", "1"),
        ("1", "32,768", "1"),
        ("8", "2,048", "1"),
        ("8", "32,768", "1"),
    ]


def test_the_engine_is_idle_afterwards() -> None:
    lab = VirtualLab("h200")
    plan = InterferencePlan(streams=(4,), prefill_tokens=(1_024,), repeats=2)
    lab.run(measure_interference(lab.engines[0], plan, Prompts()))
    lab.run(refuse_busy(lab.engines))
    assert lab.fleet.engines["a"].live_requests == 0


def test_the_first_prefill_among_each_number_of_streams_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = VirtualLab("h200")
    engine, sent = lab.engines[0], list[int]()
    generate = engine.generate

    async def counted(prompt: Sequence[int], max_tokens: int, **options: Any) -> Generated:
        if max_tokens == 1:
            sent.append(len(prompt))
        return await generate(prompt, max_tokens, **options)

    monkeypatch.setattr(engine, "generate", counted)
    plan = InterferencePlan(streams=(1, 4), prefill_tokens=(4_096, 1_024), repeats=1)
    rows = lab.run(measure_interference(engine, plan, Prompts()))
    assert sent == [1_024, 4_096, 1_024] * 2
    assert [(row.streams, row.prefill_tokens) for row in rows] == [(1, 4_096), (1, 1_024), (4, 4_096), (4, 1_024)]


def test_a_busy_engine_is_refused() -> None:
    lab = VirtualLab("h200")

    async def busy() -> None:
        async with decoding(lab.engines[0], 3, Prompts(), 64, 1000, 1):
            await refuse_busy(lab.engines)

    with pytest.raises(BusyFleetError, match="a: 3 running, 0 waiting"):
        lab.run(busy())


def test_streams_that_end_too_early_are_an_error() -> None:
    lab = VirtualLab("h200")
    plan = InterferencePlan(streams=(2,), prefill_tokens=(65_536,), repeats=1, stream_tokens=40)
    with pytest.raises(InstrumentError, match="raise --stream-tokens"):
        lab.run(measure_interference(lab.engines[0], plan, Prompts()))


def test_a_prompt_the_engine_cannot_take_is_an_error() -> None:
    lab = VirtualLab("h200")
    plan = InterferencePlan(streams=(1,), prefill_tokens=(300_000,), repeats=1)
    with pytest.raises(InstrumentError, match="leave no room"):
        lab.run(measure_interference(lab.engines[0], plan, Prompts()))


def test_tokens_and_gaps_of_a_stream() -> None:
    stream = Stream()
    for tokens, time_s in ((1, 1.0), (2, 2.0), (1, 4.0)):
        stream.take(tokens, time_s)
    assert [stream.until(time_s) for time_s in (0.5, 1.0, 3.9, 4.0)] == [0, 1, 3, 4]
    assert stream.gaps(2.5, 3.0) == [2.0]
    assert stream.gaps(0.0, 9.0) == [1.0, 2.0]


def test_quantiles_are_values_that_occurred() -> None:
    found = quantiles([float(number) for number in range(1, 101)])
    assert found is not None
    assert (found.p50_s, found.p90_s, found.p99_s, found.longest_s) == (51.0, 91.0, 100.0, 100.0)
    assert quantiles([]) is None


def test_prompts_differ_by_nonce_and_repeat_with_it() -> None:
    assert Prompts(nonce="x").fresh(50) == Prompts(nonce="x").fresh(50)
    assert Prompts().fresh(50) != Prompts().fresh(50)
    assert all(1_000 <= token < 100_000 for token in Prompts().fresh(500))
