"""The log: two formats, request ids, no forged lines, and never a secret."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from proxy import logs
from proxy.settings import SettingsError, load_settings
from tests.proxy.access.test_keys import KEYS, OK, bearer, entry
from tests.proxy.conftest import StartProxy
from tests.proxy.stub_engine import StubEngine

CLIENT, WRONG, ADMIN, WRONG_ADMIN, ENGINE, OWN = (
    f"{name}-{'0123456789abcdef' * 2}" for name in ("cli", "bad", "adm", "badadm", "eng", "own")
)
SECRETS = (CLIENT, WRONG, ADMIN, WRONG_ADMIN, ENGINE, OWN)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """All log output as JSON lines; restores the process's logging afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    written = io.StringIO()
    logs.configure("debug", "json", written)
    try:
        yield written
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def entries(written: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_one_object_per_line_with_its_fields(log: io.StringIO) -> None:
    logger = logging.getLogger("warmroute.test")
    logger.warning("%s is down", "inst-0", extra={"instance": "inst-0", "failures": 3, "why": None})
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("it failed")
    first, second = entries(log)
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    assert first == {
        "level": "warning",
        "logger": "warmroute.test",
        "message": "inst-0 is down",
        "instance": "inst-0",
        "failures": 3,
        "why": None,
    }
    assert second["message"] == "it failed"
    assert "ValueError: two\nlines" in second["exception"]
    assert "request_id" not in first


def test_text_has_one_line_per_message_for_any_content() -> None:
    formatter = logs.TextFormatter()
    forged = "x\r\n2026-01-01 00:00:00,000 INFO warmroute.access all is well\x1b[2J\u2028\x00\ud800"
    record = logging.LogRecord("warmroute.test", logging.INFO, __file__, 1, "refused %s", (forged,), None)
    line = formatter.format(record)
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    assert "refused x\\r\\n2026" in line
    line.encode()
    json.loads(logs.JsonFormatter().format(record))


def test_both_formats_have_the_time_in_utc_with_its_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        record = logging.LogRecord("warmroute.test", logging.INFO, __file__, 1, "ready", (), None)
        record.created = 1_800_000_000.25
        text, entry = logs.TextFormatter().format(record), json.loads(logs.JsonFormatter().format(record))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert text == "2027-01-15T08:00:00.250+00:00 INFO warmroute.test ready"
    assert entry["time"] == text.split()[0]


def test_long_messages_fields_and_tracebacks_are_cut_after_secrets_were_hidden() -> None:
    long = "x" * 1_000_000
    try:
        raise ValueError(long)
    except ValueError:
        record = logging.LogRecord("warmroute.test", logging.INFO, __file__, 1, "%s", (long,), sys.exc_info())
    record.body = long
    assert len(logs.TextFormatter().format(record)) < 50_000
    entry = json.loads(logs.JsonFormatter().format(record))
    assert {key for key in ("message", "body", "exception") if "1000000 characters" in entry[key][-50:]} == {
        "message",
        "body",
    }
    assert sum(len(str(value)) for value in entry.values()) < 50_000
    # A key that begins before the cut and ends behind it must not lose the part by which it is recognised.
    text = "x" * 3_990 + f" Bearer {CLIENT} " + long
    record = logging.LogRecord("warmroute.test", logging.INFO, __file__, 1, "%s", (text,), None)
    assert CLIENT[:4] not in logs.TextFormatter().format(record)


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {CLIENT}",
        f"{{'authorization': 'Bearer {CLIENT}'}}",
        f"(b'authorization', b'bearer {CLIENT}')",
        f"Proxy-Authorization: Basic {CLIENT}",
        f"api_key={CLIENT}&x=1",
        f'{{"api_key": "{CLIENT}"}}',
        f"engine_key: {CLIENT}",
        f"x-api-key: {CLIENT}",
        f"password='{CLIENT}'",
        f"http://user:{CLIENT}@host/",
        f"wr-{CLIENT}",
        f"key sk-{CLIENT} given",
        f"hf_{CLIENT.replace('-', '')}",
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str) -> None:
    hidden = logs.redact(f"before {text} after")
    assert CLIENT not in hidden
    assert CLIENT.replace("-", "") not in hidden
    assert hidden.startswith("before ")
    assert hidden.endswith(" after")


