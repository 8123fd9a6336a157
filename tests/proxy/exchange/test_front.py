"""The front that clients meet: aliases, a missing model, the merged list of models, queries, cross-origin pages."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest

from proxy.admin.anthropic_models import anthropic_card
from proxy.request.aliases import ModelAliases
from proxy.settings import SettingsError, load_settings
from tests.proxy.access.test_keys import KEY, KEYS, bearer
from tests.proxy.conftest import StartProxy, ledger_is_zero
from tests.proxy.passing_engine import PassingEngine
from tests.proxy.stub_engine import StubEngine
from tests.proxy.typed_engine import TypedEngine

ALIASES = {"models": {"aliases": {"gpt-4o": "stub"}}}
OK: dict[str, Any] = {"model": "stub", "prompt": list(range(200)), "max_tokens": 4}
PAGE = "https://app.example.com"


@pytest.mark.parametrize("padding", [0, 3 * 1024 * 1024])
async def test_an_alias_is_replaced_and_other_bodies_stay_as_they_are(start_proxy: StartProxy, padding: int) -> None:
    proxy = await start_proxy(1, **ALIASES)
    other = b'{"model" : "stub","prompt":"x" ,"pad":"' + b"y" * padding + b'"}'
    alias = b'{"pad":"' + b"y" * padding + b'","a":1.50,"model" : "gpt-4\\u006f","prompt":"x","stream":true}'
    for body in (other, alias):
        assert (await proxy.client.post("/v1/completions", content=body)).status_code == 200
    first, second = proxy.engines[0].raw_bodies
    assert first == other
    fields = json.loads(second)
    assert (fields["model"], fields["prompt"], len(fields["pad"])) == ("stub", "x", padding)
    assert b'"a":1.50' in second
    assert ledger_is_zero(await proxy.settled())


async def test_an_alias_shares_the_cache_with_its_model(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(4, **ALIASES)
    first = await proxy.client.post("/v1/completions", json=OK)
    second = await proxy.client.post("/v1/completions", json={**OK, "model": "gpt-4o"})
    assert second.headers["x-warmroute-instance"] == first.headers["x-warmroute-instance"]
    assert int(second.headers["x-warmroute-predicted-cached-tokens"]) > 0
    assert (await proxy.client.post("/explain", json={**OK, "model": "gpt-4o"})).status_code == 200


async def test_an_alias_of_messages_and_of_their_counting(start_proxy: StartProxy) -> None:
    engine = TypedEngine()
    proxy = await start_proxy(engines=[engine], models={"aliases": {"claude": "stub"}})
    body = {"model": "claude", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert (await proxy.client.post(path, json=body)).status_code == 200
    assert [seen["model"] for seen in engine.seen] == ["stub", "stub"]


async def test_models_are_merged_with_their_adapters_and_aliases(start_proxy: StartProxy) -> None:
    engines = [StubEngine(adapters=["sql"]), StubEngine(adapters=["sql", "style"]), StubEngine(model="embedder")]
    aliases = {"gpt-4o": "stub", "ghost": "not-served", "text-to-sql": "sql"}
    proxy = await start_proxy(engines=engines, models={"aliases": aliases})
    cards = {card["id"]: card for card in (await proxy.client.get("/v1/models")).json()["data"]}
    assert list(cards) == ["stub", "sql", "style", "embedder", "gpt-4o", "text-to-sql"]
    assert [cards[name]["parent"] for name in ("stub", "sql", "style")] == [None, "stub", "stub"]
    assert (cards["gpt-4o"]["root"], cards["gpt-4o"]["parent"]) == ("stub", None)
    assert (cards["text-to-sql"]["root"], cards["text-to-sql"]["parent"]) == ("sql", "stub")


@pytest.mark.parametrize("aliases", [{"a": "b", "b": "c"}, {"a": "a"}, {"": "b"}, {"a": "b\n"}])
def test_aliases_that_are_refused(aliases: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="models"):
        load_settings(None, instances=[{"url": "http://127.0.0.1:1"}], models={"aliases": aliases})


@pytest.mark.parametrize(
    ("aliases", "problem"),
    [
        ({"claude-*-4": "stub"}, "last character"),
        ({"**": "stub"}, "last character"),
        ({"claude": "st*"}, "not one model"),
    ],
)
def test_a_star_elsewhere_is_refused_with_its_place(aliases: dict[str, str], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        load_settings(None, instances=[{"url": "http://127.0.0.1:1"}], models={"aliases": aliases})


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("claude-sonnet-4-5-20250929", "large"),
        ("claude-haiku-4-5-20251001", "small"),
        ("claude-", "large"),
        ("claude-haiku-exact", "exact"),
        ("claude-served", None),
        ("claude-target", None),
        ("claude", None),
        ("Claude-sonnet", None),
    ],
)
def test_an_exact_alias_comes_first_then_a_served_name_then_the_longest_prefix(name: str, model: str | None) -> None:
    aliases = {"claude-*": "large", "claude-haiku-*": "small", "claude-haiku-exact": "exact", "x": "claude-target"}
    assert ModelAliases(aliases, lambda each: each == "claude-served").get(name) == model


async def test_a_prefix_of_names_stands_for_a_model_and_is_not_listed(start_proxy: StartProxy) -> None:
    engine = TypedEngine()
    proxy = await start_proxy(engines=[engine], models={"aliases": {"claude-*": "stub", "*": "stub", "gpt": "stub"}})
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = await proxy.client.post(path, json={**body, "model": "claude-sonnet-4-5-20250929"})
        assert answer.status_code == 200
    assert [seen["model"] for seen in engine.seen] == ["stub", "stub"]
    assert [card["id"] for card in (await proxy.client.get("/v1/models")).json()["data"]] == ["stub", "gpt"]


@pytest.mark.parametrize("encoded", [False, True])
async def test_one_model_is_read_by_name_or_alias(start_proxy: StartProxy, encoded: bool) -> None:
    aliases = {"gpt-4o": "org/large", "claude-*": "org/large", "ghost": "not-served"}
    proxy = await start_proxy(engines=[StubEngine(model="org/large", adapters=["sql"])], models={"aliases": aliases})
    listed = {card["id"]: card for card in (await proxy.client.get("/v1/models")).json()["data"]}
    for name in ("org/large", "sql", "gpt-4o"):
        written = quote(name, safe="") if encoded else name
        answer = await proxy.client.get(f"/v1/models/{written}")
        assert (answer.status_code, answer.json()) == (200, listed[name])
    by_prefix = (await proxy.client.get("/v1/models/claude-sonnet-4-5-20250929")).json()
    assert by_prefix == {**listed["gpt-4o"], "id": "claude-sonnet-4-5-20250929"}
    assert (await proxy.client.get("/v1/models/")).json() == (await proxy.client.get("/v1/models")).json()
    for name in ("nope", "ghost", "org"):
        answer = await proxy.client.get(f"/v1/models/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    anthropic = await proxy.client.get("/v1/models/nope", headers={"anthropic-version": "2023-06-01"})
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (404, "not_found_error")
    assert anthropic.json()["type"] == "error"
    wrong = await proxy.client.delete("/v1/models/org/large")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")


async def test_models_have_the_shape_of_anthropics_api_for_its_clients(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[StubEngine(adapters=["a", "b"])], models={"aliases": {"gpt": "stub"}})
    header = {"anthropic-version": "2023-06-01"}

    async def page(**query: str) -> Any:
        return (await proxy.client.get("/v1/models", params=query, headers=header)).json()

    plain = (await proxy.client.get("/v1/models")).json()
    assert set(plain) == {"object", "data"}
    assert not any("display_name" in card for card in plain["data"])
    whole = await page()
    names = [card["id"] for card in whole["data"]]
    assert names == [card["id"] for card in plain["data"]] == ["stub", "a", "b", "gpt"]
    assert (whole["has_more"], whole["first_id"], whole["last_id"]) == (False, "stub", "gpt")
    for card in whole["data"]:
        assert (card["type"], card["display_name"], card["lifecycle"]) == ("model", card["id"], "active")
        assert card["created_at"].endswith("Z")
        one = await proxy.client.get(f"/v1/models/{card['id']}", headers=header)
        assert one.json() == card
    for query, shown, more in (
        ({"limit": "2"}, ["stub", "a"], True),
        ({"limit": "2", "after_id": "a"}, ["b", "gpt"], False),
        ({"limit": "2", "before_id": "gpt"}, ["a", "b"], True),
        ({"after_id": "gpt"}, [], False),
    ):
        got = await page(**query)
        assert ([card["id"] for card in got["data"]], got["has_more"]) == (shown, more)
    for wrong in ({"limit": "0"}, {"limit": "many"}, {"after_id": "nope"}):
        assert (await page(**wrong))["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("created", "shown"), [(0, 1970), (None, 1970), (10**30, 1970), (1_800_000_000, 2027)])
def test_a_card_without_a_valid_time_has_the_epoch(created: object, shown: int) -> None:
    assert anthropic_card({"id": "m", "created": created})["created_at"].startswith(f"{shown}-01-")


async def test_one_model_needs_a_key_and_an_engine(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, keys=KEYS)
    assert (await proxy.client.get("/v1/models/stub")).status_code == 401
    assert (await proxy.client.get("/v1/models/stub", headers=bearer(KEY))).status_code == 200
    down = await start_proxy(engines=[StubEngine()], models={"aliases": {"a": "stub"}})
    for instance in down.core.instances:
        instance.healthy, instance.models = False, None
    assert (await down.client.get("/v1/models/stub")).status_code == (await down.client.get("/v1/models")).status_code
    anthropic = await down.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (503, "overloaded_error")


async def test_a_prefix_replaces_no_name_that_an_engine_serves(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[StubEngine(adapters=["sql"])], models={"aliases": {"*": "stub"}})
    for name, sent in (("sql", "sql"), ("stub", "stub"), ("other", "stub")):
        assert (await proxy.client.post("/v1/completions", json={**OK, "model": name})).status_code == 200
        assert proxy.engines[0].seen[-1]["model"] == sent


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "/v1/*", "/metrics", "v1/a", "/v1/../a", "/v1/a/*/b", "/v1/a b", "/v2/a"]
)
def test_paths_to_pass_on_that_are_refused(path: str) -> None:
    with pytest.raises(SettingsError, match=r"pass_through\.paths"):
        load_settings(None, instances=[{"url": "http://127.0.0.1:1"}], pass_through={"paths": [path]})


@pytest.mark.parametrize("given", [{}, {"model": None}, {"model": None, "pad": "y" * 3 * 1024 * 1024}])
async def test_a_missing_model_is_the_one_that_is_served(start_proxy: StartProxy, given: dict[str, Any]) -> None:
    proxy = await start_proxy(engines=[StubEngine(adapters=["sql"]) for _ in range(4)])
    body = {key: value for key, value in OK.items() if key != "model"} | given
    sent = json.dumps(body).encode()
    for engine in proxy.engines:
        engine._answer = answer_without_model(engine)  # type: ignore[method-assign]
    first = await proxy.client.post("/v1/completions", content=sent)
    named = await proxy.client.post("/v1/completions", json=OK)
    assert (first.status_code, named.status_code) == (200, 200)
    assert first.headers["x-warmroute-instance"] == named.headers["x-warmroute-instance"]
    assert next(raw for engine in proxy.engines for raw in engine.raw_bodies) == sent


def answer_without_model(engine: StubEngine) -> Any:
    answer = engine._answer

    async def answered(request: Any, body: dict[str, Any]) -> Any:
        return await answer(request, {**body, "model": engine.model})

    return answered


async def test_a_missing_model_is_refused_if_several_are_served(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[StubEngine(), StubEngine(model="other")])
    answer = await proxy.client.post("/v1/completions", json={"prompt": "x"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "model", "invalid_type")
    assert "missing required field `model`" in error["message"]
    assert not any(engine.seen for engine in proxy.engines)


@pytest.mark.parametrize("stream", [True, False])
async def test_queries_are_passed_on(start_proxy: StartProxy, stream: bool) -> None:
    engine = TypedEngine()
    proxy = await start_proxy(engines=[engine])
    body = {"model": "stub", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    assert (await proxy.client.post("/v1/messages?beta=true&x=%20", json=body)).status_code == 200
    assert engine.paths == ["POST /v1/messages?beta=true&x=%20"]


async def test_pages_of_other_origins_are_off_by_default(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    page = {"origin": PAGE, "access-control-request-method": "POST"}
    for path, allowed in (
        ("/v1/completions", "POST, OPTIONS"),
        ("/v1/models", "GET, OPTIONS"),
        ("/tokenize", "POST, OPTIONS"),
    ):
        answer = await proxy.client.options(path, headers=page)
        assert (answer.status_code, answer.headers["allow"]) == (204, allowed)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert (await proxy.client.options("/v1/nope")).json()["error"]["code"] == "unknown_path"
    answer = await proxy.client.post("/v1/completions", json=OK, headers={"origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(("allowed", "answered"), [(["*"], "*"), (["http://localhost:3000", PAGE.upper()], PAGE)])
async def test_pages_of_allowed_origins(start_proxy: StartProxy, allowed: list[str], answered: str) -> None:
    proxy = await start_proxy(engines=[PassingEngine()], cors={"allowed_origins": allowed}, keys=KEYS)
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    preflight = await proxy.client.options("/v1/completions", headers={"origin": PAGE, **asked})
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == answered
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "authorization, content-type"
    page = {"origin": PAGE, **bearer(KEY)}
    answers = [
        await proxy.client.post("/v1/completions", json=OK, headers=page),
        await proxy.client.post("/v1/completions", json={**OK, "stream": True}, headers=page),
        await proxy.client.post("/v1/embeddings", json=OK, headers=page),
        await proxy.client.post("/v1/completions", content=b"{", headers=page),
        await proxy.client.post("/v1/completions", json=OK, headers={"origin": PAGE}),
        await proxy.client.get("/v1/models", headers=page),
        await proxy.client.get("/v1/models", headers={"origin": PAGE}),
        await proxy.client.get("/v1/nope", headers=page),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 400, 401, 200, 401, 404]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == answered
        assert answer.headers["access-control-expose-headers"] == "*"


async def test_other_origins_and_the_admin_side_get_nothing(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, cors={"allowed_origins": [PAGE]})
    foreign = {"origin": "https://evil.example.com", "access-control-request-method": "POST"}
    answers = [
        await proxy.client.options("/v1/completions", headers=foreign),
        await proxy.client.post("/v1/completions", json=OK, headers=foreign),
        await proxy.client.get("/v1/models", headers=foreign),
        *[await proxy.client.get(path, headers={"origin": PAGE}) for path in ("/stats", "/instances", "/metrics")],
        await proxy.client.options("/instances", headers={**foreign, "origin": PAGE}),
    ]
    assert not [name for answer in answers for name in answer.headers if name.startswith("access-control")]
    assert answers[1].headers["vary"] == "origin"


@pytest.mark.parametrize(
    "origin", ["app.example.com", "https://a.example.com/", "https://a.example.com/x", "https://*x y"]
)
def test_origins_that_are_refused(origin: str) -> None:
    with pytest.raises(SettingsError, match="is not an origin"):
        load_settings(None, instances=[{"url": "http://127.0.0.1:1"}], cors={"allowed_origins": [origin]})
