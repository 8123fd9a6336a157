"""Latency arithmetic that replays, simulations and re-simulations share."""

from __future__ import annotations

from replayer.records.runs import Latencies, latencies


def test_times_count_from_sending_and_from_the_schedule() -> None:
    times = latencies(
        scheduled_s=1.0, sent_s=1.5, first_token_s=2.0, last_token_s=4.0, finished_s=4.25, completion_tokens=5
    )
    assert times == Latencies(ttft_s=0.5, ttft_scheduled_s=1.0, tpot_s=0.5, e2e_s=2.75, e2e_scheduled_s=3.25)


def test_one_token_has_no_time_per_output_token() -> None:
    for tokens in (None, 0, 1):
        times = latencies(
            scheduled_s=0.0, sent_s=0.0, first_token_s=1.0, last_token_s=1.0, finished_s=1.0, completion_tokens=tokens
        )
        assert times.tpot_s is None
        assert times.ttft_s == 1.0


def test_an_answer_without_a_token_has_only_its_end() -> None:
    times = latencies(
        scheduled_s=0.0, sent_s=1.0, first_token_s=None, last_token_s=None, finished_s=3.0, completion_tokens=None
    )
    assert times == Latencies(None, None, None, 2.0, 3.0)
