"""Batches of finished requests: the limit, the timer, reading, the end, and an item that fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest

from proxy.records.batch import RecordBatch

log = logging.getLogger("warmroute.test_batch")


class Timer:
    def __init__(self, timers: list[Timer], callback: Callable[[], None]) -> None:
        self.callback = callback
        self.cancel = partial(timers.remove, self)


class Loop:
    """Timers of an event loop, which the test fires. Those that are not cancelled stay."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []
        self.delays_s: list[float] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        self.delays_s.append(delay_s)
        self.timers.append(Timer(self.timers, callback))
        return self.timers[-1]

    def fire(self) -> None:
        (timer,) = self.timers
        timer.callback()


class Recorded(list[int]):
    """The recorded items; ``failing`` cannot be recorded."""

    def __init__(self, loop: Loop | None = None, *, opened: bool = True, failing: int | None = None) -> None:
        self.batch = RecordBatch(self._record, log, lambda item: f"item {item} is lost")
        self._failing = failing
        if opened:
            self.batch.open(cast(asyncio.AbstractEventLoop | None, loop))

    def _record(self, item: int) -> None:
        if item == self._failing:
            raise ValueError("a fault")
        self.append(item)

    def add(self, *items: int) -> None:
        for item in items:
            self.batch.add(item)


@pytest.mark.parametrize("loop", [None, Loop()])
def test_sixteen_items_are_recorded_together_and_leave_no_timer(loop: Loop | None) -> None:
    recorded = Recorded(loop)
    recorded.add(*range(15))
    assert recorded == []
    recorded.add(15)
    assert recorded == [*range(16)]
    recorded.add(16)
    assert recorded == [*range(16)], "the next batch has its own limit"
    if loop is not None:
        assert len(loop.timers) == 1, "that of item 16"


def test_one_timer_records_fewer_items() -> None:
    loop = Loop()
    recorded = Recorded(loop)
    recorded.add(1, 2)
    assert loop.delays_s == [0.1]
    loop.fire()
    assert recorded == [1, 2]
    assert not loop.timers
    recorded.add(3)
    loop.fire()
    assert recorded == [1, 2, 3]
    assert loop.delays_s == [0.1, 0.1]


def test_a_reader_gets_all_items_once() -> None:
    loop = Loop()
    recorded = Recorded(loop)
    recorded.add(1, 2)
    recorded.batch.settle()
    assert recorded == [1, 2]
    assert not loop.timers
    recorded.batch.settle()
    assert recorded == [1, 2]


def test_an_item_that_may_not_wait_is_recorded_after_those_that_wait() -> None:
    loop = Loop()
    recorded = Recorded(loop)
    recorded.add(1, 2)
    recorded.batch.add(3, at_once=True)
    assert recorded == [1, 2, 3]
    recorded.batch.add(4, at_once=True)
    assert recorded == [1, 2, 3, 4]
    assert loop.delays_s == [0.1], "a batch that ends at once needs no timer"
    assert not loop.timers


def test_nothing_waits_before_the_start() -> None:
    recorded = Recorded(opened=False)
    recorded.add(1)
    assert recorded == [1]


def test_nothing_waits_after_the_end() -> None:
    loop = Loop()
    recorded = Recorded(loop)
    recorded.add(1, 2)
    recorded.batch.close()
    assert recorded == [1, 2]
    recorded.add(3)
    assert recorded == [1, 2, 3]
    assert not loop.timers


def test_an_item_that_fails_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    recorded = Recorded(loop, failing=2)
    recorded.add(1, 2, 3)
    loop.fire()
    assert recorded == [1, 3]
    ((name, level, message),) = caplog.record_tuples
    assert (name, level, message) == (log.name, logging.ERROR, "item 2 is lost")
    assert "a fault" in caplog.text
    recorded.add(4)
    loop.fire()
    assert recorded == [1, 3, 4]


def test_items_added_while_others_are_recorded_wait_for_the_next_batch() -> None:
    added: list[int] = []

    def record(item: int) -> None:
        added.append(item)
        if item == 1:
            batch.add(3)

    batch = RecordBatch(record, log, str)
    batch.open(None)
    batch.add(1)
    batch.add(2)
    batch.settle()
    assert added == [1, 2]
    batch.settle()
    assert added == [1, 2, 3]
