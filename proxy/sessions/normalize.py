"""Normalisation of prompts: parts that change with every request, and mean nothing to a model, made constant.

Each rule replaces the changing characters by as many zeros, and only at the beginning of a system prompt: the same text
in a message, or further on, is somebody's content. Off by default; see ``normalize`` in the settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from proxy.settings.sessions import NormalizeRule, NormalizeSettings

OPT_OUT_HEADER = b"x-warmroute-no-normalize"
_LINE = b"x-anthropic-billing-header:"
"""First line of Claude Code's system prompt: ``…: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;``.

Sources: anthropics/claude-code#68900, waybarrios/vllm-mlx#277, vllm-project/vllm#36829.
"""
_SEARCHED_BYTES = 1024 * 1024
"""Tools may come first; searching this much takes 30 us."""
_MAX_LINE_BYTES = 512
_MAX_LEAD_BYTES = 256

_PART = rb'(?:\[\s*\{\s*(?:"type"\s*:\s*"text"\s*,\s*)?"text"\s*:\s*)?"\Z'
_LEADS: Mapping[str, re.Pattern[bytes]] = MappingProxyType(
    {
        "/v1/chat/completions": re.compile(
            rb'"messages"\s*:\s*\[\s*\{\s*"role"\s*:\s*"(?:system|developer)"\s*,\s*"content"\s*:\s*' + _PART
        ),
        "/v1/messages": re.compile(rb'"system"\s*:\s*' + _PART),
        "/v1/responses": re.compile(rb'"instructions"\s*:\s*"\Z'),
    }
)
"""By endpoint, the JSON before the line where it is the beginning of the system prompt."""
_END = re.compile(rb'[^"\\]*')
_CHANGING: Mapping[NormalizeRule, re.Pattern[bytes]] = MappingProxyType(
    {
        NormalizeRule.CCH: re.compile(rb"\bcch=([0-9A-Za-z]{1,64})"),
        NormalizeRule.CC_VERSION: re.compile(rb"\bcc_version=\d+\.\d+\.\d+\.([0-9A-Za-z]{1,16})"),
    }
)


class Normalizer:
    """The configured rules of each endpoint."""

    def __init__(self, settings: NormalizeSettings) -> None:
        self.apply(settings)

    def apply(self, settings: NormalizeSettings) -> None:
        """Other rules, for requests from now on."""
        given = {
            "/v1/chat/completions": settings.chat,
            "/v1/messages": settings.messages,
            "/v1/responses": settings.responses,
        }
        self._rules = {path: rules for path, rules in given.items() if rules}

    def normalized(self, path: str, headers: Mapping[bytes, bytes], body: bytes) -> tuple[bytes, tuple[str, ...]]:
        """The body to route and to send, of the same length, and the names of the rules that changed it."""
        rules = self._rules.get(path)
        if rules is None or OPT_OUT_HEADER in headers:
            return body, ()
        line = _line(_LEADS[path], body)
        if line is None:
            return body, ()
        begin, end = line
        text, applied = body[begin:end], []
        for rule in rules:
            found = _CHANGING[rule].search(text)
            if found is not None:
                at, until = found.span(1)
                text = b"".join((text[:at], b"0" * (until - at), text[until:]))
                applied.append(rule.value)
        return (b"".join((body[:begin], text, body[end:])), tuple(applied)) if applied else (body, ())


def _line(lead: re.Pattern[bytes], body: bytes) -> tuple[int, int] | None:
    """Begin and end of the line that a system prompt begins with; None if it does not."""
    at = body.find(_LINE, 0, _SEARCHED_BYTES)
    while at >= 0:
        if lead.search(body, max(0, at - _MAX_LEAD_BYTES), at):
            found = _END.match(body, at, at + _MAX_LINE_BYTES)
            return found.span() if found else None
        at = body.find(_LINE, at + 1, _SEARCHED_BYTES)
    return None
