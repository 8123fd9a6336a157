"""Settings that change while the proxy serves: over HTTP and by SIGHUP."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from inspect import isasyncgen, isframe
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from pydantic import BaseModel

from policies.registry import parameters
from proxy.access.keys import digest_of
from proxy.core import Core
from proxy.request.parse import Endpoint
from proxy.settings import Settings, load_settings
from proxy.settings.diff import LIVE
from tests.proxy.conftest import Running, ledger_is_zero, serving
from tests.proxy.fleet_client import ADMIN, KEYS, ask, asked_of, reloads, was_completed
from tests.proxy.stub_engine import StubEngine


class Reloadable(Running):
    """A proxy whose settings are in a file."""

    path: Path
    settings: dict[str, Any]

    async def reload(self, *, status: int = 200, dry_run: bool = False, **changes: Any) -> dict[str, Any]:
        """Change sections of the file, then reload it."""
        self.settings |= changes
        self.path.write_text(yaml.safe_dump(self.settings), encoding="utf-8")
        answer = await self.client.post("/reload", params={"dry_run": dry_run})
        assert answer.status_code == status
        report: dict[str, Any] = answer.json()
        return report

    def fleet(self, **named: StubEngine) -> list[dict[str, Any]]:
        """Instances in the file's format."""
        return [{"name": name, "url": each.url} for name, each in named.items()]


StartReloadable = Callable[..., Awaitable[Reloadable]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[StartReloadable]:
    async with contextlib.AsyncExitStack() as stack:

        async def started(count: int = 2, spare: int = 0, **settings: Any) -> Reloadable:
            engines = [await StubEngine().start() for _ in range(count + spare)]
            for each in engines:
                stack.push_async_callback(each.stop)
            written = {
                "port": 0,
                "instances": [{"name": f"inst-{i}", "url": each.url} for i, each in enumerate(engines[:count])],
                "policy": {"name": "round_robin"},
                "health": {"interval_s": 0.1},
                "log_level": "warning",
                "keys": KEYS,
                **settings,
            }
            path = tmp_path / "proxy.yaml"
            path.write_text(yaml.safe_dump(written), encoding="utf-8")
            load = partial(load_settings, path)
            app, url = await stack.enter_async_context(serving(load()))
            app.operations.reloader.load = load
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, headers=ADMIN)
            )
            running = Reloadable(app, url, engines, client)
            running.path, running.settings = path, written
            return running

        yield started


