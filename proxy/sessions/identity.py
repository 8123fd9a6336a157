"""Session id of a request: the headers and body fields that clients send, in a documented order."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from proxy.request.generation_body import GenerationBody
from proxy.settings.sessions import DEFAULT_FIELDS, DEFAULT_HEADERS, LATE_HEADERS, SessionSettings

_MAX_SESSION_ID = 256
_MAX_AGENT_ID = 64
_MAX_METADATA_BYTES = 64 * 1024
_CLAUDE_AGENT, _CLAUDE_PARENT_AGENT = b"x-claude-code-agent-id", b"x-claude-code-parent-agent-id"
CHAIN_SOURCE = "body.previous_response_id"
"""Source of sessions that are named by the stored responses that they continue."""
_PARENT_SESSION = b"x-parent-session-id"
_SESSION_PART = re.compile(r"_session_([0-9A-Za-z-]{8,64})\Z")
"""End of the user id of Claude Code before 2.1.78: ``user_HASH_account_UUID_session_UUID``; later ones are JSON."""


class SessionIdentity(NamedTuple):
    """The session of a request."""

    session_id: str | None = None
    source: str | None = None
    """Name of the header, or ``body.`` and the name of the field, that gave it."""
    parent_id: str | None = None
    """Session that started this one, if it is a sub-agent's."""


_NOBODY = SessionIdentity()
_given = attrgetter("prompt_cache_key", "user", "session_id", "litellm_session_id", "metadata")
_NOTHING_GIVEN = (msgspec.Raw(),) * 5


class _Metadata(msgspec.Struct):
    session_id: msgspec.Raw = msgspec.Raw()
    user_id: msgspec.Raw = msgspec.Raw()


class _UserId(msgspec.Struct):
    session_id: str | None = None


_NO_METADATA = _Metadata()
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode_text = msgspec.json.Decoder(str).decode
_decode_metadata = msgspec.json.Decoder(_Metadata).decode
_decode_user_id = msgspec.json.Decoder(_UserId).decode


class SessionSources:
    """The configured headers and fields. ``identify`` costs 1 us for a request without any of them."""

    def __init__(self, settings: SessionSettings) -> None:
        self.apply(settings)

    def apply(self, settings: SessionSettings) -> None:
        """Other headers and fields, for requests from now on."""
        headers = settings.headers if settings.replace else _in_order(settings.headers, DEFAULT_HEADERS)
        late = () if settings.replace else tuple(name for name in LATE_HEADERS if name not in headers)
        fields = settings.fields if settings.replace else _in_order(settings.fields, DEFAULT_FIELDS)
        self._headers = tuple((name.encode("latin-1"), name) for name in headers)
        self._late_headers = tuple((name.encode("latin-1"), name) for name in late)
        self._fields = tuple((f"body.{name}", _FIELDS[name]) for name in fields)
        self._names = frozenset(name for name, _ in (*self._headers, *self._late_headers))
        self._sub_agents = settings.sub_agents

    @property
    def order(self) -> tuple[str, ...]:
        """All sources as ``SessionIdentity.source`` has them, in the order in which they are tried."""
        names = [name for _, name in self._headers]
        names += [name for name, _ in self._fields]
        return (*names, *(name for _, name in self._late_headers))

    def identify(self, headers: Mapping[bytes, bytes], fields: GenerationBody) -> SessionIdentity:
        """The session that a request names; all None if it names none."""
        if self._names.isdisjoint(headers) and _given(fields) == _NOTHING_GIVEN:  # no call per source
            return _NOBODY
        found = self._named(headers, fields)
        if found.session_id is None or not self._sub_agents:
            return found
        agent = headers.get(_CLAUDE_AGENT)
        if agent:
            # A sub-agent has a prompt and a history of its own under the session id of its parent.
            root = found.session_id[: _MAX_SESSION_ID - _MAX_AGENT_ID - 1]
            above = headers.get(_CLAUDE_PARENT_AGENT)
            return SessionIdentity(
                f"{root}/{_text(agent, _MAX_AGENT_ID)}",
                found.source,
                f"{root}/{_text(above, _MAX_AGENT_ID)}" if above and above != agent else found.session_id,
            )
        parent = headers.get(_PARENT_SESSION)
        if parent:
            parent_id = _text(parent, _MAX_SESSION_ID)
            return found if parent_id == found.session_id else found._replace(parent_id=parent_id)
        return found

    def _named(self, headers: Mapping[bytes, bytes], fields: GenerationBody) -> SessionIdentity:
        for name, source in self._headers:
            value = headers.get(name)
            if value:
                return SessionIdentity(_text(value, _MAX_SESSION_ID), source)
        for source, read in self._fields:
            found = read(fields)
            if found:
                return SessionIdentity(found[:_MAX_SESSION_ID], source)
        for name, source in self._late_headers:
            value = headers.get(name)
            if value:
                return SessionIdentity(_text(value, _MAX_SESSION_ID), source)
        return _NOBODY


def _in_order(first: tuple[str, ...], then: tuple[str, ...]) -> tuple[str, ...]:
    return (*first, *(name for name in then if name not in first))


def _text(value: bytes, limit: int) -> str:
    """A header's value: UTF-8, as in bodies and in questions of operators, else Latin-1, which any bytes are."""
    try:
        return value.decode()[:limit]
    except UnicodeDecodeError:
        return value[:limit].decode("latin-1")


def _string(raw: msgspec.Raw) -> str | None:
    """The text of a JSON string; None for any other value, which engines may accept."""
    view = memoryview(raw)
    if not view or view[0] != ord('"') or len(view) > _MAX_METADATA_BYTES:
        return None
    try:
        return _decode_text(raw)
    except _UNREADABLE:
        return None


def _metadata(fields: GenerationBody) -> _Metadata:
    view = memoryview(fields.metadata)
    if not view or view[0] != ord("{") or len(view) > _MAX_METADATA_BYTES:
        return _NO_METADATA
    try:
        return _decode_metadata(fields.metadata)
    except _UNREADABLE:
        return _NO_METADATA


def session_part(user_id: str) -> str | None:
    """The session's id inside a user id as Claude Code makes it, in either form; None if there is none."""
    if user_id.startswith("{"):
        try:
            return _decode_user_id(user_id).session_id
        except _UNREADABLE:
            return None
    found = _SESSION_PART.search(user_id)
    return found[1] if found else None


def _of_user_id(fields: GenerationBody) -> str | None:
    raw = _metadata(fields).user_id
    if bytes(memoryview(raw)[:1]) == b"{":
        try:
            return _decode_user_id(raw).session_id
        except _UNREADABLE:
            return None
    text = _string(raw)
    return session_part(text) if text else None


def _of_user(fields: GenerationBody) -> str | None:
    # LiteLLM sends Anthropic's metadata.user_id on as ``user``.
    user = _string(fields.user)
    return session_part(user) or user if user else None


_FIELDS: Mapping[str, Callable[[GenerationBody], str | None]] = MappingProxyType(
    {
        "session_id": lambda fields: _string(fields.session_id),
        "metadata.session_id": lambda fields: _string(_metadata(fields).session_id),
        "litellm_session_id": lambda fields: _string(fields.litellm_session_id),
        "metadata.user_id": _of_user_id,
        "prompt_cache_key": lambda fields: _string(fields.prompt_cache_key),
        "user": _of_user,
    }
)
