"""API keys: access, replacement by the engines' keys, and limits on requests in flight."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from proxy.access.keys import Keys, digest_of, new_key
from proxy.errors import RequestError
from proxy.settings import KeySettings, SettingsError, load_settings
from tests.proxy.conftest import Running, StartProxy, ledger_is_zero
from tests.proxy.exchange.test_held_requests import GatedEngine
from tests.proxy.stub_engine import StubEngine
from warmroute import build

KEY, OTHER, ADMIN = (
    "wr-client-key-for-the-tests-0001",
    "wr-client-key-for-the-tests-0002",
    "wr-admin-key-of-the-tests-01",
)
OK = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 4}


def entry(name: str, key: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **more}


KEYS = {"client": [entry("one", KEY), entry("two", OTHER)], "admin": [entry("root", ADMIN)]}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def started(start_proxy: StartProxy, count: int = 1, **settings: Any) -> Running:
    """A proxy with keys; its client uses an admin key for the tests' own queries."""
    proxy = await start_proxy(count, **{"keys": KEYS, **settings})
    proxy.client.headers.update(bearer(ADMIN))
    return proxy


BAD: list[dict[str, str]] = [
    {},
    {"authorization": ""},
    {"authorization": KEY},
    {"authorization": "Bearer"},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": f"Bearer {KEY.upper()}"},
    {"authorization": f"Bearer {ADMIN}"},
    {"authorization": f"Basic {KEY}"},
    {"authorization": f"Bearer {digest_of(KEY)}"},
    {"authorization": "Bearer " + "x" * 20_000},
    {"authorization": "Bearer \xff\xfe"},
    {"x-api-key": KEY + "x"},
    {"x-api-key": KEY, "authorization": "Bearer wrong"},
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_without_a_good_key_nothing_reaches_an_engine(start_proxy: StartProxy, path: str) -> None:
    proxy = await started(start_proxy)
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False) as client:
        for headers in BAD:
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            answer = await client.post(path, json={**OK, "messages": []}, headers=raw)
            assert answer.status_code == 401, headers
            assert answer.headers.get_list("www-authenticate") == ["Bearer"]
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
            assert KEY not in answer.text
    assert proxy.engines[0].seen == []
    assert {(row["outcome"], row["status"]) for row in await proxy.rows()} == {("rejected", 401)}
    assert ledger_is_zero(await proxy.settled())


async def test_a_refusal_names_every_header_that_may_have_the_key(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, keys=KEYS)
    client = (await proxy.client.post("/v1/messages", json={})).json()["error"]["message"]
    admin = (await proxy.client.get("/stats")).json()["error"]["message"]
    assert client == "no API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    assert admin == "no API key: send it as 'Authorization: Bearer KEY'"


async def test_a_request_without_a_key_is_refused_before_its_body_is_read(start_proxy: StartProxy) -> None:
    proxy = await started(start_proxy)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\nexpect: 100-continue\r\n\r\n")
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert answer.startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_a_refusal_waits_for_the_answer_before_it_on_the_same_connection(start_proxy: StartProxy) -> None:
    proxy = await started(start_proxy, engines=[StubEngine(prefill_s=0.3)])
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
    body = json.dumps(OK).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(body)
    writer.write(head + b"authorization: Bearer " + KEY.encode() + b"\r\n\r\n" + body + head + b"\r\n" + body)
    first = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert first.startswith(b"HTTP/1.1 200 ")
    length = int(first.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    await reader.readexactly(length)
    second = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert second.startswith(b"HTTP/1.1 401 ")
    writer.close()
    assert len(proxy.engines[0].seen) == 1


async def test_every_key_is_good_and_stays_here(start_proxy: StartProxy) -> None:
    proxy = await started(start_proxy)
    for given in (f"Bearer {KEY}", f"bearer {OTHER}", f"BEARER  {KEY}"):
        headers = {"authorization": given, "x-session-id": "s"}
        for stream in (False, True):
            answer = await proxy.client.post("/v1/completions", json={**OK, "stream": stream}, headers=headers)
            assert answer.status_code == 200
        models = await proxy.client.get("/v1/models", headers=headers)
        assert [model["id"] for model in models.json()["data"]] == ["stub"]
    assert len(proxy.engines[0].seen_headers) == 6
    for seen in proxy.engines[0].seen_headers:
        assert "authorization" not in seen
        assert seen["x-session-id"] == "s"


async def test_models_need_a_key_and_health_does_not(start_proxy: StartProxy) -> None:
    proxy = await started(start_proxy)
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False) as nobody:
        assert (await nobody.get("/health")).status_code == 200
        assert (await nobody.get("/ready")).json()["ready"] is True
        for path in ("/v1/models", "/v1/models/stub", "/v1", "/v1/embeddings"):
            answer = await nobody.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers.get_list("www-authenticate") == ["Bearer"]


