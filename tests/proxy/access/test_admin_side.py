"""The admin side: its listener, its permissions, and protection against browsers on the same machine."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest
from fastapi import Request

from policies.registry import parameters
from proxy.access.guard import Guard
from proxy.access.keys import Keys
from proxy.access.rules import Access, Listener, Side, admin_key_of, side_of
from proxy.admin_listener import admin_listener
from proxy.errors import RequestError
from proxy.settings import AdminSettings, load_settings
from tests.proxy.access.test_keys import ADMIN, KEY, KEYS, OK, bearer
from tests.proxy.conftest import Running, StartProxy, serving

READING = [
    *(
        "/instances",
        "/stats",
        "/metrics",
        "/breakdown",
        "/policy",
        "/admission",
        "/meters",
        "/shadow",
        "/cache-killers",
    ),
    "/openapi.json",
]
CHANGING = [
    ("POST", "/instances"),
    ("DELETE", "/instances/inst-0"),
    ("PUT", "/instances/inst-0"),
    ("POST", "/instances/inst-0/drain"),
    ("POST", "/INSTANCES"),
    ("POST", "/reload/"),
]


def code(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]


def admin_client(proxy: Running, **more: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{proxy.core.admin_port}", trust_env=False, **more)


@pytest.mark.parametrize(
    ("path", "side"),
    [
        ("/health", Side.OPEN),
        ("/ready", Side.OPEN),
        ("/v1/models", Side.CLIENT),
        ("/v1", Side.CLIENT),
        ("/v1/", Side.CLIENT),
        ("/instances", Side.ADMIN),
        ("/health/", Side.ADMIN),
        ("/ready/../instances", Side.ADMIN),
        ("/V1/models", Side.ADMIN),
        ("/v1x", Side.ADMIN),
        ("//v1/models", Side.ADMIN),
        ("/", Side.ADMIN),
        ("", Side.ADMIN),
    ],
)
def test_what_is_not_known_is_the_operators(path: str, side: Side) -> None:
    assert side_of(path) is side


async def test_by_default_the_admin_side_is_on_the_loopback_listener_without_a_key(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for path in READING:
        assert (await proxy.client.get(path)).status_code == 200
    assert (await proxy.client.put("/policy", json={"name": "random"})).status_code == 200
    assert (await proxy.client.put("/admission", json={"name": "working_set"})).status_code == 200
    assert (await proxy.client.put("/shadow", json={"policies": ["warm"]})).status_code == 200
    assert (await proxy.client.post("/explain", json=OK)).status_code == 200
    assert proxy.core.admin_port is None


REFUSED_CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("/policy", {"name": "warmest"}, "unknown_policy"),
    ("/policy", {"name": "warm", "params": {"steps": 1}}, "policy_refused"),
    ("/policy", {"name": "warm", "params": {"step_s": -1}}, "policy_refused"),
    ("/policy", {"planner": "sometimes"}, "unknown_policy"),
    ("/policy", {"params": {"steps": 1}}, "policy_refused"),
    ("/policy", {"planner_params": {"steps": 1}}, "policy_refused"),
    ("/admission", {"params": {"steps": 1}}, "admission_rule_refused"),
    ("/admission", {"name": "session_caps"}, "unknown_admission_rule"),
    ("/admission", {"name": "session_cap", "params": {"sessions": 0}}, "admission_rule_refused"),
]


async def test_an_unknown_name_and_a_wrong_parameter_have_codes_of_their_own(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for path, body, expected in REFUSED_CHANGES:
        answer = await proxy.client.put(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, expected), (path, body)


UNREADABLE: list[tuple[str, bytes, str]] = [
    (
        "/policy",
        b"",
        "the body is missing: send a JSON object with fields of name, params, planner, planner_params",
    ),
    ("/policy", b'{"nam', "the body is not valid JSON: "),
    ("/policy", b'"linear"', "the body must be a JSON object with fields of name, "),
    ("/policy", b'{"policy": "linear"}', "body.policy: unknown key; known: name, params, planner, planner_params"),
    ("/policy", b'{"params": "steps=1"}', "body.params: expected keys with values, found str"),
    ("/admission", b'{"rule": 1}', "body.rule: unknown key; known: name, params, max_hold_s"),
    ("/shadow", b'{"policy": 1}', "body.policy: unknown key; known: policies, planners, admission"),
]


async def test_a_body_that_cannot_be_read_is_answered_with_what_to_send(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for path, body, message in UNREADABLE:
        answer = await proxy.client.put(path, content=body)
        assert answer.status_code == 400, (path, body)
        assert answer.json()["error"]["message"].startswith(message), answer.text


@pytest.mark.parametrize(
    ("path", "bodies", "fields"),
    [
        ("/policy", [{}, {"name": None}, {"params": {}}], "name, params, planner, planner_params"),
        ("/admission", [{}, {"max_hold_s": None}], "name, params, max_hold_s"),
        ("/shadow", [{}, {"policies": None}], "policies, planners, admission"),
    ],
)
async def test_a_switch_that_changes_nothing_is_refused(
    start_proxy: StartProxy, path: str, bodies: list[dict[str, Any]], fields: str
) -> None:
    proxy = await start_proxy(1)
    for body in bodies:
        answer = await proxy.client.put(path, json=body)
        assert code(answer) == (400, "nothing_to_change")
        assert answer.json()["error"]["message"] == f"the body changes nothing: give at least one of {fields}"


async def test_parameters_without_a_name_apply_to_the_active_policy_planner_and_rule(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    await proxy.client.put("/policy", json={"name": "linear", "planner": "threshold"})
    both = {"params": {"alpha": 7.0}, "planner_params": {"max_in_flight": 9}}
    answer = (await proxy.client.put("/policy", json=both)).json()
    assert (answer["name"], answer["planner"]) == ("linear", "threshold")
    router = proxy.core.router
    assert (parameters(router.policy)["alpha"], parameters(router.planner)["max_in_flight"]) == (7.0, 9)
    await proxy.client.put("/policy", json={"planner": "never", "params": {}})
    assert parameters(router.policy)["alpha"] == 7.0, "no parameters change nothing"


async def test_what_changes_the_fleet_needs_an_admin_key_even_on_loopback(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    guarded = await start_proxy(1, keys=KEYS)
    for method, path in CHANGING:
        answer = await proxy.client.request(method, path, json={})
        assert code(answer) == (403, "admin_forbidden"), path
        assert "warmroute key new" in answer.json()["error"]["message"]
        assert (await proxy.client.request(method, path, json={}, headers=bearer(ADMIN))).status_code == 403
        assert code(await guarded.client.request(method, path, json={}))[0] == 401
        assert code(await guarded.client.request(method, path, json={}, headers=bearer(KEY)))[0] == 401


LACKING: list[tuple[str, str, str]] = [
    ("DELETE", "/policy", "GET, PUT"),
    ("POST", "/policy", "GET, PUT"),
    ("HEAD", "/policy", "GET, PUT"),
    ("GET", "/reload", "POST"),
    ("PUT", "/instances", "GET, POST"),
    ("PATCH", "/instances/inst-0", "DELETE, GET, PUT"),
    ("POST", "/instances/inst-0/something/new", "DELETE, GET, PUT"),
    ("POST", "/metrics", "GET"),
]


async def test_a_method_that_an_admin_path_lacks_is_no_matter_of_keys(start_proxy: StartProxy) -> None:
    proxy, guarded = await start_proxy(1), await start_proxy(1, keys=KEYS)
    reachable = await start_proxy(1, host="0.0.0.0")
    for method, path, allowed in LACKING:
        for answer in (
            await proxy.client.request(method, path),
            await guarded.client.request(method, path, headers=bearer(ADMIN)),
        ):
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed), (method, path)
            if method != "HEAD":
                assert code(answer) == (405, "method_not_allowed")
                assert answer.json()["error"]["message"] == f"{method} {path}: this path has {allowed} only"
        assert (await guarded.client.request(method, path)).status_code == 401, (method, path)
        assert (await reachable.client.request(method, path)).status_code == 403, (method, path)
        foreign = await proxy.client.request(method, path, headers={"host": "evil.example.com"})
        assert foreign.status_code == 403, (method, path)


async def test_a_path_that_only_begins_as_an_endpoints_is_not_found_with_a_key(start_proxy: StartProxy) -> None:
    guarded = await start_proxy(1, keys=KEYS)
    assert (await guarded.client.post("/policy/new")).status_code == 401
    # Allowed: FastAPI decides if there is such an endpoint.
    answer = await guarded.client.post("/policy/new", headers=bearer(ADMIN))
    assert code(answer) == (404, "unknown_path")
    assert "POST /policy/new: no admin endpoint has the path: GET /docs" in answer.json()["error"]["message"]


async def test_a_path_that_is_no_endpoint_is_not_found_whatever_the_key(start_proxy: StartProxy) -> None:
    open_proxy, reachable = await start_proxy(1), await start_proxy(1, host="0.0.0.0")
    guarded = await start_proxy(1, keys=KEYS, admin={"port": 0})
    paths = ("/invocations", "/api/event_logging/batch", "/foo", "/%2e/reload", "/foo%2freload", "/", "/v1x/a", "/V1x")
    async with admin_client(guarded) as admin:
        for path, client, headers, method in itertools.product(
            paths,
            (open_proxy.client, reachable.client, guarded.client, admin),
            ({}, bearer(KEY), bearer(ADMIN)),
            ("GET", "POST"),
        ):
            answer = await client.request(method, path, headers=headers)
            assert code(answer) == (404, "unknown_path"), (method, path)
            message = answer.json()["error"]["message"]
            assert ("/v1/chat/completions" in message) == (client is not admin)
            assert ("GET /docs" in message) == (client is not guarded.client)  # its endpoints are elsewhere


async def test_a_path_of_the_clients_in_other_case_is_not_found_whatever_the_key(start_proxy: StartProxy) -> None:
    open_proxy, reachable = await start_proxy(1), await start_proxy(1, host="0.0.0.0")
    clients_only = await start_proxy(1, host="0.0.0.0", keys={"client": KEYS["client"]})
    guarded = await start_proxy(1, keys=KEYS)
    for path, proxy, headers, method in itertools.product(
        ("/V1/chat/completions", "/V1/", "/V1", "/Version", "/RERANK", "/Health"),
        (open_proxy, reachable, clients_only, guarded),
        ({}, bearer(KEY), bearer(ADMIN)),
        ("GET", "POST"),
    ):
        answer = await proxy.client.request(method, path, headers=headers)
        assert code(answer) == (404, "unknown_path"), (method, path)
        assert "paths are case-sensitive" in answer.json()["error"]["message"]
    # Paths of the admin side are guarded in any case.
    assert (await guarded.client.post("/Reload", headers=bearer(KEY))).status_code == 401


def test_every_path_may_be_an_endpoint_until_all_are_known_or_if_one_begins_with_anything() -> None:
    rules = access()
    for paths in ((), ("/instances", "/{anything}"), ("/instances", "/")):
        if paths:
            rules.set_endpoints((path, {"POST"}) for path in paths)
        with pytest.raises(RequestError) as refused:
            rules.check(Listener.MAIN, "POST", "/foo", {b"host": b"localhost"})
        assert refused.value.status == 403
    rules.set_endpoints([("/instances/{name}", {"GET", "PUT"}), ("/instances/{name}", {"POST"})])
    for path, status in (
        ("/foo", 404),
        ("/foo/../instances", 404),
        ("/./instances", 404),
        ("/instances", 403),
        ("/instances/x", 403),
        ("/Instances/x/y/", 403),
    ):
        with pytest.raises(RequestError) as refused:
            rules.check(Listener.MAIN, "POST", path, {b"host": b"localhost"})
        assert refused.value.status == status


async def test_a_listener_that_others_reach_has_no_admin_side_without_admin_keys(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, host="0.0.0.0")
    for path in READING:
        answer = await proxy.client.get(path)
        assert code(answer) == (403, "admin_forbidden")
        assert "keys.admin" in answer.json()["error"]["message"]
        assert "admin.port" in answer.json()["error"]["message"]
    assert (await proxy.client.put("/policy", json={"name": "random"})).status_code == 403
    assert (await proxy.client.put("/admission", json={"name": "working_set"})).status_code == 403
    assert (await proxy.client.put("/shadow", json={"policies": ["warm"]})).status_code == 403
    assert (await proxy.client.get("/health")).status_code == 200
    assert (await proxy.client.get("/ready")).status_code == 200
    assert (await proxy.client.get("/v1/models")).status_code == 200
    assert (await proxy.client.post("/v1/completions", json=OK)).status_code == 200


async def test_with_admin_keys_every_admin_endpoint_needs_one(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, host="0.0.0.0", keys=KEYS)
    for path in READING:
        for headers in ({}, bearer("wrong"), bearer(KEY)):
            assert code(await proxy.client.get(path, headers=headers)) == (401, "invalid_api_key")
        assert (await proxy.client.get(path, headers=bearer(ADMIN))).status_code == 200
    assert (await proxy.client.put("/policy", json={"name": "random"})).status_code == 401
    assert (await proxy.client.put("/admission", json={"name": "never_hold"})).status_code == 401
    assert (await proxy.client.put("/shadow", json={"policies": ["warm"]})).status_code == 401
    assert (await proxy.client.put("/policy", json={"name": "random"}, headers=bearer(ADMIN))).status_code == 200
    assert (await proxy.client.post("/explain", json=OK)).status_code == 401
    assert (await proxy.client.post("/explain", json=OK, headers=bearer(ADMIN))).status_code == 200
    # With the key, any host name is accepted: a page using DNS rebinding has no key.
    named = {**bearer(ADMIN), "host": "router.example.com"}
    assert (await proxy.client.get("/stats", headers=named)).status_code == 200


async def test_open_metrics_are_open_and_nothing_else_is(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, host="0.0.0.0", keys=KEYS, admin={"open_metrics": True})
    assert (await proxy.client.get("/metrics", headers={"host": "prometheus-target:9090"})).status_code == 200
    assert (await proxy.client.get("/stats")).status_code == 401
    assert (await proxy.client.post("/metrics")).status_code == 401


async def test_admin_endpoints_on_a_listener_of_their_own(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, host="0.0.0.0", admin={"port": 0})
    async with admin_client(proxy) as admin:
        for path in READING:
            hidden = await proxy.client.get(path)
            assert code(hidden) == (404, "wrong_listener")
            assert "admin.port" in hidden.json()["error"]["message"]
            assert (await admin.get(path)).status_code == 200
        assert code(await proxy.client.put("/policy", json={"name": "random"}))[0] == 404
        assert (await admin.put("/policy", json={"name": "random"})).json()["name"] == "random"
        assert (await admin.post("/instances", json={})).status_code == 403
        # The client side is on the main listener, health on both.
        for path in ("/health", "/ready"):
            assert (await admin.get(path)).status_code == 200
            assert (await proxy.client.get(path)).status_code == 200
        assert code(await admin.get("/v1/models")) == (404, "wrong_listener")
        assert code(await admin.post("/v1/completions", json=OK)) == (404, "wrong_listener")
        served = await proxy.client.post("/v1/completions", json=OK)
        assert served.status_code == 200
        assert (await admin.get("/breakdown")).json()["rows"][0]["outcome"] == "ok"
    assert len(proxy.engines[0].seen) == 1


async def test_the_admin_listener_needs_keys_if_it_is_not_loopback(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, admin={"port": 0, "host": "0.0.0.0"})
    async with admin_client(proxy) as admin:
        answer = await admin.get("/stats")
        assert code(answer) == (403, "admin_forbidden")
        assert "admin.host" in answer.json()["error"]["message"]
    guarded = await start_proxy(1, admin={"port": 0, "host": "0.0.0.0"}, keys=KEYS)
    async with admin_client(guarded) as admin:
        assert (await admin.get("/stats")).status_code == 401
        assert (await admin.get("/stats", headers=bearer(ADMIN))).status_code == 200


async def test_the_admin_listener_ends_with_the_proxy_and_says_when_its_port_is_taken(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, admin={"port": 0})
    port, bounds = proxy.core.admin_port, proxy.core.clients
    assert port
    with pytest.raises(OSError, match=f"admin.host 127.0.0.1, admin.port {port}"):
        async with admin_listener(proxy.core.access, bounds, AdminSettings(port=port), None, 10.0):
            raise AssertionError("two listeners on one port")
    async with admin_client(proxy) as admin:
        assert (await admin.get("/stats")).status_code == 200
    settings = load_settings(
        None, port=0, instances=[{"url": proxy.engines[0].url}], admin={"port": 0}, log_level="warning"
    )
    async with serving(settings) as (app, _):
        other = app.core.admin_port
        assert other
    async with admin_listener(proxy.core.access, bounds, AdminSettings(port=other), None, 10.0) as taken:
        assert taken == other


HOSTS = [
    ("127.0.0.1", True),
    ("127.0.0.1:9090", True),
    ("localhost", True),
    ("LOCALHOST:1", True),
    ("[::1]:9090", True),
    ("127.9.9.9", True),
    ("evil.example.com", False),
    ("evil.example.com:9090", False),
    ("127.0.0.1.evil.example.com", False),
    ("localhost.evil.example.com", False),
    ("127.0.0.1@evil.example.com", False),
    ("evil.example.com@evil.example.com", False),
    ("0.0.0.0:9090", False),
    ("10.0.0.1", False),
    ("", False),
    ("[::1", False),
    ("router.internal", True),
]


async def test_a_page_whose_name_was_pointed_here_reads_nothing(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, admin={"allowed_hosts": ["Router.Internal"]})
    for host, allowed in HOSTS:
        answer = await proxy.client.get("/breakdown", headers={"host": host})
        assert answer.status_code == (200 if allowed else 403), host
        if not allowed:
            assert "allowed_hosts" in answer.json()["error"]["message"]
        # Clients may use any host name.
        assert (await proxy.client.get("/v1/models", headers={"host": host})).status_code == 200


ORIGINS = [
    (None, "127.0.0.1:9090", True),
    ("http://127.0.0.1:9090", "127.0.0.1:9090", True),
    ("http://LOCALHOST:9090", "localhost:9090", True),
    ("http://127.0.0.1:8080", "127.0.0.1:9090", False),
    ("http://localhost:9090", "127.0.0.1:9090", False),
    ("https://evil.example.com", "127.0.0.1:9090", False),
    ("https://127.0.0.1.evil.example.com:9090", "127.0.0.1:9090", False),
    ("null", "127.0.0.1:9090", False),
    ("", "127.0.0.1:9090", False),
    ("http://[bad", "127.0.0.1:9090", False),
    ("https://router.internal", "127.0.0.1:9090", True),
]


@pytest.mark.parametrize("keyed", [False, True])
async def test_pages_of_other_sites_change_nothing(start_proxy: StartProxy, keyed: bool) -> None:
    proxy = await start_proxy(1, admin={"allowed_hosts": ["router.internal"]}, keys=KEYS if keyed else {})
    for origin, host, allowed in ORIGINS:
        proxy.core.router.switch("linear", {}, None, {})
        headers = {"host": host, **(bearer(ADMIN) if keyed else {}), **({} if origin is None else {"origin": origin})}
        answer = await proxy.client.put("/policy", json={"name": "random"}, headers=headers)
        assert answer.status_code == (200 if allowed else 403), origin
        effective = await proxy.client.get("/policy", headers=bearer(ADMIN))
        assert effective.json()["name"] == ("random" if allowed else "linear")
        explained = await proxy.client.post("/explain", json=OK, headers=headers)
        assert explained.status_code == (200 if allowed else 403)


@pytest.mark.parametrize("listener", list(Listener))
async def test_no_listener_accepts_websockets(listener: Listener) -> None:
    """Any page may open one, and an application that accepted it would bypass every check."""
    said: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        said.append(dict(message))

    async def never(*_: Any) -> None:
        raise AssertionError("the application was reached")

    await Guard(never, access(), listener)({"type": "websocket", "path": "/stats", "headers": []}, receive, send)
    assert [message["type"] for message in said] == ["websocket.close"]


def access(**settings: Any) -> Access:
    made = load_settings(None, instances=[{"url": "http://a"}], **settings)
    return Access(made, Keys(made.keys))


async def test_a_route_that_must_have_a_key_gets_its_name_or_refuses() -> None:
    name = access(keys=KEYS).check(Listener.MAIN, "POST", "/instances", {b"authorization": f"Bearer {ADMIN}".encode()})
    assert name == "root"
    assert admin_key_of(Request({"type": "http", "state": {"admin_key": name}})) == "root"
    for state in ({}, {"admin_key": None}):
        with pytest.raises(RequestError) as caught:
            admin_key_of(Request({"type": "http", "state": state}))
        assert caught.value.status == 403


def test_refusals_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    rules = access(keys=KEYS)
    for _ in range(50):
        with pytest.raises(RequestError):
            rules.check(Listener.MAIN, "GET", "/stats", {b"authorization": b"Bearer guessing-guessing"})
    reported = [record for record in caplog.records if record.name == "warmroute.access"]
    assert len([record for record in reported if record.levelname == "WARNING"]) == 1
    assert "guessing" not in caplog.text
