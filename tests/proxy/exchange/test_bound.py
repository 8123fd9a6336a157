"""The bound on the time of a part of a task behaves as ``asyncio.timeout``."""

from __future__ import annotations

import asyncio

import pytest

from proxy.exchange.bound import Bound


async def test_the_end_of_the_time_raises_and_leaves_the_task_as_it_was() -> None:
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(TimeoutError), Bound(asyncio.get_running_loop(), 0.001):
        await asyncio.Event().wait()
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_work_that_ends_in_time_is_not_disturbed_later() -> None:
    with Bound(asyncio.get_running_loop(), 0.001):
        pass
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("seconds", [60.0, 0.0], ids=["long before the end of the time", "at the end of the time"])
async def test_a_cancellation_from_outside_passes_through(seconds: float) -> None:
    entered = asyncio.Event()

    async def bounded() -> None:
        with Bound(asyncio.get_running_loop(), seconds):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(bounded())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_errors_of_the_work_pass_through() -> None:
    with pytest.raises(ValueError, match="own"), Bound(asyncio.get_running_loop(), 60.0):
        raise ValueError("own")
