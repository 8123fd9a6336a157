"""Texts of clients and engines, made safe for a terminal."""

from __future__ import annotations


def printable(value: object) -> str:
    """A text without control characters: clients and engines choose ids and errors."""
    return "".join(each if each.isprintable() else "?" for each in str(value))
