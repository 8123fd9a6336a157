"""An engine whose core hangs: its API server answers every probe, and another engine answers its requests."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil

from tests.engines.conftest import StartProxy
from tests.engines.rig import REAL_ENGINES, Engines, fresh_prompt, until

pytestmark = REAL_ENGINES

HUNG, OTHER = 0, 1


def core(engines: Engines, number: int) -> psutil.Process:
    """The process that schedules and computes."""
    guard = psutil.Process(engines.state(number).pid)
    return next(each for each in guard.children(recursive=True) if "EngineCore" in " ".join(each.cmdline()))


async def test_requests_of_an_engine_whose_core_hangs_are_answered_by_another(
    engines: Engines, start_proxy: StartProxy
) -> None:
    proxy = await start_proxy(
        HUNG,
        OTHER,
        policy={"name": "round_robin"},
        offload={"planner": "never", "params": {}},
        health={"interval_s": 0.5, "timeout_s": 10, "stalled_after_s": 8, "open_s": 1},
    )

    async def row() -> dict[str, Any]:
        rows = (await proxy.client.get("/instances")).json()["instances"]
        found: dict[str, Any] = next(each for each in rows if each["name"] == engines.name(HUNG))
        return found

    for _ in range(6):  # three requests on each, over more than one probe
        await proxy.say(proxy.body(fresh_prompt(64)))
        await asyncio.sleep(0.4)
    bodies = [proxy.body(fresh_prompt(200), stream=bool(number % 2)) for number in range(4)]
    expected = [await engines.post(OTHER, {**body, "stream": False}) for body in bodies]
    hung = core(engines, HUNG)
    hung.suspend()
    try:
        assert (await engines.client.get(f"{engines.file.url(HUNG)}/health")).status_code == 200
        said = await asyncio.gather(*(proxy.say(body) for body in bodies))
        assert [each.text for each in said] == [each["choices"][0]["text"] for each in expected]
        moved = [each for each in await proxy.rows() if each["attempts"]]
        assert {each["attempts"][0]["instance"] for each in moved} == {engines.name(HUNG)}
        assert len(moved) == 2
        assert all("it has computed nothing for" in each["attempts"][0]["error"] for each in moved)
        assert not (await row())["healthy"]
        assert "computed nothing" in (await row())["recycle_wanted"]
    finally:
        hung.resume()
    await engines.until_idle(HUNG)
    await engines.post(HUNG, {"model": "tiny", "prompt": fresh_prompt(64), "max_tokens": 4})

    async def back() -> bool:
        await proxy.say(proxy.body(fresh_prompt(64)))
        found = await row()
        return bool(found["healthy"]) and found["recycle_wanted"] is None

    await until(back, "the engine is used again", 90)