async def test_without_client_keys_the_clients_key_is_forwarded_to_the_engine(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    await proxy.client.post("/v1/completions", json=OK, headers=bearer("what-the-engine-wants"))
    assert proxy.engines[0].seen_headers[0]["authorization"] == "Bearer what-the-engine-wants"


async def test_engines_are_shown_their_own_keys_on_every_path(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes, plain requests, P legs and D legs; one engine has a key of its own, the others the fleet's."""
    monkeypatch.setenv("FLEET_KEY", "the-fleets-key")
    monkeypatch.setenv("OWN_KEY", "its-own-key")
    engines = [StubEngine(), StubEngine()]
    probed: list[set[str | None]] = [set(), set()]
    for number, engine in enumerate(engines):
        for name in ("_health", "_metrics", "_models"):
            watch_probes(engine, name, probed[number])
    proxy = await started(
        start_proxy,
        engines=engines,
        role="kv_both",
        each=[{"api_key_env": "OWN_KEY"}, {}],
        engine_key_env="FLEET_KEY",
        offload={"planner": "threshold", "params": {"min_decode_requests": 0}},
        classes={"medium_tokens": 10, "heavy_tokens": 100},
    )
    wanted = ["Bearer its-own-key", "Bearer the-fleets-key"]
    for number in range(6):
        prompt = [number] * 2000
        answer = await proxy.client.post("/v1/completions", json={**OK, "prompt": prompt}, headers=bearer(KEY))
        assert answer.status_code == 200
    rows = await proxy.rows()
    assert any(row["offload_reason"] == "chosen" for row in rows), [row["offload_reason"] for row in rows]
    legs = [leg for engine in engines for leg in engine.seen if leg.get("kv_transfer_params")]
    assert len(legs) >= 2
    for engine, key, seen in zip(engines, wanted, probed, strict=True):
        assert {headers["authorization"] for headers in engine.seen_headers} == {key}
        assert seen == {key}


def watch_probes(engine: StubEngine, name: str, seen: set[str | None]) -> None:
    answer = getattr(engine, name)

    async def watched(request: Any) -> Any:
        seen.add(request.headers.get("authorization"))
        return await answer(request)

    setattr(engine, name, watched)


async def test_a_key_the_engine_refuses_is_not_the_clients_fault(start_proxy: StartProxy) -> None:
    engines = [StubEngine(), StubEngine()]
    answer = engines[0]._answer

    async def refuse(request: Any, body: dict[str, Any]) -> Any:
        from aiohttp import web

        if engines[0].mode == "ok":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await answer(request, body)

    engines[0]._answer = refuse  # type: ignore[method-assign]
    proxy = await started(start_proxy, engines=engines, engine_key="wrong", policy={"name": "round_robin"})
    for _ in range(4):
        got = await proxy.client.post("/v1/completions", json=OK, headers=bearer(KEY))
        assert (got.status_code, got.headers["x-warmroute-instance"]) == (200, "inst-1")
    failed = [attempt for row in await proxy.rows() for attempt in row["attempts"]]
    assert failed
    assert {attempt["instance"] for attempt in failed} == {"inst-0"}


async def test_a_key_has_its_share_of_requests_in_flight(start_proxy: StartProxy) -> None:
    keys = {**KEYS, "client": [entry("one", KEY, max_concurrent=2), entry("two", OTHER)]}
    engine = GatedEngine()
    proxy = await started(start_proxy, engines=[engine], keys=keys)

    async def ask(key: str) -> httpx.Response:
        return await proxy.client.post("/v1/completions", json=OK, headers=bearer(key))

    running = [asyncio.create_task(ask(KEY)) for _ in range(2)]
    await proxy.until(lambda: engine.running == 2)
    refused, other = await ask(KEY), asyncio.create_task(ask(OTHER))
    await proxy.until(lambda: engine.running == 3)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.headers["retry-after"] == "1"
    engine.open.set()
    assert (await other).status_code == 200
    assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]
    assert (await ask(KEY)).status_code == 200
    # A client that leaves frees its place too.
    engine.open.clear()
    leaving = [asyncio.create_task(ask(KEY)) for _ in range(2)]
    await proxy.until(lambda: engine.running == 2)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    await proxy.settled()
    engine.open.set()
    assert (await ask(KEY)).status_code == 200
    outcomes = [row["outcome"] for row in await proxy.rows()]
    assert outcomes.count("rejected") == 1


def headers_with(value: str) -> dict[bytes, bytes]:
    return {b"authorization": value.encode()}


def test_names_come_out_and_every_entry_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared = 0

    def count(given: bytes, expected: bytes) -> bool:
        nonlocal compared
        compared += 1
        return compare(given, expected)

    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", count)
    many = [entry(f"key-{number}", f"{KEY}{number}") for number in range(50)]
    keys = Keys(KeySettings.model_validate({"client": many}))
    assert keys.client(headers_with(f"Bearer {KEY}0")) == "key-0"
    assert keys.client(headers_with(f"Bearer {KEY}49")) == "key-49"
    with pytest.raises(RequestError):
        keys.client(headers_with("Bearer x"))
    assert compared == 150
    assert keys.admin({}) is None


def test_keys_in_a_file_are_read_again_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"

    def write(**lists: Any) -> None:
        file.write_text(yaml.safe_dump(lists))

    write(client=[entry("one", KEY)])
    settings = KeySettings.model_validate({"file": file, "admin": KEYS["admin"]})
    keys = Keys(settings)
    assert keys.client(headers_with(f"Bearer {KEY}")) == "one"
    assert keys.admin(headers_with(f"Bearer {ADMIN}")) == "root"
    write(client=[entry("two", OTHER, max_concurrent=3)])
    keys.apply(keys.read(settings))
    assert keys.client(headers_with(f"Bearer {OTHER}")) == "two"
    with pytest.raises(RequestError):
        keys.client(headers_with(f"Bearer {KEY}"))
    for broken in ("", "client: [", "client: [{name: x}]", "clients: []", "client: []", "[1]", f"client: [{KEY}]"):
        file.write_text(broken)
        with pytest.raises(SettingsError, match=r"keys\.yaml") as caught:
            keys.read(settings)
        assert KEY not in str(caught.value)
        assert keys.client(headers_with(f"Bearer {OTHER}")) == "two"
    write(admin=[entry("second", KEY)])
    with pytest.raises(SettingsError, match="last key"):
        keys.read(settings)
    file.unlink()
    with pytest.raises(SettingsError, match="No such file"):
        keys.read(settings)
    assert keys.client(headers_with(f"Bearer {OTHER}")) == "two"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"keys": {"client": [{"name": "a", "sha256": KEY}]}}, "keys.client.0.sha256"),
        ({"keys": {"client": [{"name": "a b", "sha256": digest_of(KEY)}]}}, "keys.client.0.name"),
        ({"keys": {"client": [entry("a", KEY), entry("a", OTHER)]}}, "same name"),
        ({"keys": {"client": [entry("a", KEY)], "admin": [entry("b", KEY)]}}, "same sha256"),
        ({"keys": {"client": [entry("a", KEY), entry("b", KEY)]}}, "same sha256"),
        ({"keys": {"admin": [entry("a", KEY, max_concurrent=1)]}}, "keys.admin.0.max_concurrent"),
        ({"keys": {"client": [entry("a", KEY, max_concurrent=0)]}}, "keys.client.0.max_concurrent"),
        ({"keys": {"file": "/nowhere/keys.yaml"}}, "/nowhere/keys.yaml"),
        ({"engine_key": "with space"}, "printable ASCII"),
        ({"engine_key": f"{KEY}\r\nx: y"}, "printable ASCII"),
        ({"engine_key": "a", "engine_key_env": "PATH"}, "give one of them"),
        ({"engine_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE is not set"),
        ({"instances": [{"url": "http://a", "api_key": KEY, "api_key_env": "PATH"}]}, "give one of them"),
        ({"instances": [{"url": "http://a", "api_key_env": "NOT_SET_ANYWHERE"}]}, "NOT_SET_ANYWHERE is not set"),
        ({"forward_headers": ["Authorization"]}, "cannot be forwarded"),
        ({"forward_headers": ["connection"]}, "cannot be forwarded"),
        ({"forward_headers": ["x y"]}, "not a header name"),
    ],
)
def test_bad_key_settings_are_refused_without_showing_a_key(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, **{"instances": [{"url": "http://a"}], **wrong})
    assert says in str(caught.value)
    assert KEY not in f"{caught.value} {caught.value.__cause__!r}"


def test_the_command_line_makes_and_hashes_keys() -> None:
    runner = CliRunner()
    made = runner.invoke(build(), ["key", "new", "--name", "agent-1"])
    assert made.exit_code == 0
    key = made.stdout.splitlines()[0]
    assert len(key) > 40
    [line] = yaml.safe_load(made.stdout.splitlines()[-1])
    assert line == {"name": "agent-1", "sha256": digest_of(key)}
    settings = load_settings(None, instances=[{"url": "http://a"}], keys={"client": [line]})
    assert Keys(settings.keys).client(headers_with(f"Bearer {key}")) == "agent-1"
    hashed = runner.invoke(build(), ["key", "hash", "--name", "agent-1"], input=f"{key}\n")
    assert yaml.safe_load(hashed.stdout) == [line]
    for short in ("", "\n", "hunter2\n", "with spaces in the middle of it\n"):
        refused = runner.invoke(build(), ["key", "hash"], input=short)
        assert refused.exit_code == 2
        assert "20 characters" in refused.stderr
    assert runner.invoke(build(), ["key", "new", "--name", "a b"]).exit_code == 2
    assert new_key() != new_key()
