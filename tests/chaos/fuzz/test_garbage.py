"""Objects of requests and connections are freed at their end, without the garbage collector, which runs rarely."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.chaos.conftest import BODY, StartChaos
from tests.chaos.rig import faults
from tests.chaos.rig.client import RawClient, post
from tests.chaos.rig.engine import ChaosEngine, Fault, good
from tests.chaos.rig.faults import Moment, answers, at

OURS = {
    "EngineConnection",
    "EngineAnswer",
    "Exchange",
    "Inbound",
    "ProxyProtocol",
    "StreamRelay",
    "UsageFilter",
    "Routed",
}
REQUESTS = 12

SCENARIOS: dict[str, Fault] = {
    "answered": good,
    "answered, connection closed": faults.says_close,
    "refused": answers("400 Bad Request"),
    "failed": at(Moment.BEFORE_HEADERS, faults.close),
    "broken": at(Moment.MID_STREAM, faults.close),
    "left": at(Moment.MID_STREAM, faults.hang),
}


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    # What tests before left alive in the same process, a million objects and the last proxies in FastAPI's cache among
    # them, is then not among `gc.get_objects`, nor read by the next collection.
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def left() -> Counter[str]:
    return Counter(name for each in gc.get_objects() if (name := type(each).__name__) in OURS)


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", SCENARIOS)
async def test_nothing_of_ours_waits_for_the_collector(start_chaos: StartChaos, name: str, stream: bool) -> None:
    engine = ChaosEngine(SCENARIOS[name])
    proxy = await start_chaos(
        engine, health={"interval_s": 60.0, "timeout_s": 10.0, "unhealthy_after": 1000, "window_min_requests": 1000}
    )
    body = post(json.dumps({**BODY, "stream": stream}).encode(), "connection: close")
    for _ in range(REQUESTS):
        async with RawClient(proxy.port) as client:
            await client.send(body)
            if name == "left":
                await proxy.until(lambda: engine.busy == 1)
            else:
                await client.answer()
        await proxy.nothing_left()

    # One idle connection to the engine, the client's own for reading statistics, and objects of the last request.
    for _ in range(200):
        if all(count <= 3 for count in left().values()):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(left())
