"""Settings of sessions: sources of their ids, and the table of those remembered."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, field_validator

from proxy.settings.section import Seconds, Section

DEFAULT_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "thread-id",
    "thread_id",
    "x-session-affinity",
    "x-opencode-session",
    "x-dynamo-session-id",
    "x-litellm-session-id",
    "x-openwebui-chat-id",
)
"""Headers of agents and gateways that hold the id of a conversation."""
DEFAULT_FIELDS = (
    "session_id",
    "metadata.session_id",
    "litellm_session_id",
    "metadata.user_id",
    "prompt_cache_key",
    "user",
)
"""Fields of the body, tried after the headers."""
LATE_HEADERS = ("x-correlation-id", "x-litellm-trace-id")
"""Headers that some senders change with every request, so they are tried last."""


class SessionSettings(Section):
    """Sources of session ids, and the session table."""

    capacity: int = Field(default=100_000, ge=1, description="maximum number of sessions, each with each model")
    ttl_s: Seconds = Field(default=3600.0, description="idle time after which a session is dropped")
    headers: tuple[str, ...] = Field(
        default=(),
        description="request headers with the session id, tried before the [built-in ones](../identity.md)",
    )
    fields: tuple[str, ...] = Field(
        default=(),
        description="body fields with the session id, tried before the other built-in ones: "
        + ", ".join(DEFAULT_FIELDS),
    )
    replace: bool = Field(
        default=False, description="use only the listed headers and fields, without the built-in ones"
    )
    sub_agents: bool = Field(
        default=True,
        description="sub-agents (x-claude-code-agent-id, x-parent-session-id) are sessions of their own, with a parent",
    )

    by_prefix: bool = Field(
        default=True,
        description="recognise chats without an id by their prompts: a turn begins with the whole one before",
    )
    prefix_capacity: int = Field(
        default=20_000, ge=1, description="maximum number of conversations recognised by their prompts, 350 bytes each"
    )

    @field_validator("headers")
    @classmethod
    def _lower_case(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not name or not name.isascii() or not name.isprintable() or " " in name:
                raise ValueError(f"{name!r} is not a header name")
        return tuple(dict.fromkeys(name.lower() for name in value))

    @field_validator("fields")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in DEFAULT_FIELDS:
                raise ValueError(f"{name!r} is not among the fields that are read: {', '.join(DEFAULT_FIELDS)}")
        return tuple(dict.fromkeys(value))

    @property
    def prefix_bound(self) -> int:
        """Maximum number of conversations recognised by their prompts; 0: off."""
        return self.prefix_capacity if self.by_prefix else 0


class CacheKillerSettings(Section):
    """Detection of what changes between the turns of a session."""

    enabled: bool = Field(
        default=True, description="compare each chat, message and response with the session's turn before"
    )
    conversations: int = Field(
        default=1000, ge=1, description="conversations whose last turn is remembered: 7 KB each, 15 KB at most"
    )
    min_tokens: int = Field(default=64, ge=0, description="tokens of the history that must be affected")
    kept: int = Field(default=200, ge=1, description="findings listed by GET /cache-killers")
    show_text: bool = Field(
        default=False, description="show the bytes around a change; else only classes of characters"
    )


class NormalizeRule(StrEnum):
    """Rule that makes a changing part of a prompt constant."""

    CCH = "cch"
    CC_VERSION = "cc_version"


class NormalizeSettings(Section):
    """Rules that make changing parts of prompts constant, by endpoint."""

    chat: tuple[NormalizeRule, ...] = Field(
        default=(), description="rules for /v1/chat/completions: [cch and cc_version](../identity.md#normalisation)"
    )
    messages: tuple[NormalizeRule, ...] = Field(default=(), description="rules for /v1/messages")
    responses: tuple[NormalizeRule, ...] = Field(default=(), description="rules for /v1/responses")
