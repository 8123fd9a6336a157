"""Bound on texts that a client or an engine chose, before they are kept or echoed."""

from __future__ import annotations

ERROR_CHARS = 1_000
"""Longest error text in an answer, a record or the state of an instance; the proxy's own messages are shorter."""


def clip(text: str, limit: int = ERROR_CHARS) -> str:
    """The text, or its first ``limit`` characters and its length."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
