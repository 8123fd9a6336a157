"""A name server that does not answer: engines behind other names are served, and the proxy ends in time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from proxy import resolver
from proxy.settings import load_settings
from tests.chaos.conftest import BODY
from tests.chaos.rig.engine import ChaosEngine
from tests.chaos.rig.wire import good_body
from tests.proxy.conftest import serving

SLOW = [f"slow-{number}.test" for number in range(12)]


class HangingNames:
    """``quick.test`` is this machine, all other names are answered after ``release`` only."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.waiting = 0
        self.released = threading.Event()

    def look_up(self, host: str) -> tuple[str, ...]:
        self.asked[host] += 1
        if host != "quick.test":
            self.waiting += 1
            self.released.wait(60.0)
            self.waiting -= 1
        return ("127.0.0.1",)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingNames]:
    names = HangingNames()
    monkeypatch.setattr(resolver, "look_up", names.look_up)
    yield names
    names.released.set()


async def test_names_that_are_not_answered_delay_neither_other_engines_nor_the_shutdown(names: HangingNames) -> None:
    engine = await ChaosEngine().start()
    settings = load_settings(
        None,
        port=0,
        instances=[
            {"name": "quick", "url": f"http://quick.test:{engine.port}"},
            *({"name": host.partition(".")[0], "url": f"http://{host}:{engine.port}"} for host in SLOW),
        ],
        health={"interval_s": 0.05, "timeout_s": 1.0},
        timeouts={"connect_s": 0.5},
        log_level="error",
        grace_s=1.0,
    )
    async with serving(settings) as (app, url):
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
            assert app.core.instances.healthy() == {"quick"}
            for _ in range(10):
                answer = await client.post("/v1/completions", json=BODY)
                assert (answer.status_code, answer.content) == (200, good_body())
            # Requests that meet such a name as well are served by the next engine.
            for instance in app.core.instances:
                instance.up = instance.healthy = True
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.status_code == 200
        assert {names.asked[host] for host in SLOW} == {1}, "one lookup per name, however many probes"
        assert names.waiting == len(SLOW)
    assert names.waiting == len(SLOW), "the proxy has ended, the lookups have not"
    await engine.stop()
