"""Kinds of changes that end a cached prefix, recognised by the bytes at which two turns part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from proxy.sessions.kept_turn import Parting

_BEFORE, _AFTER = 256, 128
"""Bytes around a parting that are looked at; Claude Code's line has about 85."""
_SHOWN_BEFORE, _SHOWN_AFTER = 32, 48


class KillerRule(StrEnum):
    """Kind of change: closed set used in rows and metric labels."""

    CCH = "cch"
    """The ``x-anthropic-billing-header`` line of Claude Code, whose ``cch`` differs in every request."""
    RANDOM_ID = "random_id"
    """A UUID, or a long word of letters and digits."""
    TIMESTAMP = "timestamp"
    """A date, a time of day, or seconds since 1970."""
    COUNTER = "counter"
    """A number."""
    REORDERED_TOOLS = "reordered_tools"
    CHANGED_TOOLS = "changed_tools"
    """Tools were added, removed or described differently."""
    DROPPED_HISTORY = "dropped_history"
    """The oldest messages are gone: a sliding window."""
    OTHER = "other"


REMEDIES: Mapping[KillerRule, str] = MappingProxyType(
    {
        KillerRule.CCH: "set normalize for the endpoint, or CLAUDE_CODE_ATTRIBUTION_HEADER=0 at the client",
        KillerRule.RANDOM_ID: "keep ids out of the prompt, or put them into the last message",
        KillerRule.TIMESTAMP: "put the time into the last message, or give the date only",
        KillerRule.COUNTER: "put changing numbers into the last message",
        KillerRule.REORDERED_TOOLS: "send the tools in a fixed order",
        KillerRule.CHANGED_TOOLS: "keep the set of tools for the whole session",
        KillerRule.DROPPED_HISTORY: "summarise the history once instead of dropping messages with every turn",
        KillerRule.OTHER: "leave earlier messages as they were",
    }
)

_MONTH = rb"(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_PATTERNS = (
    (KillerRule.CCH, re.compile(rb'x-anthropic-billing-header:[^"\\\n]*')),
    (KillerRule.RANDOM_ID, re.compile(rb"(?i)(?<![0-9a-f])[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}(?![0-9a-f])")),
    (
        KillerRule.TIMESTAMP,
        re.compile(
            rb"\d{4}[-/]\d{2}[-/]\d{2}(?:[T_ ,]{1,2}\d{2}:?\d{2}(?::?\d{2}(?:[.,]\d+)?)?)?"
            rb"|(?<![\d:])\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?![\d:])"
            rb"|(?<![\d.])1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?(?!\d)"
            rb"|\b" + _MONTH + rb" \d{1,2}(?:st|nd|rd|th)?,? \d{4}|\b\d{1,2}\.? " + _MONTH + rb" \d{4}"
        ),
    ),
    (KillerRule.COUNTER, re.compile(rb"(?<![0-9A-Za-z_.])\d{1,12}(?![0-9A-Za-z_])")),
    (
        KillerRule.RANDOM_ID,
        re.compile(
            rb"(?<![0-9A-Za-z])(?=[A-Za-z_-]{0,63}\d)(?=[0-9_-]{0,63}[A-Za-z])[0-9A-Za-z_-]{12,64}(?![0-9A-Za-z])"
            rb"|(?i:(?<![0-9a-z])(?=[a-f]{0,63}\d)[0-9a-f]{8,64}(?![0-9a-z]))"
        ),
    ),
)
_CLEAR = frozenset((KillerRule.CCH, KillerRule.TIMESTAMP))
"""Rules that are looked for in a whole block, when the exact position is not known."""
_ESCAPED = re.compile(r"\\u[0-9a-fA-F]{4}|\\.|[^\W\d_]|\d")


def rule_of(found: Parting, text: memoryview, block_bytes: int) -> KillerRule:
    """The rule that a parting matches; ``text`` is the later turn's."""
    if not found.same_tools:
        return KillerRule.REORDERED_TOOLS if found.reordered else KillerRule.CHANGED_TOOLS
    if found.shift <= -block_bytes:
        return KillerRule.DROPPED_HISTORY
    at = found.position
    if not found.exact:
        block = bytes(text[max(0, at - _BEFORE) : at + block_bytes])
        return next((rule for rule, each in _PATTERNS if rule in _CLEAR and each.search(block)), KillerRule.OTHER)
    now, was = around(text, at)
    earlier = found.was[max(0, found.was_at - _BEFORE) : found.was_at + _AFTER]
    earlier_at = min(found.was_at, _BEFORE)
    for rule, pattern in _PATTERNS:
        if _covers(pattern, now, was) and _covers(pattern, earlier, earlier_at):
            return rule
    return KillerRule.OTHER


def around(text: memoryview, at: int) -> tuple[bytes, int]:
    """The bytes around a position, and the position among them."""
    begin = max(0, at - _BEFORE)
    return bytes(text[begin : at + _AFTER]), at - begin


def excerpt(text: bytes | memoryview, at: int, *, redacted: bool) -> tuple[str, str]:
    """The text before and from a position on; redacted: letters and digits replaced by ``a`` and ``9``."""
    parts = bytes(text[max(0, at - _SHOWN_BEFORE) : at]), bytes(text[at : at + _SHOWN_AFTER])
    before, after = (part.decode("utf-8", "replace") for part in parts)
    return (classes(before), classes(after)) if redacted else (before, after)


def classes(text: str) -> str:
    """Classes of the characters of a JSON text: ``A`` and ``a`` for letters, ``9`` for digits, others unchanged."""
    return _ESCAPED.sub(_class, text)


def _class(found: re.Match[str]) -> str:
    text = found[0]
    if text.startswith("\\"):
        return "a" if text.startswith("\\u") else text
    if text.isdecimal():
        return "9"
    return "A" if text.isupper() else "a"


def _covers(pattern: re.Pattern[bytes], text: bytes, at: int) -> bool:
    """True if a match begins at or before a position and ends after it, or right at it."""
    return any(found.start() <= at <= found.end() for found in pattern.finditer(text))
