"""Conversations of the Messages and Responses APIs as one text that a later turn begins with.

Their bodies are not sent to the model as they are. Parts that change from turn to turn although the engine's prompt
does not are left out, so that equal prompts have equal texts.
"""

from __future__ import annotations

import re

import msgspec

from proxy.errors import RequestError
from proxy.request.generation_body import MessagesBody, ResponsesBody
from proxy.request.steps import Steps

_BILLING = b"x-anthropic-billing-header"
_IS_BILLING = re.compile(rb'"text"\s*:\s*"x-anthropic-billing-header')
"""Block of Claude Code's system prompt with a hash of the request in it, which engines (vLLM from 0.18) leave out."""
_MARK_NAME = b'"cache_control"'
_MARK = re.compile(rb'"cache_control"\s*:\s*(?:\{[^{}]*\}|null)')
"""Clients move these marks to the end of the conversation in every turn. Inside a text the quotes are escaped."""
_MAX_MARKS = 64
"""Marks looked at in one request; the API permits four."""
_TEXT_BLOCK = re.compile(
    rb'\[\s*\{\s*"type"\s*:\s*"text"\s*,\s*"text"\s*:\s*("[^"\\]*+(?:\\.[^"\\]*+)*+")\s*,?\s*\Z', re.S
)
_BEGIN_OF_ONLY_BLOCK = re.compile(rb'\[\s*+\{\s*+"type"\s*+:\s*+"text"\s*+,\s*+"text"\s*+:\s*+"')
_END_OF_ONLY_BLOCK = re.compile(rb"\s*+\}\s*+\]")
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.S)
_MAX_ESCAPED_QUOTES = 32
"""Searching for the next quote is faster than reading a string, until there are many quotes, or backslashes, in it."""
_END_OF_BLOCK = re.compile(rb"\s*\}\s*\]")
_SHORT_BYTES = 256 * 1024
"""Longest message that is compared with its form as a plain string, and longest system prompt that is decoded."""

_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


def messages_text(fields: MessagesBody) -> Steps[bytes]:
    """System prompt, tools and messages of a Messages request. Raises RequestError."""
    messages = memoryview(fields.messages)
    if not messages:
        raise RequestError(400, "'messages' is missing: give a list of messages", param="messages")
    if messages[0] != ord("[") or len(messages) < 3:
        raise RequestError(400, "'messages' must be a non-empty list of messages", param="messages")
    # Without the closing bracket a continued conversation has the earlier one as an exact byte prefix.
    text = b"".join((_system(bytes(fields.system)), memoryview(fields.tools), messages[:-1]))
    return (yield from without_cache_marks(text))


def responses_text(fields: ResponsesBody) -> bytes:
    """Instructions, tools and input of a Responses request. Raises RequestError.

    Of a request that continues a stored response only the input: the engine's prompt has instructions and tools once,
    and the stored text counts them already.
    """
    given = memoryview(fields.input)
    if not given:
        raise RequestError(400, "'input' is missing: give a string or a list of items", param="input")
    if given[0] not in b'["':
        raise RequestError(400, "'input' must be a string or a list of items", param="input")
    if fields.previous_response_id:
        return bytes(given[:-1])
    return b"".join((memoryview(fields.instructions), memoryview(fields.tools), given[:-1]))


def without_cache_marks(text: bytes) -> Steps[bytes]:
    """``text`` as if no block had a ``cache_control``.

    A message that is a string in one turn is a list of one text block while it has a mark, so that form is undone too.
    """
    parts: list[bytes] = []
    begin = at = 0
    for _ in range(_MAX_MARKS):
        at = text.find(_MARK_NAME, at)
        if at < 0:
            break
        mark = _MARK.match(text, at)
        if mark is None:
            at += len(_MARK_NAME)
            continue
        before, after = text[begin:at], mark.end()
        opening = before.rfind(b'"text"', max(0, len(before) - _SHORT_BYTES))
        block = _TEXT_BLOCK.match(before, max(0, before.rfind(b"[", 0, opening))) if opening >= 0 else None
        end = _END_OF_BLOCK.match(text, after)
        if block is not None and end is not None:
            parts += (before[: block.start()], block[1])
            begin = end.end()
        else:
            kept = before.rstrip()
            if kept.endswith(b","):
                kept = kept[:-1]
            elif text[after : after + 1] == b",":
                after += 1
            parts.append(kept)
            begin = after
        at = begin
        yield
    if not parts:
        return text
    return b"".join((*parts, text[begin:]))


def plain_text_blocks(text: bytes) -> bytes:
    """``text`` with a plain string in place of every list of one text block: clients write a message in both forms."""
    parts: list[bytes] = []
    begin = 0
    for opening in _BEGIN_OF_ONLY_BLOCK.finditer(text):
        if opening.start() < begin:
            continue
        end = _string_end(text, opening.end())
        closing = _END_OF_ONLY_BLOCK.match(text, end) if end >= 0 else None
        if closing is not None:
            parts += (text[begin : opening.start()], text[opening.end() - 1 : end])
            begin = closing.end()
    return b"".join((*parts, text[begin:])) if parts else text


def _string_end(text: bytes, at: int) -> int:
    """Position after the quote that ends the string whose content begins at ``at``; -1 if there is none."""
    end = at
    for _ in range(_MAX_ESCAPED_QUOTES):
        end = text.find(b'"', end) + 1
        if not end:
            return -1
        last = text[max(at, end - 1 - _MAX_ESCAPED_QUOTES) : end - 1]
        escapes = len(last) - len(last.rstrip(b"\\"))
        if escapes == _MAX_ESCAPED_QUOTES:
            break
        if escapes % 2 == 0:
            return end
    string = _STRING.match(text, at)
    return string.end() if string is not None else -1


def _system(system: bytes) -> bytes:
    if not system.startswith(b"[") or len(system) > _SHORT_BYTES or _BILLING not in system:
        return system
    try:
        blocks = [bytes(block) for block in _decode_items(system)]
    except (msgspec.DecodeError, RecursionError):
        return system
    return b"[" + b",".join(block for block in blocks if not _IS_BILLING.search(block)) + b"]"
