"""Session ids: every header and field that clients send, their order, and sub-agents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.request.generation_body import decode_fields, large_fields
from proxy.request.steps import at_once
from proxy.sessions.identity import SessionIdentity, SessionSources, session_part
from proxy.settings import SessionSettings
from proxy.settings.sessions import DEFAULT_FIELDS, DEFAULT_HEADERS, LATE_HEADERS

UUID = "2c4e1cf0-7a67-4d2e-9a4b-1d16d3f44752"
BODY = [f"body.{name}" for name in DEFAULT_FIELDS]
USER_ID = f"user_{'a1' * 32}_account__session_{UUID}"
USER_ID_JSON = json.dumps({"device_id": "d", "account_uuid": "", "session_id": UUID})


def identify(sent: dict[str, str], body: dict[str, Any] | None = None, **settings: Any) -> SessionIdentity:
    fields = decode_fields(json.dumps({"model": "m", **(body or {})}).encode(), frozenset())
    headers = {name.encode(): value.encode() for name, value in sent.items()}
    return SessionSources(SessionSettings(**settings)).identify(headers, fields)


@pytest.mark.parametrize("name", [*DEFAULT_HEADERS, *LATE_HEADERS])
def test_each_header_names_the_session(name: str) -> None:
    assert identify({name: "s"}) == ("s", name, None)


@pytest.mark.parametrize(
    ("value", "session"),
    [
        ("sü-漢".encode(), "sü-漢"),
        (("漢" * 300).encode(), "漢" * 256),
        (b"s\xfc", "sü"),
    ],
)
def test_a_header_names_the_session_that_the_same_text_in_a_body_names(value: bytes, session: str) -> None:
    fields = decode_fields(b'{"model": "m"}', frozenset())
    sources = SessionSources(SessionSettings())
    assert sources.identify({b"x-session-id": value}, fields).session_id == session
    assert identify({}, {"session_id": session}).session_id == session


@pytest.mark.parametrize(
    ("body", "session", "source"),
    [
        ({"session_id": "s"}, "s", "body.session_id"),
        ({"metadata": {"session_id": "s", "other": [1]}}, "s", "body.metadata.session_id"),
        ({"litellm_session_id": "s"}, "s", "body.litellm_session_id"),
        ({"metadata": {"user_id": USER_ID}}, UUID, "body.metadata.user_id"),
        ({"metadata": {"user_id": USER_ID_JSON}}, UUID, "body.metadata.user_id"),
        ({"metadata": {"user_id": {"session_id": UUID}}}, UUID, "body.metadata.user_id"),
        ({"prompt_cache_key": "s"}, "s", "body.prompt_cache_key"),
        ({"user": "someone"}, "someone", "body.user"),
        ({"user": USER_ID}, UUID, "body.user"),
    ],
)
def test_each_field_names_the_session(body: dict[str, Any], session: str, source: str) -> None:
    assert identify({}, body) == (session, source, None)


@pytest.mark.parametrize(
    "body",
    [
        {"session_id": 7},
        {"session_id": ""},
        {"session_id": {"a": 1}},
        {"metadata": "text"},
        {"metadata": {"session_id": None, "user_id": 5}},
        {"metadata": {"user_id": "an-opaque-user"}},
        {"metadata": {"user_id": '{"session_id": 5}'}},
        {"metadata": {"user_id": "{not json"}},
        {"metadata": {"session_id": "x" * 70_000}},
        {"user": None},
        {"user": 7},
        {"user": {"a": 1}},
        {"prompt_cache_key": 7},
    ],
)
def test_a_value_that_names_no_session_is_ignored_and_never_refused(body: dict[str, Any]) -> None:
    assert identify({}, body) == (None, None, None)


@pytest.mark.parametrize("name", ["session_id", "litellm_session_id", "metadata"])
def test_a_long_field_of_a_large_body_is_no_session_and_no_error(name: str) -> None:
    body = json.dumps({"model": "m", "prompt": "x", name: "y" * 3_000_000}).encode()
    fields = at_once(large_fields(body, frozenset()))
    assert SessionSources(SessionSettings()).identify({}, fields).session_id is None


def test_fields_of_a_large_body_are_read() -> None:
    body = json.dumps({"model": "m", "prompt": "x" * 3_000_000, "metadata": {"user_id": USER_ID}}).encode()
    fields = at_once(large_fields(body, frozenset()))
    assert SessionSources(SessionSettings()).identify({}, fields).session_id == UUID


def test_sources_are_tried_in_the_documented_order() -> None:
    order = list(SessionSources(SessionSettings()).order)
    assert order == [*DEFAULT_HEADERS, *BODY, *LATE_HEADERS]
    body: dict[str, Any] = {
        "session_id": "session_id",
        "litellm_session_id": "litellm_session_id",
        "metadata": {"session_id": "metadata.session_id", "user_id": "user_a_account__session_metadata-user-id"},
        "prompt_cache_key": "prompt_cache_key",
        "user": "user",
    }
    headers = {name: name for name in (*DEFAULT_HEADERS, *LATE_HEADERS)}
    while order:
        found = identify(headers, body)
        assert found.source == order[0]
        name = order.pop(0)
        headers.pop(name, None)
        if name.startswith("body.metadata."):
            body["metadata"].pop(name.removeprefix("body.metadata."))
        elif name.startswith("body."):
            body.pop(name.removeprefix("body."))
    assert identify(headers, body).source is None


def test_a_configured_list_extends_the_built_in_one_and_comes_first() -> None:
    own: dict[str, Any] = {"headers": ("X-Chat", "x-correlation-id"), "fields": ("user",)}
    order = SessionSources(SessionSettings(**own)).order
    assert order[:2] == ("x-chat", "x-correlation-id")
    assert set(order) == {"x-chat", *DEFAULT_HEADERS, *BODY, *LATE_HEADERS}
    assert len(order) == len(set(order))
    assert identify({"x-session-id": "a", "x-chat": "b"}, **own).session_id == "b"
    assert identify({"x-session-id": "a"}, **own).session_id == "a"
    assert identify({}, {"session_id": "a", "user": "u"}, **own).session_id == "u"


def test_a_configured_list_replaces_the_built_in_one_if_it_says_so() -> None:
    own: dict[str, Any] = {"headers": ("x-chat",), "replace": True}
    assert SessionSources(SessionSettings(**own)).order == ("x-chat",)
    assert identify({"x-session-id": "a"}, {"user": "u"}, **own).session_id is None
    assert identify({"x-chat": "b"}, **own) == ("b", "x-chat", None)


@pytest.mark.parametrize("own", [{"fields": ("nope",)}, {"headers": ("",)}, {"headers": ("x y",)}])
def test_a_name_that_cannot_be_read_is_refused(own: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not"):
        SessionSettings(**own)


def test_a_sub_agent_is_a_session_of_its_own_with_a_parent() -> None:
    claude = {"x-claude-code-session-id": "root"}
    assert identify(claude) == ("root", "x-claude-code-session-id", None)
    one = identify({**claude, "x-claude-code-agent-id": "a"})
    assert tuple(one) == ("root/a", "x-claude-code-session-id", "root")
    nested = identify({**claude, "x-claude-code-agent-id": "b", "x-claude-code-parent-agent-id": "a"})
    assert (nested.session_id, nested.parent_id) == ("root/b", one.session_id)
    from_body = identify({"x-claude-code-agent-id": "a"}, {"metadata": {"user_id": USER_ID_JSON}})
    assert (from_body.session_id, from_body.parent_id) == (f"{UUID}/a", UUID)
    opencode = {"x-session-id": "child", "x-parent-session-id": "root"}
    assert identify(opencode) == ("child", "x-session-id", "root")
    assert identify({"x-session-id": "root", "x-parent-session-id": "root"}).parent_id is None


def test_sub_agents_share_their_parents_session_if_configured() -> None:
    headers = {"x-claude-code-session-id": "root", "x-claude-code-agent-id": "a", "x-parent-session-id": "p"}
    assert identify(headers, sub_agents=False) == ("root", "x-claude-code-session-id", None)


def test_an_agent_without_a_session_is_none() -> None:
    assert identify({"x-claude-code-agent-id": "a", "x-parent-session-id": "p"}) == (None, None, None)


def test_long_ids_are_cut_and_agents_of_long_sessions_stay_apart() -> None:
    long = {"x-session-id": "s" * 1000}
    assert len(identify(long).session_id or "") == 256
    agents = {identify({**long, "x-claude-code-agent-id": f"{n}{'a' * 1000}"}).session_id for n in range(3)}
    assert len(agents) == 3
    assert all(len(each or "") <= 256 for each in agents)


@pytest.mark.parametrize(
    ("user_id", "part"),
    [
        (USER_ID, UUID),
        (f"user_x_account_{UUID}_session_{UUID}", UUID),
        (USER_ID_JSON, UUID),
        ("someone_session_", None),
        ("my_session_is_open", None),
        ("{}", None),
        ("", None),
    ],
)
def test_the_sessions_part_of_a_user_id(user_id: str, part: str | None) -> None:
    assert session_part(user_id) == part
