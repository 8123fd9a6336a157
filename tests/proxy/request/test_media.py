"""Media are hashed, but counted as a constant length of text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from proxy.request.media import MIN_MEDIA_BYTES, STAND_IN_BYTES, may_have_media, without_media
from proxy.request.parse import Endpoint, Prompt
from tests.proxy.request.parsing import parse_request

URI = "data:image/png;base64,"


def prompt_of(*messages: Any, **more: Any) -> Prompt:
    body = json.dumps({"model": "m", "messages": list(messages)} | more).encode()
    return parse_request(Endpoint.CHAT, body, 16, 1024).prompt


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def image(content: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": URI + content}}


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "image": image,
    "image with detail first": lambda data: {"type": "image_url", "image_url": {"detail": "low", "url": URI + data}},
    "image as a string": lambda data: {"type": "image_url", "image_url": URI + data},
    "video": lambda data: {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + data}},
    "audio": lambda data: {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64," + data}},
    "input audio": lambda data: {"type": "input_audio", "input_audio": {"format": "wav", "data": data}},
    "embeddings": lambda data: {"type": "image_embeds", "image_embeds": data},
    "file": lambda data: {"type": "file", "file": {"filename": "a.pdf", "file_data": URI + data}},
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_medium_of_any_size_counts_as_its_stand_in(kind: str) -> None:
    found = [prompt_of(user(text("x y"), PARTS[kind]("Q" * size), text("z"))) for size in (10_000, 500_000)]
    assert [prompt.media for prompt in found] == [1, 1]
    assert found[0].text_bytes == found[1].text_bytes < STAND_IN_BYTES + 300
    assert found[0].hashes != found[1].hashes


def test_equal_media_share_a_prefix_and_different_ones_do_not() -> None:
    question, other = text("what is this? " * 400), text("and this? " * 400)
    first = prompt_of(user(image("A" * 50_000), question))
    longer = prompt_of(user(image("A" * 50_000), question), {"role": "assistant", "content": "a cat"}, user(other))
    assert longer.hashes[: len(first.hashes)] == first.hashes
    assert not set(first.hashes[1:]) & set(prompt_of(user(image("B" * 50_000), question)).hashes)


def test_text_keeps_its_length_whatever_it_mentions() -> None:
    mention = json.dumps(image("Q" * 20_000))
    for content in ("word " * 10_000, "x" * 50_000, "\u4e16" * 20_000, mention):
        message = {"role": "user", "content": content}
        tools = [{"type": "function", "function": {"parameters": {"image_url": {}}}}]
        found = prompt_of(message, tools=tools)
        assert (found.media, found.text_bytes) == (0, len(json.dumps(tools)) + len(json.dumps([message])) - 1)


def test_only_runs_without_a_space_are_looked_at_closely() -> None:
    assert not may_have_media(b"some words of text, " * 100_000)
    for offset in range(0, MIN_MEDIA_BYTES, 97):
        assert may_have_media(b" " * offset + b"Q" * MIN_MEDIA_BYTES + b" " * 9)


def test_the_search_is_bounded_however_often_media_are_named() -> None:
    assert sum(1 for _ in without_media(b"[" + b'"image_url":"",' * 100_000 + b"1]")) < 5_000
