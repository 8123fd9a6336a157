"""Answers of engines teach their slowness, which operators see."""

from __future__ import annotations

import pytest

from tests.proxy.conftest import StartProxy
from tests.proxy.stub_engine import StubEngine

PROMPT = list(range(1, 3_001))
BODY = {"model": "stub", "prompt": PROMPT, "max_tokens": 4, "stream": True}


async def test_the_end_of_an_answer_compares_its_engine_with_what_was_expected(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await start_proxy(engines=[StubEngine(tokens=4)])
    slowness, seen = proxy.core.router.state.costs.slowness, list[tuple[str, float, float]]()
    monkeypatch.setattr(type(slowness), "observe", lambda _, *observed: seen.append(observed))
    assert (await proxy.client.post("/v1/completions", json=BODY)).status_code == 200
    await proxy.settled()
    [(instance, expected_s, actual_s)] = seen
    assert instance == "inst-0"
    assert expected_s > 0
    assert actual_s > 0
    assert (await proxy.client.post("/v1/completions", json={**BODY, "prompt": [1, 2, 3]})).status_code == 200
    assert (await proxy.client.post("/v1/completions", json={**BODY, "stream": False})).status_code == 200
    await proxy.settled()
    assert len(seen) == 1  # a short prompt and an answer without a first token of its own say nothing


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
        slowness.observe("inst-0", 1.0, 1.0)
        slowness.observe("inst-1", 1.0, 4.0)
    samples, rows = await shown()
    assert [float(line.split()[-1]) for line in samples] == pytest.approx([0.5, 2.0])
    assert rows == pytest.approx([0.5, 2.0])
    explained = (await proxy.client.post("/explain", json={"model": "stub", "prompt": PROMPT})).json()
    by_name = {each["instance"]: each for each in explained["decisions"]["warm"]["scores"]}
    assert by_name["inst-1"]["inputs"]["slowness"] == pytest.approx(2.0)
    assert explained["decisions"]["warm"]["instance"] == "inst-0"