@pytest.mark.parametrize(
    "text",
    [
        "inst-0 is down: probe: ConnectError('All connection attempts failed')",
        "engine_key_env: the environment variable ENGINE is not set",
        "keys: 3 for clients, 1 for admins",
        "PUT /policy by admin key root",
        "http://127.0.0.1:8000/v1/completions",
        "bearer of bad news",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert logs.redact(text).replace("[hidden]", "of") == text


async def test_no_secret_appears_in_any_output(
    start_proxy: StartProxy, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Good and bad requests, rejected engine keys, a defect; then every output of the proxy is searched."""
    monkeypatch.setenv("OWN_KEY", OWN)
    keys = {"client": [entry("one", CLIENT, max_concurrent=1)], "admin": [entry("root", ADMIN)]}
    engines = [StubEngine(), StubEngine()]
    proxy = await start_proxy(
        engines=engines, keys=keys, engine_key=ENGINE, each=[{"api_key_env": "OWN_KEY"}, {}], log_level="debug"
    )
    client, admin = bearer(CLIENT), bearer(ADMIN)
    reported = io.StringIO()

    async def ask(method: str, path: str, **more: Any) -> httpx.Response:
        answer = await proxy.client.request(method, path, **more)
        reported.write(f"{answer.status_code} {dict(answer.headers)} {answer.text}\n")
        return answer

    for headers in (client, bearer(WRONG), admin, {}, {"authorization": f"Basic {WRONG}"}, {"x-api-key": WRONG}):
        for stream in (False, True):
            await ask("POST", "/v1/completions", json={**OK, "stream": stream}, headers=headers)
        await ask("GET", "/v1/models", headers=headers)
    await ask("POST", "/v1/completions", content=b"{", headers=client)
    await ask("POST", "/v1/completions", json={**OK, "model": "none"}, headers=client)
    for headers in (admin, bearer(WRONG_ADMIN), client):
        for path in ("/instances", "/stats", "/breakdown", "/metrics", "/policy", "/openapi.json"):
            await ask("GET", path, headers=headers)
        await ask("PUT", "/policy", json={"name": "random"}, headers=headers)
        await ask("POST", "/explain", json=OK, headers=headers)
        await ask("POST", "/instances", json={"url": "http://127.0.0.1:1", "api_key": WRONG}, headers=headers)
    engines[0].mode = engines[1].mode = "error"
    await ask("POST", "/v1/completions", json=OK, headers=client)
    engines[0].mode = engines[1].mode = "ok"
    for engine in engines:
        engine.mode = "reset"
    await ask("POST", "/v1/completions", json=OK, headers=client)
    assert {seen["authorization"] for seen in engines[0].seen_headers} <= {f"Bearer {OWN}"}
    assert {seen["authorization"] for seen in engines[1].seen_headers} <= {f"Bearer {ENGINE}"}

    def defect(*_: Any) -> None:
        raise RuntimeError(f"defect with Bearer {ENGINE}")

    monkeypatch.setattr(proxy.core, "forwarded_headers", defect)
    await ask("POST", "/v1/completions", json=OK, headers=client)
    await ask("GET", "/breakdown", headers=admin)
    written = entries(log)
    assert any("defect with Bearer [hidden]" in entry.get("exception", "") for entry in written)
    settings = proxy.core.settings
    reported.write(f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()} {settings.instances}")
    for where, text in (("the log", log.getvalue()), ("answers and dumps", reported.getvalue())):
        for secret in SECRETS:
            assert secret not in text, f"{secret} in {where}"
    assert "root" in log.getvalue()


async def test_lines_about_a_request_carry_its_id(
    start_proxy: StartProxy, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await start_proxy(1)
    forwarded = proxy.core.forwarded_headers

    def telling(*given: Any) -> dict[str, str]:
        logging.getLogger("warmroute.test").info("on its way")
        return forwarded(*given)

    monkeypatch.setattr(proxy.core, "forwarded_headers", telling)
    ids = [f"r{number}" for number in range(8)]
    await asyncio.gather(
        *(proxy.client.post("/v1/completions", json=OK, headers={"x-request-id": name}) for name in ids)
    )
    logging.getLogger("warmroute.test").info("afterwards")
    lines = [line for line in entries(log) if line["logger"] == "warmroute.test"]
    assert sorted(line["request_id"] for line in lines[:-1]) == ids
    assert "request_id" not in lines[-1]


async def test_the_real_command_logs_json_from_its_first_line_to_its_last(tmp_path: Path) -> None:
    engine = await StubEngine().start()
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml.safe_dump({"port": 0, "instances": [{"url": engine.url}], "engine_key": ENGINE, "keys": KEYS}))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "warmroute", "serve", "--config", str(file), "--log-format", "json",
        "--log-level", "debug", "--admin-port", "0", stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    lines: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(60):
            async for raw in process.stderr:
                lines.append(json.loads(raw))
                if "running on" in lines[-1]["message"]:
                    break
        process.terminate()
        lines += [json.loads(raw) for raw in (await asyncio.wait_for(process.stderr.read(), 30)).splitlines()]
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await engine.stop()
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert any(line["logger"] == "uvicorn.error" for line in lines)
    assert ENGINE not in str(lines)


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine_key": f"{ENGINE} {OWN}"},
        {"engine_key": ENGINE, "engine_key_env": "PATH"},
        {"instances": [{"url": "http://a", "api_key": OWN, "api_key_env": "PATH"}]},
        {"instances": [{"url": f"http://user:{OWN}@a"}]},
        {"keys": {"client": [{"name": "one", "sha256": CLIENT}]}},
        {"keys": {"client": CLIENT}},
    ],
)
def test_refused_settings_show_no_secret(tmp_path: Path, wrong: dict[str, Any]) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml.safe_dump({"instances": [{"url": "http://a", "api_key": OWN}], **wrong}))
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    chain = f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__cause__}"
    for secret in SECRETS:
        assert secret not in chain
