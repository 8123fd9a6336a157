"""Prefills that ran in the steps of a stream, from first tokens."""

from __future__ import annotations

import pytest

from policies.costs.short_step import SHORT_TOKENS, BesideStream
from policies.costs.step_watch import StepWatch, WatchedStream


def joined(watch: StepWatch, new_tokens: int, now_s: float, instance: str = "a") -> WatchedStream:
    """A stream that was prefilled where it decodes; a token takes a millisecond of prefill."""
    watch.prefilled(instance, new_tokens, new_tokens / 1000, now_s)
    return watch.began(instance, now_s)


def beside(watch: StepWatch, stream: WatchedStream, now_s: float) -> BesideStream:
    found = watch.beside(stream, 100, now_s)
    assert found.tokens == 100
    return found


def test_a_stream_alone_has_no_prefill_beside_it_but_its_own() -> None:
    watch = StepWatch()
    assert beside(watch, joined(watch, 300, 5.0), 7.0) == BesideStream(2.0, 100, 100.0, 0, 0, 0.0)


def test_steps_are_short_or_long_by_their_tokens_together() -> None:
    watch = StepWatch()
    stream = joined(watch, 300, 0.0)
    joined(watch, SHORT_TOKENS, 1.0)
    joined(watch, 300, 2.0)
    joined(watch, 213, 2.01)  # in one step
    joined(watch, 9_000, 3.0)
    joined(watch, 100, 4.0, "b")
    found = beside(watch, stream, 5.0)
    assert (found.short, found.long) == (1, 2)
    assert found.prefill_s == pytest.approx(0.512 + 0.513 + 9.0)


def test_prefills_of_the_step_that_began_a_stream_did_not_delay_it() -> None:
    watch = StepWatch()
    first = joined(watch, 300, 0.0)
    second = joined(watch, 400, 0.004)
    assert beside(watch, first, 1.0)[3:] == beside(watch, second, 1.0)[3:] == (0, 0, 0.0)
    joined(watch, 200, 2.0)
    for stream in (first, second):
        found = beside(watch, stream, 3.0)
        assert found[3:] == (1, 0, pytest.approx(0.2))


def test_a_stream_that_was_prefilled_elsewhere_is_delayed_by_all_that_follow() -> None:
    watch = StepWatch()
    stream = watch.began("a", 0.0)
    joined(watch, 200, 1.0)
    joined(watch, 200, 2.0)
    assert beside(watch, stream, 3.0).short == 2
    later = watch.began("a", 3.0)
    assert beside(watch, later, 4.0).short == 0


def test_the_mean_number_of_streams_is_over_its_own_time() -> None:
    watch = StepWatch()
    before = joined(watch, 10, 0.0)
    stream = joined(watch, 10, 2.0)
    watch.ended(before, 3.0)
    third = joined(watch, 10, 5.0)
    assert beside(watch, stream, 6.0).stream_tokens == pytest.approx(100 * (2 * 1 + 1 * 2 + 2 * 1) / 4)
    watch.ended(stream, None)  # at the time of the last event
    assert beside(watch, third, 7.0).stream_tokens == pytest.approx(100 * (2 * 1 + 1 * 1) / 2)


def test_an_instance_that_restarts_begins_again_and_streams_of_before_do_not_count_there() -> None:
    watch = StepWatch()
    old = joined(watch, 10, 0.0)
    watch.forget("a")
    watch.forget("never seen")
    new = joined(watch, 10, 1.0)
    watch.ended(old, 2.0)
    assert beside(watch, new, 3.0).stream_tokens == 100.0
