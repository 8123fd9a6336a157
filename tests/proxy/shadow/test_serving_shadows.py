"""Shadow decisions of a serving proxy: figures, switch, reload, metrics, and requests that do not notice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.settings import SettingsError, load_settings
from tests.policies.test_registry import declare
from tests.proxy.conftest import Running, StartProxy, ledger_is_zero, serving
from tests.proxy.fleet_client import KEYS, ask, asked_of
from tests.proxy.stub_engine import StubEngine

INSTANCES = [{"url": "http://127.0.0.1:9"}]


async def shadows(running: Running, requests: int) -> dict[str, Any]:
    """``GET /shadow`` once the shadows have decided about so many requests."""
    core = running.core
    await running.until(lambda: core.shadows.requests >= requests and not core.shadows.waiting)
    answer: dict[str, Any] = (await running.client.get("/shadow")).json()
    return answer


async def test_a_proxy_without_shadows_says_so(start_proxy: StartProxy) -> None:
    running = await start_proxy(2)
    await asked_of(running, 2)
    answer = (await running.client.get("/shadow")).json()
    assert (answer["enabled"], answer["requests"], answer["policies"], answer["latest"]) == (False, 0, [], [])


async def test_shadows_change_no_live_decision(start_proxy: StartProxy) -> None:
    every = {"policies": ["warm", "random", "least_loaded"], "planners": ["threshold"], "admission": ["session_cap"]}
    plain = await start_proxy(3, policy={"name": "round_robin"})
    watched = await start_proxy(3, policy={"name": "round_robin"}, shadow=every)
    order = []
    for running in (plain, watched):
        answers = [await ask(running) for _ in range(9)]
        order.append([answer.headers["x-warmroute-instance"] for answer in answers])
        assert ledger_is_zero(await running.settled())
    assert order[0] == order[1]
    answer = await shadows(watched, 9)
    assert (answer["enabled"], answer["requests"], answer["skipped"]) == (True, 9, 0)
    rows = {row["name"]: row for row in answer["policies"]}
    assert [(name, row["part"], row["requests"]) for name, row in rows.items()] == [
        ("warm", "policy", 9),
        ("random", "policy", 9),
        ("least_loaded", "policy", 9),
        ("threshold", "planner", 9),
        ("session_cap", "admission", 9),
    ]
    assert rows["threshold"]["agreement"] == rows["session_cap"]["agreement"] == 1.0
    assert rows["session_cap"]["answers"] == {"sent": 9}
    newest = answer["latest"][0]
    assert newest["live"]["instance"] == order[1][-1]
    assert newest["live"]["reason"] == "next_in_turn"
    assert newest["live"]["admission"] == "sent"
    assert set(newest["shadow"]) == set(rows)


async def test_agreement_is_counted_by_instance(start_proxy: StartProxy) -> None:
    running = await start_proxy(2, policy={"name": "round_robin"}, shadow={"policies": ["round_robin", "warm"]})
    prompt = list(range(4_000))
    for _ in range(6):
        assert (await ask(running, prompt=prompt)).status_code == 200
    rows = {row["name"]: row for row in (await shadows(running, 6))["policies"]}
    assert rows["round_robin"]["agreed"] == 6
    # `warm` would keep the prompt where it is cached, after the first request.
    assert 0 < rows["warm"]["agreed"] < 6
    assert rows["warm"]["regret_s"]["total"] > 0
    assert rows["warm"]["hit_tokens_given_away"] > 0
    text = (await running.client.get("/metrics")).text
    agreed = rows["warm"]["agreed"]
    series = 'warmroute_shadow_requests_total{agreed="%s",part="policy",policy="warm"} %d.0'
    assert series % ("true", agreed) in text
    assert series % ("false", 6 - agreed) in text
    assert 'warmroute_shadow_decision_seconds_count{part="policy",policy="warm"} 6.0' in text
    assert "warmroute_shadow_skipped_total 0.0" in text


async def test_admission_rules_are_asked_where_the_live_rule_holds_nothing(start_proxy: StartProxy) -> None:
    running = await start_proxy(
        2,
        admission={"name": "never_hold"},
        shadow={"admission": [{"name": "session_cap", "params": {"sessions": 1}}, "working_set"]},
    )
    running.engines[0].streams_end = running.engines[1].streams_end = released = asyncio.Event()
    streams = [asyncio.create_task(ask(running, stream=True)) for _ in range(4)]
    await running.until(lambda: sum(engine.running for engine in running.engines) == 4)
    released.set()
    assert [answer.status_code for answer in await asyncio.gather(*streams)] == [200] * 4
    await running.until(lambda: running.core.shadows.figures["session_cap"].requests == 4)
    rows = {row["name"]: row for row in (await shadows(running, 0))["policies"]}
    assert rows["session_cap"]["answers"] == {"sent": 1, "held": 3}
    assert rows["session_cap"]["agreed"] == 1
    assert rows["working_set"]["requests"] == 4


async def test_a_third_party_policy_that_fails_disturbs_nobody(
    start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_shadow.py").write_text(
        "class Policy:\n    name = 'acme'\n    def choose(self, request, fleet):\n        raise KeyError('acme')\n"
    )
    declare(tmp_path, "acme-shadow", "[warmroute.routing]\nacme = acme_shadow:Policy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    running = await start_proxy(2, shadow={"policies": ["acme", "lmetric"]})
    await asked_of(running, 3)
    rows = {row["name"]: row for row in (await shadows(running, 3))["policies"]}
    assert (rows["acme"]["requests"], rows["acme"]["failures"]) == (0, 3)
    assert rows["acme"]["last_error"] == "KeyError: 'acme'"
    assert rows["lmetric"]["requests"] == 3
    assert (await running.client.get("/stats")).json()["policy_failures"]["failures"] == []
    assert (
        'warmroute_shadow_failures_total{part="policy",policy="acme"} 3.0'
        in (await running.client.get("/metrics")).text
    )


async def test_shadows_are_switched_over_http(start_proxy: StartProxy) -> None:
    running = await start_proxy(2, shadow={"policies": ["lmetric"]})
    await asked_of(running, 2)
    await shadows(running, 2)
    variants = [{"name": "linear", "label": "linear-a"}, {"name": "linear", "params": {"alpha": 2.0}}]
    answer = await running.client.put("/shadow", json={"policies": ["lmetric", *variants], "planners": ["cost_model"]})
    assert answer.status_code == 200, answer.text
    assert [(row["name"], row["requests"]) for row in answer.json()["policies"]] == [
        ("lmetric", 2),
        ("linear-a", 0),
        ("linear", 0),
        ("cost_model", 0),
    ]
    await asked_of(running, 2)
    assert {row["name"]: row["requests"] for row in (await shadows(running, 4))["policies"]}["linear-a"] == 2
    only = await running.client.put("/shadow", json={"policies": []})
    assert [row["name"] for row in only.json()["policies"]] == ["cost_model"]
    assert 'policy="lmetric"' not in (await running.client.get("/metrics")).text
    assert (await running.client.put("/shadow", json={"planners": []})).json()["enabled"] is False


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"policies": ["wram"]}, "unknown routing policy 'wram'; known: "),
        ({"admission": ["warm"]}, "unknown admission rule 'warm'; known: "),
        ({"policies": ["warm", "warm"]}, "given more than once: warm; set label to distinguish them"),
        ({"policies": [{"name": "warm", "params": {"speed": 1}}]}, "has no parameter 'speed'"),
        ({"policies": [{"name": "warm", "label": f"w{n}"} for n in range(17)]}, "at most 16"),
        ({"rules": []}, "body.rules: unknown key; known: policies, planners, admission"),
    ],
)
async def test_an_invalid_switch_names_the_problem_and_changes_nothing(
    start_proxy: StartProxy, body: dict[str, Any], says: str
) -> None:
    running = await start_proxy(1, shadow={"policies": ["lmetric"]})
    answer = await running.client.put("/shadow", json=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert "Value error" not in answer.text
    assert [row["name"] for row in (await running.client.get("/shadow")).json()["policies"]] == ["lmetric"]


def test_settings_with_an_unknown_shadow_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"shadow: .*unknown offload planner 'warm'; known: "):
        load_settings(None, instances=INSTANCES, shadow={"planners": ["warm"]})


async def test_a_reload_switches_changed_shadows_and_keeps_those_of_the_api(tmp_path: Path) -> None:
    path = tmp_path / "proxy.yaml"
    engine = await StubEngine().start()
    content: dict[str, Any] = {"port": 0, "instances": [{"url": engine.url}], "keys": KEYS, "log_level": "warning"}
    content |= {"shadow": {"policies": ["lmetric"]}}
    path.write_text(yaml.safe_dump(content))
    try:
        async with serving(load_settings(path)) as (app, _):
            reloader, own = app.operations.reloader, app.core.shadows
            reloader.load = lambda: load_settings(path)
            path.write_text(yaml.safe_dump(content | {"shadow": {"policies": ["lmetric", "warm"]}}))
            report = await reloader.reload()
            assert (report.result, [change.key for change in report.changes]) == (
                "applied",
                ["shadow.policies.warm.name", "shadow.policies.warm.label"],
            )
            assert list(own.figures) == ["lmetric", "warm"]
            own.switch(load_settings(path, shadow={"policies": ["linear"]}).shadow)
            path.write_text(yaml.safe_dump(content | {"shadow": {"policies": ["lmetric", "warm"]}, "grace_s": 7.0}))
            await reloader.reload()
            assert list(own.figures) == ["linear"]
    finally:
        await engine.stop()


async def test_no_task_is_left_after_shutdown() -> None:
    engine = await StubEngine().start()
    settings = load_settings(
        None, port=0, instances=[{"url": engine.url}], log_level="warning", shadow={"policies": ["warm"]}
    )
    try:
        async with serving(settings):
            assert "shadows" in {task.get_name() for task in asyncio.all_tasks()}
        assert "shadows" not in {task.get_name() for task in asyncio.all_tasks()}
    finally:
        await engine.stop()
