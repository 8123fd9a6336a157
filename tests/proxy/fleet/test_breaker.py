"""The breaker's state machine: conditions for opening and closing, and invariants of any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.fleet.breaker import Breaker, BreakerState, Trial
from proxy.fleet.sliding_count import SlidingCount
from proxy.settings import HealthSettings

HEALTH = HealthSettings(
    unhealthy_after=3,
    failure_ratio=0.5,
    window_s=10,
    window_min_requests=10,
    open_s=4,
    open_max_s=30,
    flap_window_s=100,
    trial_requests=2,
)


def fail(breaker: Breaker, now_s: float, count: int = 1) -> None:
    for _ in range(count):
        breaker.failed(now_s, "broke", now_s)


def reopen(breaker: Breaker, at_s: float) -> float:
    """Open a closed breaker by failed requests; returns how long it stays open."""
    fail(breaker, at_s, 3)
    assert breaker.state is BreakerState.OPEN
    return breaker.until_s - at_s


def pass_trial(breaker: Breaker) -> float:
    """Close an open breaker as soon as possible; returns when that was."""
    now_s = breaker.until_s
    assert breaker.probed(now_s)
    assert breaker.succeeded(now_s, now_s)
    return now_s


def test_consecutive_failures_open_it_and_a_success_in_between_resets_the_count() -> None:
    breaker = Breaker(HEALTH)
    for _ in range(5):
        fail(breaker, 0.0, 2)
        breaker.succeeded(0.0, 0.0)
    assert breaker.state is BreakerState.OPEN, "10 of 15 failed"
    breaker = Breaker(HEALTH)
    for second in range(50):
        fail(breaker, second * 10.0, 2)
        breaker.succeeded(second * 10.0, 0.0)
    assert breaker.state is BreakerState.CLOSED, "never three in a row, never ten in ten seconds"
    breaker.failed(500.0, "late", 500.0)
    breaker.failed(500.0, "late", 500.0)
    assert breaker.failed(500.0, "reset", 500.0)
    assert (breaker.state, breaker.why) == (BreakerState.OPEN, "3 requests in a row failed, the last: reset")


@pytest.mark.parametrize(("good", "bad", "opens"), [(4, 5, False), (5, 5, True), (6, 5, False), (6, 6, True)])
def test_a_large_share_of_failures_opens_it_from_a_number_of_requests_on(good: int, bad: int, opens: bool) -> None:
    breaker = Breaker(HEALTH.model_copy(update={"unhealthy_after": 100}))
    for _ in range(good):
        breaker.succeeded(1.0, 1.0)
    fail(breaker, 1.0, bad)
    assert (breaker.state is BreakerState.OPEN) == opens


def test_what_is_older_than_the_window_does_not_count() -> None:
    breaker = Breaker(HEALTH.model_copy(update={"unhealthy_after": 100}))
    fail(breaker, 0.5, 9)
    fail(breaker, 10.5, 9)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 10.6)
    assert breaker.state is BreakerState.OPEN
    assert breaker.why == "10 of 10 requests failed within 10 s, the last: broke"


def test_streams_that_all_begin_and_all_break_off_open_it() -> None:
    breaker = Breaker(HEALTH)
    for _ in range(3):
        breaker.succeeded(0.0, 0.0)
        breaker.failed(0.0, "broke off", 0.0, answered=True)
    assert breaker.state is BreakerState.OPEN
    breaker = Breaker(HEALTH)
    for _ in range(2):
        breaker.succeeded(0.0, 0.0)
        breaker.failed(0.0, "broke off", 0.0, answered=True)
    breaker.succeeded(0.0, 0.0)
    breaker.completed()
    fail(breaker, 0.0, 2)
    assert breaker.state is BreakerState.CLOSED, "a complete answer forgives"


def test_a_broken_stream_is_one_request_of_the_window() -> None:
    breaker = Breaker(HEALTH.model_copy(update={"unhealthy_after": 100, "failure_ratio": 1.0}))
    for _ in range(9):
        breaker.succeeded(0.0, 0.0)
        breaker.failed(0.0, "broke off", 0.0, answered=True)
    assert breaker.state is BreakerState.CLOSED
    breaker.succeeded(0.0, 0.0)
    breaker.failed(0.0, "broke off", 0.0, answered=True)
    assert breaker.state is BreakerState.OPEN


def test_a_good_probe_makes_it_half_open_after_the_open_time_and_only_a_trial_closes_it() -> None:
    breaker = Breaker(HEALTH)
    fail(breaker, 0.0, 3)
    assert not breaker.probed(3.9)
    assert (breaker.state, breaker.permits) == (BreakerState.OPEN, False)
    assert breaker.probed(4.0)
    for second in range(5, 60):
        assert not breaker.probed(float(second))
        assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.succeeded(60.0, 3.0), "sent before: says nothing about now"
    assert breaker.succeeded(60.0, 59.0)
    assert (breaker.state, breaker.why, breaker.permits) == (BreakerState.CLOSED, None, True)


def test_half_open_lets_a_few_through_at_a_time() -> None:
    breaker = Breaker(HEALTH)
    assert breaker.begin_trial() is None
    fail(breaker, 0.0, 3)
    breaker.probed(4.0)
    first, second = breaker.begin_trial(), breaker.begin_trial()
    assert first is not None
    assert second is not None
    assert not breaker.permits
    first.end()
    first.end()
    assert (breaker.permits, breaker.trials) == (True, 1)
    breaker.failed(5.0, "late", 4.0)
    assert breaker.probed(breaker.until_s)
    assert breaker.begin_trial() is not None
    second.end()
    assert breaker.trials == 1, "a trial of an earlier time gives nothing back"


def test_a_refused_connection_opens_it_at_once_and_the_next_good_probe_ends_that() -> None:
    breaker = Breaker(HEALTH)
    assert breaker.failed(7.0, "connection refused", 7.0, refused=True)
    assert (breaker.state, breaker.why) == (BreakerState.OPEN, "connection refused")
    assert breaker.probed(7.0)
    assert breaker.failed(8.0, "connection refused", 1.0, refused=True), (
        "on trial, a refusal counts whenever it was sent"
    )


def test_re_opening_doubles_the_open_time_up_to_a_bound() -> None:
    breaker = Breaker(HEALTH)
    waits_s = []
    now_s = 0.0
    for _ in range(6):
        waits_s.append(reopen(breaker, now_s))
        now_s = pass_trial(breaker)
    assert waits_s == [4, 8, 16, 30, 30, 30]
    breaker = Breaker(HEALTH)
    fail(breaker, 0.0, 3)
    waits_s = []
    for _ in range(6):
        now_s = breaker.until_s
        breaker.probed(now_s)
        breaker.failed(now_s, "late", now_s)
        waits_s.append(breaker.until_s - now_s)
    assert waits_s == [8, 16, 30, 30, 30, 30], "so does a failed trial"


def test_time_without_failures_takes_the_doublings_back() -> None:
    def after(good_s: float) -> float:
        breaker = Breaker(HEALTH)
        reopen(breaker, 0.0)
        reopen(breaker, pass_trial(breaker))
        assert reopen(breaker, pass_trial(breaker)) == 16
        return reopen(breaker, pass_trial(breaker) + good_s)

    assert [after(good_s) for good_s in (0, 99, 100, 199, 200, 300, 400, 10_000)] == [30, 30, 16, 16, 8, 4, 4, 4]


def test_an_engine_that_comes_and_goes_is_waited_for_from_the_second_time_on() -> None:
    breaker = Breaker(HEALTH)
    waits_s = []
    now_s = 0.0
    for _ in range(5):
        breaker.failed(now_s, "refused", now_s, refused=True)
        waits_s.append(breaker.until_s - now_s)
        now_s = pass_trial(breaker)
    assert waits_s == [0, 4, 8, 16, 30]


def test_a_restart_makes_everything_new_but_for_the_trial() -> None:
    breaker = Breaker(HEALTH)
    reopen(breaker, 0.0)
    reopen(breaker, pass_trial(breaker))
    breaker.restarted(13.0)
    assert breaker.probed(13.0)
    assert breaker.succeeded(14.0, 13.5)
    fail(breaker, 14.0, 2)
    breaker.restarted(15.0)
    fail(breaker, 15.0, 2)
    assert breaker.state is BreakerState.CLOSED
    breaker.failed(16.0, "reset", 14.0)
    assert breaker.state is BreakerState.CLOSED, "that was the old process"
    assert reopen(breaker, 16.0) == 4


def test_requests_sent_before_the_trial_cannot_undo_it() -> None:
    breaker = Breaker(HEALTH)
    fail(breaker, 0.0, 3)
    breaker.probed(4.0)
    for _ in range(20):
        breaker.failed(5.0, "late", 0.0)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.succeeded(6.0, 5.0)
    for _ in range(20):
        breaker.failed(7.0, "late", 3.0)
    assert breaker.state is BreakerState.CLOSED


def test_a_failure_that_is_forgiven_counts_neither_in_a_row_nor_in_the_window() -> None:
    breaker = Breaker(HEALTH)
    for step in range(30):
        fail(breaker, 1000.0 + step / 10, 2)
        breaker.forgive(1000.0 + step / 10)
        breaker.forgive(1000.0 + step / 10)
        assert breaker.failures_in_a_row == 0
    assert breaker.state is BreakerState.CLOSED


def test_an_opening_for_failures_that_are_forgiven_is_undone() -> None:
    breaker = Breaker(HEALTH)
    fail(breaker, 1003.0, 3)
    assert not breaker.counts(1003.0)
    assert breaker.forgive(1003.5)
    assert (breaker.state, breaker.why, breaker.failures_in_a_row) == (BreakerState.CLOSED, None, 2)
    fail(breaker, 1004.0, 1)
    assert breaker.state is BreakerState.OPEN


@pytest.mark.parametrize("cause", ["refused", "stopped", "trial"])
def test_an_opening_for_another_cause_stays(cause: str) -> None:
    breaker = Breaker(HEALTH)
    fail(breaker, 0.0, 2)
    match cause:
        case "refused":
            breaker.failed(1.0, "connection refused", 1.0, refused=True)
        case "stopped":
            breaker.stop(1.0, "its caches are wrong")
        case _:
            fail(breaker, 1.0, 1)
            breaker.probed(100.0)
            assert not breaker.forgive(100.0)
            fail(breaker, 101.0, 1)
    for _ in range(5):
        assert not breaker.forgive(102.0)
    assert breaker.state is BreakerState.OPEN


def test_an_opening_that_another_replica_caused_is_undone_with_its_only_failure() -> None:
    breaker = Breaker(HEALTH)
    breaker.doubt(0.0)
    fail(breaker, 1.0, 1)
    assert breaker.state is BreakerState.OPEN
    assert breaker.forgive(1.5)
    assert breaker.state is BreakerState.CLOSED


class Events(RuleBasedStateMachine):
    """Any sequence of requests, results, probes and restarts, against a second, slow count."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.breaker = Breaker(HEALTH)
        self.on_the_way: list[tuple[float, Trial | None]] = []
        self.requests: list[float] = []
        self.failures: list[float] = []
        self.in_a_row = 0
        self.judged_since_s = 0.0

    def in_window(self, times_s: list[float]) -> int:
        slot_s = HEALTH.window_s / 10
        return sum(int(time_s // slot_s) > int(self.now_s // slot_s) - 10 for time_s in times_s)

    def forget(self) -> None:
        self.requests, self.failures, self.in_a_row = [], [], 0

    @initialize(start_s=st.floats(0, 1e6))
    def begin(self, start_s: float) -> None:
        self.now_s += start_s

    @rule(seconds=st.one_of(st.just(0.0), st.floats(0, 3), st.floats(0, 300)))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.breaker.permits)
    @rule()
    def send(self) -> None:
        trial = self.breaker.begin_trial()
        assert (trial is not None) == (self.breaker.state is BreakerState.HALF_OPEN)
        self.on_the_way.append((self.now_s, trial))

    @precondition(lambda self: self.on_the_way)
    @rule(which=st.integers(0), then=st.sampled_from(["answer", "answer", "fail", "fail", "refuse", "leave"]))
    def end(self, which: int, then: str) -> None:
        breaker, before = self.breaker, self.breaker.state
        sent_s, trial = self.on_the_way.pop(which % len(self.on_the_way))
        of_now = sent_s >= self.judged_since_s
        match then:
            case "answer":
                closed = breaker.succeeded(self.now_s, sent_s)
                breaker.completed()
                assert closed == (before is BreakerState.HALF_OPEN and of_now)
                assert breaker.state is (BreakerState.CLOSED if closed else before)
                if closed:
                    self.forget()
                elif before is BreakerState.CLOSED:
                    self.in_a_row = 0
                    self.requests.append(self.now_s)
            case "fail" | "refuse":
                self.fail(sent_s, of_now, before, refused=then == "refuse")
        if trial is not None:
            trial.end()

    def fail(self, sent_s: float, of_now: bool, before: BreakerState, *, refused: bool) -> None:
        opened = self.breaker.failed(self.now_s, "why", sent_s, refused=refused)
        if before is BreakerState.OPEN or not (of_now or refused):
            assert not opened
            return
        if before is BreakerState.CLOSED:
            self.in_a_row += 1
            self.requests.append(self.now_s)
            self.failures.append(self.now_s)
            requests, failures = self.in_window(self.requests), self.in_window(self.failures)
            too_many = requests >= HEALTH.window_min_requests and failures / requests >= HEALTH.failure_ratio
            assert opened == (refused or self.in_a_row >= HEALTH.unhealthy_after or too_many)
        else:
            assert opened
        if opened:
            assert self.breaker.state is BreakerState.OPEN
            wait_s = self.breaker.until_s - self.now_s
            assert wait_s <= HEALTH.open_max_s + 1e-6
            assert refused or wait_s >= HEALTH.open_s - 1e-6

    @rule()
    def probe(self) -> None:
        before = self.breaker.state
        half_open = self.breaker.probed(self.now_s)
        assert half_open == (before is BreakerState.OPEN and self.now_s >= self.breaker.until_s)
        if half_open:
            self.judged_since_s = self.now_s
            assert self.breaker.permits

    @rule()
    def restart(self) -> None:
        before = self.breaker.state
        self.breaker.restarted(self.now_s)
        self.judged_since_s = self.now_s
        self.forget()
        assert self.breaker.state is before
        assert self.breaker.doublings == 0
        assert before is not BreakerState.OPEN or self.breaker.until_s <= self.now_s

    @invariant()
    def open_permits_nothing(self) -> None:
        if self.breaker.state is BreakerState.OPEN:
            assert not self.breaker.permits

    @invariant()
    def trials_are_counted_and_bounded(self) -> None:
        if self.breaker.state is BreakerState.HALF_OPEN:
            assert 0 <= self.breaker.trials <= HEALTH.trial_requests
            current = [
                trial
                for _, trial in self.on_the_way
                if trial is not None and trial._half_opened == self.breaker._half_opened
            ]
            assert self.breaker.trials == len(current)
        else:
            assert self.breaker.trials == 0

    @invariant()
    def closed_has_no_reason(self) -> None:
        assert (self.breaker.why is None) == (self.breaker.state is BreakerState.CLOSED)


Events.TestCase.settings = hypothesis_settings(max_examples=50, stateful_step_count=60, deadline=None)
TestAnySequence = Events.TestCase


@pytest.mark.parametrize("window_s", [0.0, -1.0])
def test_a_window_must_have_a_length(window_s: float) -> None:
    with pytest.raises(ValueError, match="window_s must be positive"):
        SlidingCount(window_s)


def test_a_sliding_count_keeps_constant_memory_and_the_last_nine_tenths_at_least() -> None:
    count = SlidingCount(10.0)
    for millisecond in range(100_000):
        count.add(millisecond / 1000)
        assert len(count._slots) <= 10
    assert 9_000 <= count.total(99.999) <= 10_000
    assert count.total(200.0) == 0
