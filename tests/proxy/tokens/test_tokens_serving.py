"""Text and chat through a proxy with the model's tokenizer: exact blocks, unchanged body, fallback on mismatches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proxy.tokens.template import ChatTemplate
from tests.proxy.conftest import Running, StartProxy
from tests.proxy.stub_engine import StubEngine
from tests.proxy.tokens.test_tokens import BYTE_LEVEL, TEMPLATE, whole


@dataclass
class Tokenizing(StubEngine):
    """An engine that counts prompt tokens with the model's tokenizer; ``extra`` makes it another model."""

    extra: int = 0

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        text = body.get("prompt") or ChatTemplate(TEMPLATE, {}).render(body)
        return {**super()._usage(body), "prompt_tokens": len(whole(BYTE_LEVEL, text, False)) + self.extra}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def chat(turns: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"turn {number}: " + "some words. " * 40} for number in range(turns)]
    return {"model": "stub", "messages": messages, "max_tokens": 4}


async def post(proxy: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    assert (await proxy.client.post(path, json=body)).status_code == 200
    return (await proxy.rows())[-1]


async def tokens(proxy: Running) -> dict[str, Any]:
    return (await proxy.client.get("/stats")).json()["tokenizer"]["endpoints"]


async def test_text_and_chat_have_exact_blocks_and_go_out_as_they_came(start_proxy: StartProxy, folder: Path) -> None:
    proxy = await start_proxy(engines=[Tokenizing()], tokenizer={"path": str(folder)})
    for path, body in (
        ("/v1/chat/completions", chat(5)),
        ("/v1/completions", {"model": "stub", "prompt": "once upon a time " * 50, "max_tokens": 4}),
    ):
        explained = (await proxy.client.post("/explain", json=body)).json()["request"]
        row = await post(proxy, path, body)
        assert explained["exact"]
        assert explained["prompt_tokens"] == row["prompt_tokens"]
        assert explained["blocks"] == row["prompt_tokens"] // 16
        assert proxy.engines[0].seen[-1] == body
    seen = await tokens(proxy)
    assert all(each["checked"] == 1 and not each["mismatches"] for each in seen.values())


async def test_a_text_prompt_and_its_token_ids_share_their_blocks(start_proxy: StartProxy, folder: Path) -> None:
    proxy = await start_proxy(engines=[Tokenizing()], tokenizer={"path": str(folder)})
    text = "once upon a time " * 50
    ids = whole(BYTE_LEVEL, text, False)
    await post(proxy, "/v1/completions", {"model": "stub", "prompt": text, "max_tokens": 4})
    explained = await proxy.client.post("/explain", json={"model": "stub", "prompt": ids})
    assert explained.json()["fleet"][0]["cached_tokens"] == (len(ids) - 1) // 16 * 16


async def test_an_engine_that_counts_otherwise_ends_it_for_that_endpoint(
    start_proxy: StartProxy, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await start_proxy(engines=[Tokenizing(extra=1)], tokenizer={"path": str(folder), "mismatches": 3})
    for turns in range(1, 6):
        await post(proxy, "/v1/chat/completions", chat(turns))
    seen = await tokens(proxy)
    assert not seen["/v1/chat/completions"]["trusted"]
    assert seen["/v1/chat/completions"]["mismatches"] == seen["/v1/chat/completions"]["tokenized"] == 3
    assert seen["/v1/completions"]["trusted"]
    assert sum("counts" in record.message for record in caplog.records) == 1
    explained = (await proxy.client.post("/explain", json=chat(2))).json()["request"]
    assert not explained["exact"]


async def test_a_message_that_cannot_be_rendered_is_routed_by_its_bytes(start_proxy: StartProxy, folder: Path) -> None:
    proxy = await start_proxy(engines=[StubEngine()], tokenizer={"path": str(folder)})
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    await post(proxy, "/v1/chat/completions", {"model": "stub", "messages": [image], "max_tokens": 4})
    seen = (await tokens(proxy))["/v1/chat/completions"]
    assert (seen["not_renderable"], seen["tokenized"], seen["trusted"]) == (1, 0, True)


async def test_a_template_that_breaks_does_not_fail_the_request(start_proxy: StartProxy, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}")
    proxy = await start_proxy(engines=[StubEngine()], tokenizer={"path": str(folder)})
    row = await post(proxy, "/v1/chat/completions", chat(1))
    assert row["outcome"] == "ok"
    assert (await tokens(proxy))["/v1/chat/completions"]["not_renderable"] == 1


async def test_prompts_with_other_tokenizing_are_left_alone(start_proxy: StartProxy, folder: Path) -> None:
    proxy = await start_proxy(engines=[StubEngine()], tokenizer={"path": str(folder)})
    for body in (
        {"prompt": [1, 2, 3]},
        {"prompt": ["a", "b"]},
        {"prompt": "a b c", "truncate_prompt_tokens": 2},
    ):
        await post(proxy, "/v1/completions", {"model": "stub", "max_tokens": 4, **body})
    assert (await tokens(proxy))["/v1/completions"]["tokenized"] == 0
    assert json.loads(proxy.engines[0].raw_bodies[-1])["truncate_prompt_tokens"] == 2
