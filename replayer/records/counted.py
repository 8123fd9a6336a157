"""Numbers with their nouns in printed texts."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Number and noun, ``1 request`` or ``1,200 requests``: the singular is given, and its plural has an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
