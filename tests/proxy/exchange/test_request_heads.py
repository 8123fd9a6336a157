"""Heads of requests that are unusual but valid: encodings."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.proxy.access.test_keys import KEYS
from tests.proxy.conftest import StartProxy

OK: dict[str, Any] = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 4}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/explain"])
async def test_a_compressed_body_is_refused_by_its_encoding(start_proxy: StartProxy, path: str) -> None:
    proxy = await start_proxy(1)
    body = gzip.compress(json.dumps(OK).encode())
    for encoding in ("gzip", "identity, zstd"):
        answer = await proxy.client.post(path, content=body, headers={"content-encoding": encoding})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "encoding_unsupported")
        assert "compressed request bodies are not supported" in answer.json()["error"]["message"]
    assert not proxy.engines[0].raw_bodies


async def test_the_encoding_identity_is_none(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1)
    for path in ("/v1/completions", "/explain"):
        answer = await proxy.client.post(path, json=OK, headers={"content-encoding": "Identity"})
        assert answer.status_code == 200


async def test_a_missing_key_is_refused_before_the_encoding(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(1, keys=KEYS)
    for path in ("/v1/completions", "/explain"):
        answer = await proxy.client.post(path, json=OK, headers={"content-encoding": "gzip"})
        assert answer.status_code == 401
