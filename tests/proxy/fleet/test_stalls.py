"""Engines that answer their probes and compute nothing: noticed, left out, and their requests answered by others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.fleet.breaker import BreakerState
from proxy.fleet.instances import Instances
from proxy.fleet.stalls import StallWatch
from proxy.settings import HealthSettings, InstanceSettings
from tests.proxy.conftest import Running, StartProxy
from tests.proxy.stub_engine import StubEngine

GENERATED = "vllm:generation_tokens_total"
BODY = {"model": "stub", "prompt": list(range(300)), "max_tokens": 4}


class Watched:
    """A watch of healthy instances on a clock of its own; ``cuts`` are the URLs whose requests it has cut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 2, after_s: float = 100.0, **more: Any) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("proxy.fleet.stalls.time", SimpleNamespace(monotonic=lambda: self.now_s))
        fleet = [InstanceSettings(name=f"i{n}", url=f"http://127.0.0.1:{n + 1}", **more) for n in range(count)]
        self.instances = Instances(tuple(fleet), HealthSettings())
        self.cuts: list[str] = []
        self.watch = StallWatch(self.instances, after_s, lambda url, _: self.cuts.append(url))
        for each in self.instances:
            self.instances.probed(each)

    def observe(self, figures: int | None, pending_tokens: int = 1, name: str = "i0", *, later_s: float = 0.0) -> None:
        self.now_s += later_s
        self.watch.observe(self.instances[name], () if figures is None else (figures,), pending_tokens)

    def stalled(self, name: str = "i0") -> bool:
        return self.instances[name].breaker.state is BreakerState.OPEN


Watch = Callable[..., Watched]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return lambda **more: Watched(monkeypatch, **more)


def test_an_engine_whose_figures_stay_while_requests_wait_is_left_out(watched: Watch) -> None:
    of = watched()
    of.observe(1)
    of.observe(2, later_s=50)
    of.observe(2, later_s=99.9)
    assert not of.stalled()
    of.observe(2, later_s=0.1)
    assert of.stalled()
    assert of.cuts == ["http://127.0.0.1:1"]
    assert of.instances["i0"].recycle_wanted == "it has computed nothing for 100 s while requests wait"
    assert of.instances.healthy() == {"i1"}


@pytest.mark.parametrize(
    "readings",
    [
        [(1, 1), (2, 1), (2, 1), (3, 1), (3, 1)],  # it computes, slowly
        [(1, 1), (2, 1), (2, 0), (2, 1), (2, 0)],  # nobody waits throughout
        [(2, 1), (2, 1), (2, 1), (2, 1), (2, 1)],  # its figures have never changed
        [(None, 1), (None, 1), (None, 1), (None, 1)],  # it reports none
        [(1, 1), (2, 1), (None, 1), (2, 1)],  # a reading without them
    ],
)
def test_an_engine_that_may_compute_is_left_alone(watched: Watch, readings: list[tuple[int | None, int]]) -> None:
    of = watched()
    for figures, pending_tokens in readings:
        of.observe(figures, pending_tokens, later_s=60)
    assert not of.stalled()
    assert (of.cuts, of.instances["i0"].recycle_wanted) == ([], None)


def test_without_a_time_nothing_is_a_stall(watched: Watch) -> None:
    of = watched(after_s=0.0)
    of.observe(1)
    of.observe(2)
    of.observe(2, later_s=1e6)
    assert not of.stalled()
    of.watch.apply(10.0)
    of.observe(2, later_s=1)
    assert of.stalled()


def test_the_last_engine_keeps_its_requests_but_is_to_be_restarted(watched: Watch) -> None:
    of = watched(count=1)
    of.observe(1)
    of.observe(2)
    of.observe(2, later_s=100)
    assert not of.stalled()
    assert of.cuts == []
    assert of.instances["i0"].recycle_wanted is not None


def test_one_engine_at_a_time_is_restarted(watched: Watch) -> None:
    of = watched(count=3)
    for name in ("i0", "i1"):
        of.observe(1, name=name)
        of.observe(2, name=name)
    of.observe(2, later_s=100)
    of.observe(2, name="i1")
    assert (of.stalled("i0"), of.stalled("i1")) == (True, True)
    assert [each.recycle_wanted is None for each in of.instances] == [False, True, True]


def test_an_engine_that_computes_again_needs_no_restart(watched: Watch) -> None:
    of = watched()
    of.observe(1)
    of.observe(2)
    of.observe(2, later_s=100)
    assert of.instances["i0"].recycle_wanted
    of.observe(3, 0, later_s=1)
    assert of.instances["i0"].recycle_wanted is None
    of.instances["i0"].recycle_wanted = "for another reason"
    of.observe(4, 0)
    assert of.instances["i0"].recycle_wanted == "for another reason"


def test_a_new_process_has_to_compute_first(watched: Watch) -> None:
    of = watched()
    of.observe(1)
    of.observe(2)
    of.watch.restarted("i0")
    of.observe(2)
    of.observe(2, later_s=1000)  # the new process has not computed anything yet
    assert not of.stalled()


async def test_requests_of_an_engine_that_hangs_are_answered_by_another(start_proxy: StartProxy) -> None:
    """Its probes are good throughout."""
    engines = [StubEngine(counters={GENERATED: 1.0}) for _ in range(2)]
    proxy = await start_proxy(
        engines=engines,
        policy={"name": "round_robin"},
        health={"interval_s": 0.05, "stalled_after_s": 0.3, "open_s": 60},
    )
    hung, other = engines
    await computes(proxy, hung)
    hung.mode = "hang"
    answers = [asyncio.create_task(proxy.client.post("/v1/completions", json=BODY)) for _ in range(2)]
    for answer in answers:
        assert (await answer).status_code == 200
    hung_name = next(each.name for each in proxy.core.instances if each.url == hung.url)
    instance = proxy.core.instances[hung_name]
    assert instance.up
    assert not instance.healthy
    assert "computed nothing" in (instance.recycle_wanted or "")
    [row] = [each for each in await proxy.rows() if each["attempts"]]
    assert row["attempts"][0]["instance"] == hung_name
    assert "it has computed nothing for" in row["attempts"][0]["error"]
    await proxy.until(lambda: hung.aborted == 1)
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    assert len(other.seen) == 3


async def computes(proxy: Running, engine: StubEngine) -> None:
    """Wait until the proxy has seen the engine's figures change."""
    probes = engine.probes
    await proxy.until(lambda: engine.probes >= probes + 2)
    engine.counters[GENERATED] += 1
    probes = engine.probes
    await proxy.until(lambda: engine.probes >= probes + 2)
