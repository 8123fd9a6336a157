"""Settings of sessions: sources of their ids, and the table of those remembered."""

from __future__ import annotations

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

    capacity: int = Field(default=100_000, ge=1, description="maximum number of sessions")
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
