"""Normalisation of prompts: what a rule changes, and what it must leave alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.sessions.normalize import OPT_OUT_HEADER, Normalizer
from proxy.settings import NormalizeSettings

LINE = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;"
ZEROED = LINE.replace("eb6c6", "00000")
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def rules(**by_endpoint: list[str]) -> NormalizeSettings:
    return NormalizeSettings.model_validate(by_endpoint)


ALL = Normalizer(rules(chat=["cch"], messages=["cch"], responses=["cch"]))


def chat(content: Any, role: str = "system") -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": content}, {"role": "user", "content": "hey"}]}


def parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}, {"type": "text", "text": "You are an agent."}]


PLACES = [
    (CHAT, chat(LINE + "\nYou are an agent.")),
    (CHAT, chat(LINE, role="developer")),
    (CHAT, chat(parts(LINE))),
    (MESSAGES, {"model": "m", "system": LINE + "\nYou are", "messages": []}),
    (MESSAGES, {"tools": [{"name": "t" * 5000}], "system": parts(LINE), "messages": []}),
    (RESPONSES, {"model": "m", "instructions": LINE, "input": "hey"}),
]


@pytest.mark.parametrize(("path", "body"), PLACES)
@pytest.mark.parametrize("indent", [None, 1])
def test_the_hash_at_the_beginning_of_a_system_prompt_becomes_zeros(
    path: str, body: dict[str, Any], indent: int | None
) -> None:
    text = json.dumps(body, indent=indent)
    changed, applied = ALL.normalized(path, {}, text.encode())
    assert changed.decode() == text.replace("eb6c6", "00000")
    assert applied == ("cch",)


LEFT_ALONE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat(LINE, role="user")),
    (CHAT, chat("You are an agent.\n" + LINE)),
    (CHAT, chat([{"type": "text", "text": "First."}, {"type": "text", "text": LINE}])),
    (CHAT, {"model": "m", "messages": [{"role": "user", "content": "a"}, {"role": "system", "content": LINE}]}),
    (CHAT, {"model": "m", "user": LINE, "messages": chat("a")["messages"]}),
    (CHAT, chat(json.dumps(chat(LINE)))),
    (CHAT, chat("x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli;")),
    (MESSAGES, {"model": "m", "messages": [{"role": "user", "content": LINE}]}),
    (RESPONSES, {"model": "m", "input": LINE}),
    ("/v1/completions", {"model": "m", "prompt": LINE}),
    (CHAT, chat("You are an agent.")),
]


@pytest.mark.parametrize(("path", "body"), LEFT_ALONE)
def test_the_same_text_elsewhere_is_content(path: str, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    changed, applied = ALL.normalized(path, {}, raw)
    assert changed is raw
    assert applied == ()


def test_without_rules_nothing_is_changed_and_a_reload_switches_them() -> None:
    switched = Normalizer(rules())
    raw = json.dumps(chat(LINE)).encode()
    assert switched.normalized(CHAT, {}, raw) == (raw, ())
    switched.apply(rules(messages=["cch"]))
    assert switched.normalized(CHAT, {}, raw) == (raw, ())
    switched.apply(rules(chat=["cch", "cc_version"]))
    changed, applied = switched.normalized(CHAT, {}, raw)
    assert applied == ("cch", "cc_version")
    assert json.loads(changed)["messages"][0]["content"] == ZEROED.replace("100.7b4", "100.000")
    assert switched.normalized(CHAT, {OPT_OUT_HEADER: b"1"}, raw) == (raw, ())


def test_any_body_is_left_whole() -> None:
    for raw in (b"", b"{", b"x-anthropic-billing-header:", b'"system":"x-anthropic-billing-header: cch=' + b"a" * 2000):
        changed, _ = ALL.normalized(MESSAGES, {}, raw)
        assert len(changed) == len(raw)
