"""A process that lacks CPU must not mark its engines as down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from proxy.loop_lag import LoopLag
from tests.proxy.conftest import StartProxy


@contextmanager
def opened(lag: LoopLag) -> Iterator[LoopLag]:
    lag.open()
    try:
        yield lag
    finally:
        lag.close()


async def test_a_loop_on_time_explains_nothing_and_one_that_stood_still_does() -> None:
    with opened(LoopLag()) as lag:
        await asyncio.sleep(0.3)
        before_s = lag.late_s(10)
        time.sleep(0.6)  # noqa: ASYNC251 - that is the fault
        assert lag.late_s(10) - before_s > 0.4, "known at once, before the next tick"
        await asyncio.sleep(0)
        assert lag.explains(1.0)
        assert not lag.explains(20.0)


async def test_it_forgets() -> None:
    with opened(LoopLag()) as lag:
        time.sleep(0.5)  # noqa: ASYNC251
        await asyncio.sleep(0)
        for _ in range(20):  # this machine may be late by itself
            await asyncio.sleep(0.3)
            if lag.late_s(0.2) < 0.2:
                break
        else:
            raise AssertionError(f"late by {lag.late_s(0.2)} s in the last 0.2 s, for 6 s")
        assert lag.late_s(10) > 0.3


async def test_probes_that_are_late_for_lack_of_cpu_take_no_instance_out(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(3, health={"interval_s": 0.05, "timeout_s": 0.3, "unhealthy_after": 1})
    for engine in proxy.engines:
        engine.health_delay_s = 0.2
    for _ in range(12):
        time.sleep(0.3)  # noqa: ASYNC251 - proxy, engines and test share this loop
        await asyncio.sleep(0.02)
    assert len(proxy.core.instances.healthy()) == 3
    for engine in proxy.engines:
        engine.health_delay_s = 1.0
    await proxy.until(lambda: not proxy.core.instances.healthy())  # on time, it does count