EFFECTS: dict[str, tuple[Any, Callable[[Core], Any], Any]] = {
    "policy": (
        {"name": "linear", "params": {"alpha": 7.0}},
        lambda core: parameters(core.router.policy).get("alpha"),
        7.0,
    ),
    "offload": (
        {
            "planner": "threshold",
            "prefill_timeout_s": 3.0,
            "abandoned_s": 4.0,
            "hold_s": 5.0,
            "leak_share": 0.7,
        },
        lambda core: (
            core.router.planner.name,
            core.handoff._settings.prefill_timeout_s,
            core.abandoned._bound_s,
            core.router.routing.hold_s,
            core.leaks._leak_share,
        ),
        ("threshold", 3.0, 4.0, 5.0, 0.7),
    ),
    "admission": (
        {"name": "session_cap", "params": {"sessions": 9}, "max_hold_s": 8.0, "max_held": 7, "reject_above_s": 6.0},
        lambda core: [core.holding.rule_as_dict()[key] for key in ("name", "max_hold_s", "max_held", "reject_above_s")],
        ["session_cap", 8.0, 7, 6.0],
    ),
    "classes": (
        {"medium_tokens": 10, "heavy_tokens": 20},
        lambda core: (core.router.routing.thresholds.medium_tokens, core.router.routing.thresholds.heavy_tokens),
        (10, 20),
    ),
    "ledger": ({"recent_half_life_s": 9.0}, lambda core: core.router.state.ledger._half_life_s, 9.0),
    "sessions": (
        {"ttl_s": 5.0, "capacity": 7, "headers": ["X-Mine"], "prefix_capacity": 8},
        lambda core: (
            core.router.state.sessions._ttl_s,
            core.router.state.sessions._capacity,
            core.session_sources.order[0],
            core.prefix_chains._capacity,
        ),
        (5.0, 7, "x-mine", 8),
    ),
    "cache_killers": (
        {"conversations": 3, "min_tokens": 5, "kept": 4},
        lambda core: (core.cache_killers._settings.conversations, core.cache_killers._found.maxlen),
        (3, 4),
    ),
    "shadow": (
        {"policies": ["lmetric"], "queue": 7},
        lambda core: (list(core.shadows.figures), core.shadows._bound),
        (["lmetric"], 7),
    ),
    "normalize": (
        {"chat": ["cch"]},
        lambda core: core.normalizer._rules,
        {"/v1/chat/completions": ("cch",)},
    ),
    "timeouts": (
        {"connect_s": 0.7, "idle_s": 8.0},
        lambda core: (core.upstream.connect_timeout_s, core.settings.timeouts.idle_s),
        (0.7, 8.0),
    ),
    "health": (
        {"timeout_s": 0.9, "unhealthy_after": 9},
        lambda core: (
            core.control.timeout_s,
            core.instances._health.unhealthy_after,
            core.instances["inst-0"].breaker._settings.unhealthy_after,
        ),
        (0.9, 9, 9),
    ),
    "limits": (
        {"max_in_flight": 3, "retry_ratio": 0.9, "body_bytes": 2048, "prompts": 5, "connections": 99},
        lambda core: (
            core.admission._limits.max_in_flight,
            core.retries._ratio,
            core.clients.body_bytes,
            core.router._settings.limits.prompts,
            core.clients.connections,
        ),
        (3, 0.9, 2048, 5, 99),
    ),
    "fields": ({"allow": ["priority"]}, lambda core: core.router._allowed_fields, {"priority"}),
    "models": (
        {"aliases": {"other": "stub"}},
        lambda core: core.router.parse(Endpoint.COMPLETIONS, b'{"model":"other","prompt":"x"}').fields.model,
        "stub",
    ),
    "pass_through": ({"paths": ["/v1/other"]}, lambda core: core.other_paths.entry(b"/v1/other"), "/v1/other"),
    "cors": ({"allowed_origins": ["*"]}, lambda core: core.cors.enabled, True),
    "forward_headers": (["x-mine"], lambda core: core.forwarding._names, ((b"x-mine", "x-mine"),)),
    "engine_key": (
        "for-the-engines",
        lambda core: core.forwarding.authorization(core.instances["inst-0"].settings),
        "Bearer for-the-engines",
    ),
    "inject_usage": (False, lambda core: core.settings.inject_usage, False),
    "grace_s": (3.0, lambda core: core.settings.grace_s, 3.0),
    "drain_delay_s": (0.01, lambda core: core.settings.drain_delay_s, 0.01),
    "log_level": ("error", lambda core: logging.getLogger().level, logging.ERROR),
    "resume": ({"max_resumes": 5}, lambda core: core.settings.resume.max_resumes, 5),
    "admin": ({"open_metrics": True}, lambda core: core.access._admin.open_metrics, True),
    "keys": (
        {"admin": [*KEYS["admin"], {"name": "more", "sha256": "ab" * 32}]},
        lambda core: [name for name, _ in core.keys._admin],
        ["ops", "more"],
    ),
    "fairness": (
        {"tenant_header": "X-Tenant"},
        lambda core: core.tenants.of_request(None, {b"x-tenant": b"bob"}).name,
        "bob",
    ),
}


