"""Steps of the wall clock by an hour: no bound, breaker, pin or duration depends on it."""

from __future__ import annotations

import ast
import asyncio
import time
from pathlib import Path

import pytest

from policies.types import RequestView
from proxy.fleet.breaker import BreakerState
from tests.chaos.conftest import BODY, Chaos, StartChaos
from tests.chaos.rig.engine import ChaosEngine, Talk
from tests.chaos.rig.faults import answers
from tests.chaos.rig.wire import MODEL, good_body

HOUR_S = 3600.0

WALL_CLOCK = {
    "proxy/access_log.py": "time of a line",
    "proxy/admin/anthropic_models.py": "display of the time that the engine gives for a model",
    "proxy/admin/breakdown_routes.py": "times of rows",
    "proxy/admin/conditions.py": "display of the time since which a condition is not met",
    "proxy/admin/instance_rows.py": "display of the end of a breaker's open time",
    "proxy/breakdown.py": "start of the process, which its rows have",
    "proxy/clients/certificate.py": "days to the end of a certificate, a date",
    "proxy/clients/inbound.py": "arrived_unix_s of records",
    "proxy/console/account.py": "display of the time of a request",
    "proxy/console/frames.py": "times of rows",
    "proxy/console/top.py": "age of rows, if the proxy gives no time",
    "proxy/discovery/status.py": "display of the time of the last reading",
    "proxy/exchange/exchange.py": "priorities, which several proxies send; a jump changes only an order",
    "proxy/gather/gather.py": "start of a worker's silence",
    "proxy/gather/records.py": "time of an answer",
    "proxy/logs.py": "time of a line",
    "proxy/restart/snapshots.py": "age of a file of an earlier process; one from the future counts as old",
    "proxy/shadow/shadows.py": "time of a decision shown",
    "proxy/sharing/redis_store.py": "names of the hashes of pins; one more is read each way",
    "proxy/sharing/sharing.py": "order of decisions and drain marks over hosts: a later mark is later by any clock",
    "proxy/tokens/template.py": "strftime_now of chat templates",
    "proxy/ui/feed.py": "seconds of the dashboard's charts",
    "proxy/workers/process.py": "display of the start of a worker",
    "proxy/workers/supervisor.py": "display of starts and ends; numbers of rows, by the clock as it was at the start",
}
"""Modules that read the wall clock, and the reason why a step of it does no harm."""


class WallClock:
    """Replaces ``time.time``."""

    def __init__(self) -> None:
        self._real = time.time
        self.step_s = 0.0

    def time(self) -> float:
        return self._real() + self.step_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    clock = WallClock()
    monkeypatch.setattr(time, "time", clock.time)
    return clock


def test_only_displays_and_records_read_the_wall_clock() -> None:
    root = Path(__file__).parents[2]
    readers = set()
    for path in (*root.glob("proxy/**/*.py"), *root.glob("policies/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            module, name = node.value.id, node.attr
            if (module == "time" and name in {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime"}) or (
                module in {"datetime", "date"} and name in {"now", "utcnow", "today", "fromtimestamp"}
            ):
                readers.add(path.relative_to(root).as_posix())
    assert readers == set(WALL_CLOCK), "use time.monotonic(), or list the module with the reason"


MINE = RequestView("", 1, session_id="mine", model=MODEL).context_id or ""
"""Key of the session's pin."""


async def post(proxy: Chaos, session: str = "mine") -> str:
    answer = await proxy.client.post("/v1/completions", json=BODY, headers={"x-session-id": session})
    assert (answer.status_code, answer.content) == (200, good_body())
    return answer.headers["x-warmroute-instance"]


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
async def test_requests_in_flight_and_waiting_are_not_cut_and_have_durations(
    start_chaos: StartChaos, clock: WallClock, step_s: float
) -> None:
    finish = asyncio.Event()

    async def held(talk: Talk) -> None:
        await finish.wait()
        answer = talk.answer()
        await talk.send(b"".join((answer.head, *answer.parts, answer.end)))

    engine = ChaosEngine(fault=held)
    proxy = await start_chaos(engine, limits={"max_in_flight_per_instance": 1, "queue_timeout_s": 30.0})
    posts = [asyncio.create_task(post(proxy)) for _ in range(3)]
    await proxy.until(lambda: engine.busy == 1 and proxy.core.admission.waiting == 2)
    clock.step_s = step_s
    await asyncio.sleep(0.2)
    assert (engine.busy, proxy.core.admission.waiting) == (1, 2)
    finish.set()
    assert await asyncio.gather(*posts) == ["inst-0"] * 3
    for row in await proxy.rows():
        assert all(0 <= duration_ms < 60_000 for duration_ms in row["stages_ms"].values()), row["stages_ms"]
    await proxy.nothing_left()


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
async def test_a_breaker_a_pin_and_the_load_are_as_old_as_before(
    start_chaos: StartChaos, clock: WallClock, step_s: float
) -> None:
    failing = ChaosEngine(fault=answers("500 X"))
    proxy = await start_chaos(
        failing,
        ChaosEngine(),
        health={"interval_s": 0.1, "timeout_s": 5.0, "unhealthy_after": 1, "open_s": 600.0, "open_max_s": 600.0},
        sessions={"ttl_s": 600.0},
        ledger={"recent_half_life_s": 600.0},
    )
    assert await post(proxy) == "inst-1"
    state, breaker = proxy.core.router.state, proxy.instance(0).breaker
    assert breaker.state is BreakerState.OPEN
    recent = state.ledger.load("inst-1", time.monotonic()).recent_tokens
    probes = proxy.engines[1].probes
    clock.step_s = step_s
    await proxy.until(lambda: proxy.engines[1].probes >= probes + 3)
    assert breaker.state is BreakerState.OPEN
    assert state.sessions.instance_of(MINE, time.monotonic()) == "inst-1"
    assert 0.5 * recent < state.ledger.load("inst-1", time.monotonic()).recent_tokens <= recent
    assert proxy.instance(1).healthy
    assert proxy.core.instances.all_listed(60.0)
    # The only time of day that is shown follows the clock.
    rows = (await proxy.client.get("/instances")).json()["instances"]
    assert 0 < rows[0]["breaker"]["until_unix_s"] - clock.time() <= 600.0
    assert await post(proxy) == "inst-1"
    await proxy.nothing_left()
