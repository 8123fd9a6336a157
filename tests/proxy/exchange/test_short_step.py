"""Served streams are learned from, and the learned time is a metric."""

from __future__ import annotations

from typing import Any

import pytest

from policies.costs.short_step import ShortStep
from tests.proxy.conftest import StartProxy
from tests.proxy.stub_engine import StubEngine

BODY = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 20, "stream": True}


@pytest.mark.parametrize(
    ("body", "tokens", "learned"),
    [
        ({}, 20, 1),
        ({}, 4, 0),  # too short to measure
        ({"stream": False}, 20, 0),
        ({"n": 2}, 20, 0),  # two answers at once, of which only the sum is known
        ({"prompt": [[1, 2, 3], [4, 5, 6]]}, 20, 0),
        ({"stream_options": {"include_usage": True}}, 20, 1),
    ],
)
async def test_a_stream_whose_length_is_known_is_learned_from(
    start_proxy: StartProxy, body: dict[str, Any], tokens: int, learned: int
) -> None:
    proxy = await start_proxy(engines=[StubEngine(tokens=tokens)])
    assert (await proxy.client.post("/v1/completions", json={**BODY, **body})).status_code == 200
    await proxy.settled()
    costs = proxy.core.router.state.costs
    assert costs.steps.answers == learned
    assert costs.watch.began("inst-0", 1e12).instance.streams == 1  # this one: the stream has ended


async def test_without_reported_usage_nothing_is_learned(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[StubEngine(tokens=20)], inject_usage=False)
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    await proxy.settled()
    assert proxy.core.router.state.costs.steps.answers == 0


async def test_the_metric_has_no_sample_until_the_time_is_known(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)

    async def samples() -> list[str]:
        text = (await proxy.client.get("/metrics")).text
        assert "# TYPE warmroute_short_prefill_step_seconds gauge" in text
        return [line for line in text.splitlines() if line.startswith("warmroute_short_prefill_step_seconds")]

    assert await samples() == []
    proxy.core.router.state.costs.steps.short_step = ShortStep(0.0125, 0.001)
    assert await samples() == ["warmroute_short_prefill_step_seconds 0.0125"]