@pytest.fixture
def log_levels() -> Any:
    loggers = [logging.getLogger(name) for name in ("", "uvicorn", "uvicorn.error")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def test_every_live_section_has_its_effect_tested() -> None:
    sections = {each.partition(".")[0] for each in LIVE}
    assert sections - {"instances", "engine_key_env"} == set(EFFECTS)
    assert sections <= set(Settings.model_fields)


@pytest.mark.usefixtures("log_levels")
async def test_every_live_section_takes_effect(start: StartReloadable) -> None:
    running = await start(1)
    before = {section: observe(running.core) for section, (_, observe, _) in EFFECTS.items()}
    report = await running.reload(**{section: value for section, (value, _, _) in EFFECTS.items()})
    after = {section: observe(running.core) for section, (_, observe, _) in EFFECTS.items()}
    assert after == {section: expected for section, (_, _, expected) in EFFECTS.items()}
    assert not [section for section in EFFECTS if before[section] == after[section]]
    assert (report["result"], report["needs_restart"]) == ("applied", [])
    assert reloads((await running.client.get("/metrics")).text) == {"applied": 1.0, "unchanged": 0.0, "refused": 0.0}


@pytest.fixture
def _all_objects() -> Iterator[None]:
    """The collector sees the objects from before the first test too, which tests/conftest.py sets aside."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("log_levels", "_all_objects")
async def test_no_component_keeps_a_section_that_is_no_longer_effective(start: StartReloadable) -> None:
    running = await start(1)
    old = running.core.settings
    sections = {
        name: getattr(old, name)
        for name in {each.partition(".")[0] for each in LIVE}
        if isinstance(getattr(old, name), BaseModel)
    }
    assert len(sections) >= 10
    await running.reload(**{section: value for section, (value, _, _) in EFFECTS.items()})
    gc.collect()
    # The lifespan's frame keeps a reference to the settings that opened the admin listener; that one does not move.
    known = (sections, vars(old))
    # One search for all sections: each looks at every object of the process.
    keepers = [each for each in gc.get_referrers(*sections.values()) if not any(each is one for one in known)]
    assert [each for each in keepers if not isframe(each) and not isasyncgen(each)] == []


async def test_what_cannot_change_while_it_serves_is_reported_and_left(start: StartReloadable) -> None:
    running = await start(1)
    port = running.core.settings.port
    report = await running.reload(
        host="0.0.0.0", port=1, index={"block_tokens": 8}, admin={"port": 1, "open_metrics": True}, grace_s=7.0
    )
    assert report["needs_restart"] == ["host", "port", "index.block_tokens", "admin.port"]
    assert {change["key"]: change["effect"] for change in report["changes"]} == {
        **dict.fromkeys(report["needs_restart"], "needs a restart"),
        "admin.open_metrics": "applied",
        "grace_s": "applied",
    }
    settings = running.core.settings
    assert (settings.host, settings.port, settings.index.block_tokens) == ("127.0.0.1", port, 16)
    assert (settings.admin.port, settings.admin.open_metrics, settings.grace_s) == (None, True, 7.0)
    again = await running.reload()
    assert (again["result"], again["needs_restart"]) == ("unchanged", report["needs_restart"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"grace_s": -1},
        {"unknown": 1},
        {"policy": {"name": "nobody's"}},
        {"policy": {"name": "linear", "params": {"alpa": 1}}},
        {"instances": []},
        {"instances": [{"url": "http://127.0.0.1:1"}, {"url": "http://127.0.0.1:1"}]},
        {"tokenizer": {"path": "/nowhere"}},
        {"keys": {}},
    ],
)
async def test_settings_that_cannot_be_used_change_nothing(
    start: StartReloadable, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    running = await start(2)
    before, instances = running.core.settings, list(running.core.instances)
    for dry_run in (True, False):
        refused = await running.reload(status=400, dry_run=dry_run, timeouts={"idle_s": 1.0}, **wrong)
        assert refused["error"]["code"] == "settings_refused"
    assert running.core.settings is before
    assert list(running.core.instances) == instances
    assert "nothing was changed" in caplog.text
    assert reloads((await running.client.get("/metrics")).text)["refused"] == 1.0
    assert await asked_of(running, 2) == {"inst-0": 1, "inst-1": 1}


async def test_a_dry_run_says_what_would_change_and_changes_nothing(
    start: StartReloadable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmroute")
    running = await start(2, spare=1)
    before = running.core.settings
    a, _, c = running.engines
    report = await running.reload(dry_run=True, instances=running.fleet(**{"inst-0": a, "new": c}), grace_s=1.0)
    assert (report["result"], report["dry_run"]) == ("applied", True)
    assert [(each["key"], each["old"], each["new"]) for each in report["changes"]] == [
        ("grace_s", 30.0, 1.0),
        ("instances.inst-1", running.engines[1].url, None),
        ("instances.new", None, c.url),
    ]
    assert "grace_s: 30.0 -> 1.0 (would be applied)" in caplog.text
    assert "(applied)" not in caplog.text
    assert running.core.settings is before
    assert [each.name for each in running.core.instances] == ["inst-0", "inst-1"]
    assert sum(reloads((await running.client.get("/metrics")).text).values()) == 0


async def test_the_fleet_becomes_what_the_file_says_while_streams_run(start: StartReloadable) -> None:
    running = await start(3, spare=2)
    keep, replaced, removed, instead, added = running.engines
    released = asyncio.Event()
    for each in running.engines:
        each.tokens, each.streams_end = 12, released
    streams = [asyncio.create_task(ask(running, stream=True)) for _ in range(9)]
    await running.until(lambda: sum(each.running for each in running.engines) == 9)
    fleet = running.fleet(**{"inst-0": keep, "inst-1": instead, "late": added})
    report = await running.reload(instances=fleet)
    assert {change["key"] for change in report["changes"]} == {
        "instances.inst-1.url",
        "instances.inst-2",
        "instances.late",
    }
    assert set(await asked_of(running, 6)) == {"inst-0", "inst-1", "late"}
    assert instead.seen
    assert added.seen
    released.set()
    assert all(was_completed(answer.text, 12) for answer in await asyncio.gather(*streams))
    await running.until(lambda: not running.operations.fleet.departures)
    assert ledger_is_zero(await running.settled())
    assert set(running.core.router.state.instances) == {"inst-0", "inst-1", "late"}
    assert {each.aborted for each in running.engines} == {0}
    assert not replaced.running
    assert not removed.running


async def test_instances_added_over_http_stay_and_those_of_the_file_come_back(start: StartReloadable) -> None:
    running = await start(2, spare=2)
    await running.client.post("/instances", json={"url": running.engines[2].url, "name": "mine"})
    await running.client.delete("/instances/inst-1")
    await running.client.post("/instances/inst-0/drain")
    report = await running.reload()
    assert [change["key"] for change in report["changes"]] == ["instances.inst-1"]
    assert {each.name: each.source.value for each in running.core.instances} == {
        "inst-0": "file",
        "mine": "api",
        "inst-1": "file",
    }
    assert running.core.instances["inst-0"].draining  # not a setting: an operator's change is kept
    assert await asked_of(running, 4) == {"mine": 2, "inst-1": 2}
    await running.client.put("/instances/inst-1", json={"url": running.engines[3].url})
    report = await running.reload()
    assert ("instances.inst-1.url", running.engines[1].url) in {
        (each["key"], each["new"]) for each in report["changes"]
    }
    assert running.core.instances["inst-1"].url == running.engines[1].url
    assert (await running.reload())["result"] == "unchanged"


async def test_the_file_takes_over_an_instance_of_the_same_name_but_not_another_ones_url(
    start: StartReloadable,
) -> None:
    running = await start(1, spare=1)
    mine = {"url": running.engines[1].url, "name": "mine"}
    await running.client.post("/instances", json=mine)
    refused = await running.reload(status=400, instances=[*running.settings["instances"], {**mine, "name": "other"}])
    assert "added over HTTP" in refused["error"]["message"]
    running.settings["instances"][1] = mine
    adopted = await running.reload()
    assert [(each["key"], each["new"]) for each in adopted["changes"]] == [("instances.mine.source", "file")]
    assert running.core.instances["mine"].source.value == "file"
    gone = await running.reload(instances=running.settings["instances"][:1])
    assert [change["key"] for change in gone["changes"]] == ["instances.mine"]
    await running.until(lambda: len(running.core.instances) == 1)


async def test_an_instance_that_is_renamed_keeps_its_running_streams(start: StartReloadable) -> None:
    running = await start(1)
    each, released = running.engines[0], asyncio.Event()
    each.tokens, each.streams_end = 20, released
    streams = [asyncio.create_task(ask(running, stream=True)) for _ in range(3)]
    await running.until(lambda: each.running == 3)
    await running.reload(instances=running.fleet(renamed=each), grace_s=0.1)
    assert await asked_of(running, 2, max_tokens=1) == {"renamed": 2}
    released.set()
    assert all(was_completed(answer.text, 20) for answer in await asyncio.gather(*streams))
    assert ledger_is_zero(await running.settled())


async def test_an_instance_that_leaves_and_comes_back_in_the_file_stays(start: StartReloadable) -> None:
    running = await start(2)
    whole = running.settings["instances"]
    each, released = running.engines[1], asyncio.Event()
    each.tokens, each.streams_end = 15, released
    streams = [asyncio.create_task(ask(running, stream=True)) for _ in range(2)]
    await running.until(lambda: each.running == 1)
    await running.reload(instances=whole[:1])
    leaving = running.core.instances["inst-1"]
    assert running.operations.fleet.leaving(leaving)
    await running.reload(instances=whole)
    assert running.core.instances["inst-1"] is leaving
    assert not leaving.draining
    assert await asked_of(running, 4, max_tokens=1) == {"inst-0": 2, "inst-1": 2}
    released.set()
    assert all(
        was_completed(answer.text, tokens)
        for answer, tokens in zip(await asyncio.gather(*streams), (4, 15), strict=True)
    )
    assert not running.operations.fleet.departures


async def test_a_policy_switched_over_http_stays_until_the_files_changes(start: StartReloadable) -> None:
    running = await start(1)
    await running.client.put("/policy", json={"name": "least_loaded"})
    await running.reload(grace_s=9.0)
    assert running.core.router.policy.name == "least_loaded"
    await running.reload(policy={"name": "lmetric"})
    assert running.core.router.policy.name == "lmetric"


async def test_an_admission_rule_switched_over_http_stays_until_the_files_changes(start: StartReloadable) -> None:
    running = await start(1, admission={"max_hold_s": 100.0})
    await running.client.put("/admission", json={"name": "session_cap", "params": {"sessions": 5}, "max_hold_s": 50})

    def effective() -> tuple[str, float, int]:
        rule = running.core.holding.rule_as_dict()
        return rule["name"], rule["max_hold_s"], rule["max_held"]

    await running.reload(grace_s=9.0)
    assert effective() == ("session_cap", 50.0, 1000)
    await running.reload(admission={"max_hold_s": 100.0, "max_held": 3})  # the other bounds belong to the file
    assert effective() == ("session_cap", 50.0, 3)
    await running.reload(admission={"max_hold_s": 70.0, "max_held": 3})
    assert effective() == ("session_cap", 70.0, 3)
    await running.reload(admission={"name": "never_hold", "max_hold_s": 70.0, "max_held": 3})
    assert effective() == ("never_hold", 70.0, 3)
    report = await running.reload(status=400, admission={"name": "working_sets"})
    assert "working_set" in str(report)
    assert effective() == ("never_hold", 70.0, 3)


async def test_a_reload_leaves_held_requests_in_line(start: StartReloadable) -> None:
    one_at_a_time = {"name": "session_cap", "params": {"sessions": 1, "keep_s": 0.0}}
    running = await start(1, spare=1, admission=one_at_a_time)
    running.engines[0].mode = "hang"
    first = asyncio.create_task(ask(running, user="a"))
    await running.until(lambda: running.engines[0].running == 1)
    other = asyncio.create_task(ask(running, user="b"))
    await running.until(lambda: len(running.core.holding) == 1)
    await running.reload(grace_s=9.0)
    await running.reload(instances=running.fleet(other=running.engines[1]), admission=one_at_a_time)
    assert len(running.core.holding) == 1
    first.cancel()
    answer = await other
    assert (answer.status_code, answer.headers["x-warmroute-instance"]) == (200, "other")


async def test_secrets_are_in_neither_report_nor_log(start: StartReloadable, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    running = await start(1, engine_key="old-engine-secret")
    report = await running.reload(
        engine_key="new-engine-secret",
        instances=[{**running.settings["instances"][0], "api_key": "its-own-secret"}],
        keys={"admin": [*KEYS["admin"], {"name": "more", "sha256": "ab" * 32}]},
        log_level="debug",
    )
    reported = str(report) + caplog.text
    assert {change["key"] for change in report["changes"]} >= {"engine_key", "instances.inst-0.api_key"}
    for secret in ("engine-secret", "own-secret", "ab" * 32):
        assert secret not in reported
    await running.until(lambda: bool(running.engines[0].probes))


async def test_keys_of_a_file_are_reported_by_name_without_their_hashes(
    start: StartReloadable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.yaml"

    def write(**keys: dict[str, Any]) -> None:
        listed = [{"name": name, "sha256": digest_of(f"secret of {name}"), **more} for name, more in keys.items()]
        file.write_text(yaml.safe_dump({"client": listed}), encoding="utf-8")

    write(stays={}, leaves={}, changes={"max_concurrent": 2}, rotates={})
    running = await start(1, keys={**KEYS, "file": str(file)})
    assert (await running.reload())["result"] == "unchanged"
    write(stays={}, changes={"max_concurrent": 3}, rotates={"sha256": digest_of("another")}, comes={"weight": 2.0})
    expected = {
        "keys.client.leaves": ("***", None),
        "keys.client.changes.max_concurrent": (2, 3),
        "keys.client.rotates.sha256": ("***", "***"),
        "keys.client.comes": (None, "***"),
    }
    with caplog.at_level(logging.INFO, logger="warmroute.reload"):
        for dry_run in (True, False):
            report = await running.reload(dry_run=dry_run)
            assert {each["key"]: (each["old"], each["new"]) for each in report["changes"]} == expected
            assert (report["result"], report["needs_restart"]) == ("applied", [])
            assert (running.core.keys.tenant("comes") is None) is dry_run
            assert digest_of("another") not in str(report) + caplog.text
    assert "keys.client.comes" in caplog.text
    assert (await running.reload())["result"] == "unchanged"


async def test_it_is_for_admins_and_for_proxies_that_have_settings_to_read(start: StartReloadable) -> None:
    running = await start(1)
    running.operations.reloader.load = None
    answer = await running.client.post("/reload")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_reloadable")
    answer = await running.client.post("/reload", headers={"authorization": "Bearer nobody"})
    assert answer.status_code == 401
