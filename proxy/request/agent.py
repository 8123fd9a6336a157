"""Kind of the agent that sends a request, where its client gives one."""

from __future__ import annotations

_KIND = b"x-warmroute-agent-kind"
_CLAUDE_CODE_SUB_AGENT = b"x-claude-code-agent-id"
"""Claude Code sends it with the requests of its sub-agents only."""
_MAX_KIND = 64


def agent_of(headers: dict[bytes, bytes]) -> str | None:
    """The client's own words, at most 64 characters; ``sub-agent`` for one of Claude Code's; None if unknown."""
    kind = headers.get(_KIND)
    if kind:
        return kind.decode("latin-1")[:_MAX_KIND]
    return "sub-agent" if _CLAUDE_CODE_SUB_AGENT in headers else None
