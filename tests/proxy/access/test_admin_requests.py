"""Admin requests that FastAPI would accept in part, or leave unread: unknown query parameters, content types."""

from __future__ import annotations

import json

import pytest

from proxy.access.rules import Side, side_of
from tests.proxy.access.test_admin_side import code
from tests.proxy.access.test_keys import ADMIN, KEYS, bearer
from tests.proxy.conftest import StartProxy


async def test_every_admin_endpoint_refuses_an_unknown_query_parameter(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, keys=KEYS)
    document = (await proxy.client.get("/openapi.json", headers=bearer(ADMIN))).json()
    asked = [
        (method.upper(), path.replace("{name}", "inst-0"))
        for path, methods in document["paths"].items()
        for method in methods
        if side_of(path) is Side.ADMIN and path not in {"/metrics"}
    ]
    assert {("POST", "/reload"), ("DELETE", "/instances/inst-0"), ("GET", "/stats"), ("PUT", "/shadow")} <= {*asked}
    for method, path in asked:
        answer = await proxy.client.request(method, path, params={"bogus": 1}, json={}, headers=bearer(ADMIN))
        assert code(answer) == (400, "unknown_parameter"), (method, path, answer.text)
        assert answer.json()["error"]["param"] == "bogus"
    assert [each["name"] for each in (await proxy.client.get("/instances", headers=bearer(ADMIN))).json()["instances"]]


async def test_the_error_of_an_unknown_query_parameter_has_the_known_ones(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, keys=KEYS)
    for method, path, known in (
        ("POST", "/reload?dryrun=true", "unknown query parameter 'dryrun'; known: dry_run"),
        ("DELETE", "/instances/inst-0?grace=5", "unknown query parameter 'grace'; known: grace_s, wait"),
        ("GET", "/cache-killers?foo=1", "unknown query parameter 'foo'; known: limit, session_id, rule"),
        ("GET", "/stats?limit=1", "unknown query parameter 'limit'; it has none"),
        ("GET", "/breakdown?request_class=WARM", "known: limit, format, instance, class, "),
    ):
        answer = await proxy.client.request(method, path, headers=bearer(ADMIN))
        assert known in answer.json()["error"]["message"]
        assert answer.status_code == 400


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "text/plain", "application/json"])
async def test_admin_bodies_are_json_whatever_their_content_type(
    start_proxy: StartProxy, content_type: str | None
) -> None:
    proxy = await start_proxy(1, keys=KEYS)
    headers = bearer(ADMIN) | ({} if content_type is None else {"content-type": content_type})
    for method, path, body, status in (
        ("PUT", "/policy", {"name": "round_robin"}, 200),
        ("PUT", "/admission", {"max_hold_s": 7}, 200),
        ("PUT", "/shadow", {"policies": ["warm"]}, 200),
        ("POST", "/instances", {"name": "more", "url": "http://127.0.0.1:9"}, 201),
        ("PUT", "/instances/inst-0", {"url": proxy.engines[0].url}, 200),
    ):
        answer = await proxy.client.request(method, path, content=json.dumps(body), headers=headers)
        assert answer.status_code == status, (path, answer.text)
    broken = await proxy.client.put("/policy", content="name=warm", headers=headers)
    assert broken.status_code == 400
    assert "JSON" in broken.json()["error"]["message"]


async def test_probes_scrapers_and_clients_may_add_query_parameters(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for path in ("/health", "/ready", "/ping", "/metrics", "/v1/models", "/version", "/load"):
        assert (await proxy.client.get(path, params={"from": "balancer"})).status_code == 200, path
