"""Requests that are only passed on, CORS and versions with real engines: their answers, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.conftest import StartProxy
from tests.engines.rig import REAL_ENGINES

pytestmark = REAL_ENGINES

TEXT = {"model": "tiny", "prompt": "the quick brown fox"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the quick brown fox"}]}
ORIGIN = "http://pages.example"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", TEXT, 200),
        ("/tokenize", CHAT, 200),
        ("/detokenize", {"model": "tiny", "tokens": [5, 6, 7]}, 200),
        ("/v1/chat/completions/render", CHAT, 200),
        ("/v1/completions/render", TEXT, 200),
        ("/tokenize", {"model": "tiny"}, 400),
        # A model that generates text has no embeddings; the engine says so in its own words.
        ("/v1/embeddings", {"model": "tiny", "input": "x"}, 404),
    ],
)
async def test_the_answer_is_the_engines_own(
    start_proxy: StartProxy, path: str, body: dict[str, Any], status: int
) -> None:
    relay = await start_proxy.relay(start_proxy.engines.file.url(0))
    proxy = await start_proxy(0, urls={0: relay.url})
    answer = await proxy.client.post(path, json=body)
    assert (answer.status_code, answer.content) == (status, relay.answers[-1])
    assert answer.headers["x-warmroute-instance"] == start_proxy.engines.file.name(0)


async def test_versions_and_cors(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(0, 1, cors={"allowed_origins": [ORIGIN]})
    versions = (await proxy.client.get("/version")).json()
    own = (await start_proxy.engines.client.get(f"{start_proxy.engines.file.url(0)}/version")).json()
    assert set(versions["engines"].values()) == {own["version"]}
    asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
    preflight = await proxy.client.options("/v1/completions", headers=asked)
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    answer = await proxy.client.post("/v1/completions", json={**TEXT, "max_tokens": 4}, headers={"origin": ORIGIN})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
