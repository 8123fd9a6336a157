"""Limits of a client key, its tenant, and the tenant that a front door names; then through the proxy."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from policies.types import NO_TENANT, Tenant
from proxy.access.keys import KeyName, Keys
from proxy.access.quotas import SESSION_S, Allowance, KeyLimitError, Quota
from proxy.access.tenants import Tenants
from proxy.metrics.tenants import MAX_NAMED, OTHERS, TenantTallies
from proxy.request.agent import agent_of
from proxy.settings import ClientKey, FairnessSettings, KeySettings, SettingsError, load_settings
from tests.proxy.access.test_keys import ADMIN, KEY, OK, OTHER, bearer, entry, started
from tests.proxy.conftest import StartProxy, ledger_is_zero
from tests.proxy.exchange.test_held_requests import GatedEngine
from warmroute import build


def key(**limits: Any) -> ClientKey:
    return ClientKey(name="one", sha256="0" * 64, **limits)


def wait_s(quota: Quota, now_s: float) -> int:
    """Retry-After of a request that is refused."""
    with pytest.raises(KeyLimitError) as caught:
        quota.enter(now_s)
    assert caught.value.status == 429
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def test_requests_per_minute_refill_evenly() -> None:
    quota = Quota(key(max_requests_per_min=6), 0.0)
    for _ in range(6):
        quota.enter(0.0)
    assert wait_s(quota, 0.0) == 10
    assert wait_s(quota, 4.0) == 6
    quota.enter(10.0)
    assert wait_s(quota, 10.0) == 10
    with pytest.raises(KeyLimitError, match=r"its maximum is 6 \(max_requests_per_min\)"):
        quota.enter(10.0)
    assert quota.in_flight == 7
    assert quota.as_dict(10.0)["refused"] == {"max_requests_per_min": 4}


def test_tokens_of_prompts_and_answers_count_and_a_long_prompt_is_not_refused_forever() -> None:
    quota = Quota(key(max_tokens_per_min=600), 0.0)
    quota.enter(0.0)
    quota.spend(1_100, 0.0)
    quota.spend(100, 0.0)
    assert wait_s(quota, 0.0) == 61
    assert wait_s(quota, 60.0) == 1
    quota.enter(60.2)


def test_a_session_counts_while_it_is_in_flight_and_a_minute_after() -> None:
    quota = Quota(key(max_sessions=2), 0.0)
    assert quota.begin("a", 0.0)
    assert quota.begin("a", 0.0)
    assert quota.begin("b", 1.0)
    with pytest.raises(KeyLimitError, match="2 sessions are active"):
        quota.begin("c", 2.0)
    quota.end("a", 3.0, keep=True)
    quota.end("a", 5.0, keep=True)
    quota.end("b", 9.0, keep=True)
    with pytest.raises(KeyLimitError) as caught:
        quota.begin("c", 10.0)
    assert caught.value.retry_after_s == SESSION_S - 5
    assert quota.begin("a", 11.0)  # its own place
    quota.end("a", 20.0, keep=True)
    assert quota.begin("c", 9.0 + SESSION_S)
    quota.end("c", 80.0, keep=False)  # without a session id
    assert quota.as_dict(80.0 + SESSION_S)["sessions"] == 0


def test_without_limits_nothing_is_kept_per_session() -> None:
    quota = Quota(key(), 0.0)
    assert not quota.begin("a", 0.0)
    quota.enter(0.0)
    quota.spend(10**9, 0.0)
    quota.enter(0.0)
    quota.leave()
    assert quota.as_dict(0.0) == {"weight": 1.0, "priority": 0, "requests": 1, "sessions": None, "refused": {}}


@given(st.integers(1, 60), st.lists(st.floats(0.0, 20.0), max_size=30))
def test_no_minute_has_more_than_twice_the_allowance(per_min: int, gaps: list[float]) -> None:
    allowance, now_s, spent = Allowance(per_min, 0.0), 0.0, []
    for gap_s in gaps:
        now_s += gap_s
        while not allowance.wait_s(now_s):
            allowance.spend(1)
            spent.append(now_s)
    assert all(sum(1 for each in spent if at_s <= each < at_s + 60.0) <= 2 * per_min + 1 for at_s in spent)


def reload(keys: Keys, settings: KeySettings) -> None:
    keys.apply(keys.read(settings))


def test_a_reload_keeps_the_use_of_a_key_and_applies_its_new_limits() -> None:
    before = entry("one", KEY, max_concurrent=2, max_requests_per_min=2)
    keys = Keys(KeySettings.model_validate({"client": [before, entry("two", OTHER)]}))
    quota, now_s = keys.quota(KeyName("one")), time.monotonic()
    quota.enter(now_s)
    quota.enter(now_s)
    reload(keys, KeySettings.model_validate({"client": [{**before, "weight": 3.0, "priority": 2}]}))
    assert keys.quota(KeyName("one")) is quota
    assert quota.tenant == Tenant("one", 3.0, 2)
    with pytest.raises(KeyLimitError, match="max_concurrent"):
        quota.enter(now_s)
    quota.leave()
    with pytest.raises(KeyLimitError, match="max_requests_per_min"):
        quota.enter(now_s)
    reload(keys, KeySettings.model_validate({"client": [entry("one", KEY)]}))
    quota.enter(now_s)
    assert keys.tenant("two") is None


def test_requests_in_flight_of_a_removed_key_count_when_it_returns() -> None:
    one, two = entry("one", KEY, max_concurrent=1), entry("two", OTHER)
    keys = Keys(KeySettings.model_validate({"client": [one, two]}))
    quota, now_s = keys.quota(KeyName("one")), time.monotonic()
    quota.enter(now_s)
    for _ in range(2):
        reload(keys, KeySettings.model_validate({"client": [two]}))
        assert KeyName("one") not in keys.quotas()
    reload(keys, KeySettings.model_validate({"client": [one, two]}))
    with pytest.raises(KeyLimitError, match="max_concurrent"):
        keys.quota(KeyName("one")).enter(now_s)
    quota.leave()
    keys.quota(KeyName("one")).enter(now_s)


@pytest.mark.parametrize(
    ("spent", "per_min", "left"),
    [(60, 100, 40.0), (60, 200, 140.0), (60, 80, 20.0), (60, 10, 0.0), (130, 200, 70.0), (130, 50, -30.0)],
)
def test_what_is_spent_of_a_minute_stays_spent_under_another_limit(spent: int, per_min: int, left: float) -> None:
    quota = Quota(key(max_tokens_per_min=100, max_requests_per_min=100), 0.0)
    quota.spend(spent, 0.0)
    if spent < 100:
        quota.enter(0.0)
    requests_left = quota.use(0.0).requests_left
    quota.apply(key(max_tokens_per_min=per_min, max_requests_per_min=per_min), 0.0)
    assert quota.use(0.0).tokens_left == left
    assert quota.use(0.0).requests_left == per_min - (100 - requests_left)
    assert quota.use(60.0).tokens_left == min(per_min, left + per_min), "it refills at the new rate"


FRONT = {"client": [entry("front", KEY, names_tenant=True), entry("alice", OTHER, weight=2.0)]}


@pytest.mark.parametrize(
    ("settings", "name", "headers", "tenant"),
    [
        ({}, None, {b"x-tenant": b"eve"}, NO_TENANT),
        ({"tenant_header": "X-Tenant"}, None, {b"x-tenant": b"bob"}, Tenant("bob")),
        ({"tenant_header": "X-Tenant"}, None, {}, NO_TENANT),
        ({"tenant_header": "X-Tenant"}, None, {b"x-tenant": b"no name\n"}, NO_TENANT),
        ({}, "front", {b"x-tenant": b"bob"}, Tenant("front")),
        ({"tenant_header": "x-tenant"}, "front", {b"x-tenant": b"bob"}, Tenant("bob")),
        ({"tenant_header": "x-tenant"}, "front", {b"x-tenant": b"alice"}, Tenant("alice", 2.0)),
        ({"tenant_header": "x-tenant"}, "front", {b"x-tenant": b"x" * 65}, Tenant("front")),
        ({"tenant_header": "x-tenant"}, "alice", {b"x-tenant": b"bob"}, Tenant("alice", 2.0)),
    ],
)
def test_the_tenant_is_the_key_or_whom_a_trusted_front_door_names(
    settings: dict[str, Any], name: str | None, headers: dict[bytes, bytes], tenant: Tenant
) -> None:
    keys = Keys(KeySettings.model_validate(FRONT if name else {}))
    tenants, key = Tenants(FairnessSettings(**settings), keys), None if name is None else KeyName(name)
    visit = tenants.enter(key, tenants.of_request(key, headers))
    assert visit.tenant == tenant
    visit.begin("s", "r", 10)
    visit.close(5)
    assert all(quota.in_flight == 0 for quota in keys.quotas().values())


def test_another_header_of_a_reload_applies_to_the_next_request() -> None:
    tenants = Tenants(FairnessSettings(), Keys(KeySettings()))
    headers = {b"x-tenant": b"bob"}
    assert tenants.of_request(None, headers) is NO_TENANT
    tenants.apply(FairnessSettings(tenant_header="x-tenant"))
    assert tenants.of_request(None, headers) == Tenant("bob")
    assert tenants.of_name("eve") == Tenant("eve")


def test_a_header_that_is_none_is_refused() -> None:
    with pytest.raises(SettingsError, match="not a header name"):
        load_settings(None, instances=[{"url": "http://a"}], fairness={"tenant_header": "x y"})


@pytest.mark.parametrize(
    ("headers", "agent"),
    [
        ({}, None),
        ({b"x-warmroute-agent-kind": b"planner"}, "planner"),
        ({b"x-warmroute-agent-kind": b"k" * 1_000}, "k" * 64),
        ({b"x-claude-code-agent-id": b"a1"}, "sub-agent"),
        ({b"x-claude-code-agent-id": b"a1", b"x-warmroute-agent-kind": b"explore"}, "explore"),
    ],
)
def test_the_kind_of_agent_is_the_clients_word(headers: dict[bytes, bytes], agent: str | None) -> None:
    assert agent_of(headers) == agent


def test_series_of_tenants_are_bounded() -> None:
    from prometheus_client import CollectorRegistry

    tallies = TenantTallies(CollectorRegistry())
    labels = [tallies.label_of(f"t{number}") for number in range(MAX_NAMED + 50)]
    assert labels[:MAX_NAMED] == [f"t{number}" for number in range(MAX_NAMED)]
    assert set(labels[MAX_NAMED:]) == {OTHERS}
    assert tallies.label_of("t0") == "t0"


def test_the_command_line_writes_limits_that_the_settings_accept() -> None:
    runner = CliRunner()
    options = ["--weight", "2.5", "--priority", "-3", "--max-sessions", "4", "--max-tokens-per-min", "100000"]
    made = runner.invoke(build(), ["key", "new", "--name", "a", *options, "--allow-priority", "--names-tenant"])
    assert made.exit_code == 0, made.output
    [line] = yaml.safe_load(made.stdout.splitlines()[-1])
    [client] = KeySettings.model_validate({"client": [line]}).client
    assert (client.weight, client.priority, client.max_sessions, client.max_tokens_per_min) == (2.5, -3, 4, 100_000)
    assert client.allow_priority
    assert client.names_tenant
    for wrong in (["--weight", "0"], ["--priority", "1000"], ["--max-concurrent", "0"]):
        refused = runner.invoke(build(), ["key", "new", "--name", "a", *wrong])
        assert refused.exit_code == 2
        assert wrong[0].removeprefix("--").replace("-", "_") in refused.stderr


async def test_limits_of_a_key_through_the_proxy(start_proxy: StartProxy) -> None:
    keys = {
        "client": [
            entry("few", KEY, max_requests_per_min=2),
            entry("one-session", OTHER, max_sessions=1, allow_priority=True),
        ],
        "admin": [entry("root", ADMIN)],
    }
    proxy = await started(start_proxy, keys=keys)

    async def ask(given: str, session: str, **fields: Any) -> httpx.Response:
        headers = {**bearer(given), "x-session-id": session}
        return await proxy.client.post("/v1/completions", json={**OK, **fields}, headers=headers)

    assert [(await ask(KEY, "s")).status_code for _ in range(3)] == [200, 200, 429]
    refused = await ask(KEY, "s")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "max_requests_per_min" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 31
    # Only a key that permits it may send a priority to the engine's scheduler.
    assert (await ask(OTHER, "a", priority=5)).status_code == 200
    assert (await ask(OTHER, "b")).status_code == 429
    assert (await ask(OTHER, "a")).status_code == 200
    rows = await proxy.rows(tenant="one-session")
    assert [row["outcome"] for row in rows] == ["ok", "rejected", "ok"]
    stats = await proxy.settled()
    assert ledger_is_zero(stats)
    assert stats["tenants"]["few"]["key"]["refused"] == {"max_requests_per_min": 2}
    assert stats["tenants"]["one-session"]["key"]["sessions"] == 1
    metrics = (await proxy.client.get("/metrics")).text
    assert 'warmroute_key_limit_refused_total{limit="max_sessions",tenant="one-session"} 1.0' in metrics
    assert 'warmroute_tenant_requests_total{tenant="few"} 4.0' in metrics


async def test_refused_requests_have_the_tenant_of_their_key(start_proxy: StartProxy, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    keys = {
        "client": [entry("few", KEY, max_requests_per_min=1), entry("front", OTHER, names_tenant=True)],
        "admin": [entry("root", ADMIN)],
    }
    settings: dict[str, Any] = {
        "fairness": {"tenant_header": "x-tenant"},
        "limits": {"body_bytes": 4096},
        "logs": {"access": str(path)},
    }
    proxy = await started(start_proxy, keys=keys, **settings)

    async def ask(given: str, name: str, **fields: Any) -> int:
        headers = {**bearer(given), "x-request-id": name, "x-tenant": "bob"}
        body = {**OK, "stream": True, **fields}
        return (await proxy.client.post("/v1/completions", json=body, headers=headers)).status_code

    assert [await ask(KEY, name) for name in ("served", "limited")] == [200, 429]
    assert await ask(KEY, "large", prompt="x" * 5000) == 413
    assert await ask(OTHER, "unknown-model", model="other") == 404
    assert await ask("wr-no-key-of-this-proxy-at-all", "no-key") == 401
    found = {row["request_id"]: (row["tenant"], row["stream"]) for row in await proxy.rows()}
    assert found == {
        "served": ("few", True),
        "limited": ("few", False),
        "large": ("few", False),
        "unknown-model": ("bob", True),
        "no-key": (None, False),
    }
    assert {row["request_id"] for row in await proxy.rows(tenant="few")} == {"served", "limited", "large"}
    await proxy.until(lambda: path.read_bytes().count(b"\n") == len(found))
    logged = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert {line["request_id"]: (line["tenant"], line["stream"]) for line in logged} == found


async def test_a_priority_is_refused_without_permission(start_proxy: StartProxy) -> None:
    proxy = await started(start_proxy)
    answer = await proxy.client.post("/v1/completions", json={**OK, "priority": 5}, headers=bearer(KEY))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "field_not_allowed"


async def test_a_tenant_is_explained_and_recorded(start_proxy: StartProxy) -> None:
    engine = GatedEngine()
    proxy = await start_proxy(
        engines=[engine],
        fairness={"tenant_header": "x-tenant"},
        admission={"name": "session_cap", "params": {"sessions": 1, "keep_s": 0.0}},
    )

    def ask(tenant: str) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(proxy.client.post("/v1/completions", json=OK, headers={"x-tenant": tenant}))

    asked = [ask("alice")]
    await proxy.until(lambda: proxy.core.admission.in_flight == 1)
    asked += [ask("alice"), ask("bob")]
    await proxy.until(lambda: len(proxy.core.holding) == 2)
    explained = (await proxy.client.post("/explain", json=OK, params={"tenant": "alice"})).json()
    assert explained["request"]["tenant"] == "alice"
    assert "second of tenant alice" in explained["admission"]["sentence"]
    engine.open.set()
    assert [(await task).status_code for task in asked] == [200] * 3
    assert [row["tenant"] for row in await proxy.rows()].count("alice") == 2
    assert proxy.core.admission.shares.in_flight_tokens == {}
