"""Input of any size: it is cut before it is kept in a record, echoed in an answer or written to the log."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.fleet.models import ModelList
from tests.chaos.conftest import BODY, Chaos, StartChaos
from tests.chaos.rig.client import RawClient, post
from tests.chaos.rig.engine import ChaosEngine, Talk
from tests.chaos.rig.wire import whole

LONG = "x" * 400_000
WIDE = "\U0001f600\x01" * 40_000
IN_A_HEADER = "x" * 20_000
KEPT_BYTES = 8_000
"""More than any answer or row needs, less than any of the inputs."""


def kept_bytes(proxy: Chaos) -> int:
    """Bytes of all rows in memory."""
    breakdown = proxy.core.breakdown
    return sum(len(line) for _, line in breakdown.after(0, breakdown.finished))


@pytest.mark.parametrize("name", [LONG, WIDE], ids=["plain", "wide"])
async def test_a_long_model_name_is_refused_and_not_repeated(start_chaos: StartChaos, name: str) -> None:
    proxy = await start_chaos(ChaosEngine())
    for path in ("/v1/completions", "/explain"):
        answer = await proxy.client.post(path, json={**BODY, "model": name})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert name[:20] not in answer.json()["error"]["message"]
        assert len(answer.content) < KEPT_BYTES
    assert kept_bytes(proxy) < KEPT_BYTES
    assert proxy.engines[0].posts == []


async def test_an_unknown_model_is_named_in_an_answer_of_bounded_size(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine())
    adapters = frozenset(f"adapter-{number}" for number in range(10_000))
    proxy.core.instances.listed(proxy.instance(), ModelList(names=adapters))
    answer = await proxy.client.post("/v1/completions", json={**BODY, "model": "\x01" * 256})
    assert answer.status_code == 404
    assert len(answer.content) < KEPT_BYTES
    assert kept_bytes(proxy) < KEPT_BYTES


@pytest.mark.parametrize("field", ["user", "prompt_cache_key", "cache_salt"])
async def test_other_fields_of_the_body_are_cut_before_they_are_kept(start_chaos: StartChaos, field: str) -> None:
    proxy = await start_chaos(ChaosEngine())
    answer = await proxy.client.post("/v1/completions", json={**BODY, field: LONG})
    assert answer.status_code == 200
    assert kept_bytes(proxy) < KEPT_BYTES
    assert all(len(session) <= 256 for session in proxy.core.router.state.sessions._pins)


@pytest.mark.parametrize("header", ["x-request-id", "x-session-id", "authorization", "user-agent", "x-anything"])
async def test_headers_are_cut_or_replaced_before_they_are_kept(start_chaos: StartChaos, header: str) -> None:
    proxy = await start_chaos(ChaosEngine())
    async with RawClient(proxy.port) as client:
        await client.send(post(json.dumps(BODY).encode(), f"{header}: {IN_A_HEADER}"))
        got = await client.answer()
    assert got.status == 200
    assert sum(map(len, got.headers.values())) < KEPT_BYTES
    await proxy.nothing_left()
    assert kept_bytes(proxy) < KEPT_BYTES


async def broken_with_an_echo(talk: Talk) -> None:
    await talk.send(whole("500 Oops", json.dumps({"error": {"message": LONG}}).encode()))


async def not_http(talk: Talk) -> None:
    await talk.send(f"{IN_A_HEADER}\r\n\r\n".encode())
    await talk.close()


@pytest.mark.parametrize("fault", [broken_with_an_echo, not_http])
async def test_error_texts_of_engines_are_cut(start_chaos: StartChaos, fault: Any) -> None:
    proxy = await start_chaos(ChaosEngine(fault))
    answer = await proxy.client.post("/v1/completions", json=BODY)
    assert answer.status_code == 502
    assert len(answer.content) < KEPT_BYTES
    assert kept_bytes(proxy) < KEPT_BYTES
    assert len(proxy.instance().last_error or "") < KEPT_BYTES


async def test_a_probe_that_repeats_what_it_read_is_cut(start_chaos: StartChaos) -> None:
    async def odd_metrics(talk: Talk) -> None:
        body = b"process_start_time_seconds " + LONG.encode() + b"\n"
        await talk.send(whole("200 OK", body if talk.request.path == "/metrics" else b"{}"))

    proxy = await start_chaos(ChaosEngine())
    proxy.engines[0].probe_fault = odd_metrics
    await proxy.app.operations.fleet.probe(proxy.instance())
    assert "probe:" in (proxy.instance().last_error or "")
    assert len(proxy.instance().last_error or "") < KEPT_BYTES


REFUSED: list[tuple[str, str, Any, int]] = [
    ("GET", f"/{IN_A_HEADER}", None, 404),
    ("GET", f"/v1/{IN_A_HEADER}", None, 404),
    ("GET", f"/instances/{IN_A_HEADER}", None, 404),
    ("GET", f"/breakdown?limit={IN_A_HEADER}", None, 400),
    ("GET", f"/breakdown?format={IN_A_HEADER}", None, 400),
    ("PUT", "/policy", {"name": LONG}, 400),
    ("PUT", "/policy", {"planner": LONG}, 400),
    ("PUT", "/policy", {"name": "linear", "params": {LONG: 1}}, 400),
    ("PUT", "/policy", {"name": "linear", "params": {"alpha": LONG}}, 400),
    ("PUT", "/policy", {LONG: 1}, 400),
    ("PUT", "/policy", {f"key-{number}": 1 for number in range(10_000)}, 400),
    ("PUT", "/policy", {"\ud800": 1}, 400),
    ("PUT", "/policy", {"name": "\ud800"}, 400),
    ("PUT", "/admission", {"name": LONG}, 400),
    ("PUT", "/admission", {"params": {LONG: 1}}, 400),
    ("PUT", "/admission", {"name": "session_cap", "params": {"sessions": LONG}}, 400),
    ("PUT", "/admission", {LONG: 1}, 400),
    ("PUT", "/shadow", {"policies": [LONG]}, 400),
    ("PUT", "/shadow", {"policies": [{"name": "warm", "label": LONG}]}, 400),
]


async def test_refusals_of_other_endpoints_are_short(start_chaos: StartChaos) -> None:
    proxy = await start_chaos(ChaosEngine())
    for method, path, body, status in REFUSED:
        content = None if body is None else json.dumps(body)
        answer = await proxy.client.request(method, path, content=content, headers={"content-type": "application/json"})
        case = f"{method} {path[:20]} {str(body)[:40]}"
        assert answer.status_code == status, case
        assert answer.json()["error"]["message"], case
        assert len(answer.content) < KEPT_BYTES, case
