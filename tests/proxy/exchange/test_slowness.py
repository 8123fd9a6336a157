"""Answers of engines teach their slowness, which operators see."""

from __future__ import annotations

import time
from typing import Any

import pytest

from policies.costs.slowness import Slowness
from tests.proxy.conftest import StartProxy
from tests.proxy.stub_engine import StubEngine

PROMPT = list(range(1, 3_001))
BODY = {"model": "stub", "prompt": PROMPT, "max_tokens": 4, "stream": True}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, float]]:
    """Instance, expected and actual seconds of what was observed."""
    seen = list[tuple[str, float, float]]()
    monkeypatch.setattr(Slowness, "observe", lambda _, *observed: seen.append(observed[:3]))
    return seen


async def test_the_end_of_an_answer_compares_its_engine_with_what_was_expected(
    start_proxy: StartProxy, compared: list[tuple[str, float, float]]
) -> None:
    proxy = await start_proxy(engines=[StubEngine(tokens=4)])
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    await proxy.settled()
    [(instance, expected_s, actual_s)] = compared
    assert instance == "inst-0"
    assert expected_s == pytest.approx(proxy.core.router.state.costs.prefill.seconds(3_000, 0))
    assert actual_s > 0


@pytest.mark.parametrize(
    "change",
    [
        {"stream": False},  # without a first token of its own
        {"prompt": [PROMPT, PROMPT]},  # the first token of one says nothing of the other
        {"prompt": [1, 2, 3]},
    ],
)
async def test_what_is_no_single_prefill_is_not_compared(
    start_proxy: StartProxy, compared: list[tuple[str, float, float]], change: dict[str, Any]
) -> None:
    proxy = await start_proxy(engines=[StubEngine(tokens=4)])
    assert (await proxy.client.post("/v1/completions", json={**BODY, **change})).status_code == 200
    await proxy.settled()
    assert compared == []


async def test_an_engine_that_restarted_meanwhile_is_not_compared(
    start_proxy: StartProxy, compared: list[tuple[str, float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await start_proxy(engines=[StubEngine(tokens=4)])
    routing = proxy.core.router.routing
    began = routing.began

    def restart(*given: Any, **more: Any) -> None:
        began(*given, **more)
        routing.state.restarted("inst-0")

    monkeypatch.setattr(routing, "began", restart)
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    await proxy.settled()
    assert compared == []


async def test_the_slowness_of_instances_is_shown_once_it_is_known(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(2)

    async def shown() -> tuple[list[str], list[float | None]]:
        text = (await proxy.client.get("/metrics")).text
        assert "# TYPE warmroute_instance_slowness_ratio gauge" in text
        samples = [line for line in text.splitlines() if line.startswith("warmroute_instance_slowness_ratio{")]
        rows = (await proxy.client.get("/instances")).json()["instances"]
        return samples, [row["slowness"] for row in rows]

    assert await shown() == ([], [None, None])
    slowness = proxy.core.router.state.costs.slowness
    for _ in range(20):
        slowness.observe("inst-0", 1.0, 1.0, time.monotonic())
        slowness.observe("inst-1", 1.0, 4.0, time.monotonic())
    samples, rows = await shown()
    assert [float(line.split()[-1]) for line in samples] == pytest.approx([0.5, 2.0])
    assert rows == pytest.approx([0.5, 2.0])
    explained = (await proxy.client.post("/explain", json={"model": "stub", "prompt": PROMPT})).json()
    by_name = {each["instance"]: each for each in explained["decisions"]["warm"]["scores"]}
    assert by_name["inst-1"]["inputs"]["slowness"] == pytest.approx(2.0)
    assert explained["decisions"]["warm"]["instance"] == "inst-0"
