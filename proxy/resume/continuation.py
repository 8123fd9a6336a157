"""Record of the part of a stream that has been sent to the client, so that another engine can continue it.

A position in an answer is *clean* if the text of all its tokens has been sent. Other positions are not: the bytes of a
character may be spread over tokens, and an engine holds text back until the character is complete. An engine that
receives such a beginning as a prompt cannot produce the held-back text (vLLM's detokenizer would even repeat the
prompt's text), so an answer is continued from its last clean position.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from proxy.engines.upstream import UpstreamError
from proxy.request.stream_end import ReportedError

_TOKEN_IDS = re.compile(rb'token_ids"\s*:\s*\[[^\]]*\]')
"""Token ids in an event, including the prompt's. Inside a JSON string the quote would be escaped."""
_SERVER_ERROR = 500
_NONE = (b"", b"null", b"[]")


class StreamFailedError(UpstreamError):
    """The engine reported a failure in its stream, or the stream cannot be continued."""


class Cut(NamedTuple):
    """Position at which another engine continues: the part of the answer that it receives as prompt."""

    ids: int
    """Generated tokens that become prompt; 0: the request is repeated from its first token."""
    content: int
    """Number of entries of ``StreamSoFar.content`` that those tokens produced."""


class Delta(msgspec.Struct):
    """Text and tool calls of a chat stream's delta."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class StreamChoice(msgspec.Struct):
    """One choice of an event: ``text`` in a completion's stream, ``delta`` in a chat's."""

    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    finish_reason: str | None = None


class StreamEvent(msgspec.Struct):
    """One event of a completion's or a chat's stream."""

    id: str | None = None
    object: str | None = None
    created: int | None = None
    model: str | None = None
    choices: list[StreamChoice] = []
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    usage: msgspec.Raw = msgspec.Raw()
    error: Any = None


_decode_event = msgspec.json.Decoder(StreamEvent).decode
_encode = msgspec.json.encode


class EventReader:
    """Splits a stream into events and converts each into the bytes for the client.

    Events before a failure in the same bytes are still returned, so ``feed`` returns them and the next call raises.
    """

    def __init__(self) -> None:
        self._held = b""
        self._failure: Exception | None = None

    def feed(self, chunk: bytes) -> bytes:
        """Consume the next bytes of the stream; returns the bytes for the client from its complete events.

        Raises:
            StreamFailedError: the event after the last returned one reported a failure, or cannot be used.
        """
        if self._failure is not None:
            raise self._failure
        *events, self._held = (self._held + chunk).split(b"\n\n")
        output = []
        for event in events:
            try:
                output.append(self._take(event))
            except StreamFailedError as error:
                self._failure = error
                break
        return b"".join(output)

    def flush(self) -> bytes:
        """End the stream: an incomplete event is dropped. Raises as ``feed`` does."""
        if self._failure is not None:
            raise self._failure
        self._held = b""
        return b""

    def _take(self, event: bytes) -> bytes:
        raise NotImplementedError


class StreamSoFar(EventReader):
    """Records every complete event of a stream before it is sent to the client; an incomplete event is never sent."""

    def __init__(self, *, keep_ids: bool) -> None:
        """``keep_ids``: the client requested the token ids, so they are not removed from its events."""
        super().__init__()
        self._keep_ids = keep_ids
        self.identity: dict[str, Any] = {}
        """``id``, ``object``, ``created``, ``model`` of the first event, used for the client's whole stream."""
        self.prompt_ids = b""
        """The prompt's token ids as a JSON list; empty if the engine did not report them."""
        self.ids: list[int] = []
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.pieces = 0
        """Events that carry a part of the answer."""
        self.clean = Cut(0, 0)
        self.exact = True
        """True while every part of the answer came with its token ids."""
        self.tool_calls = False
        self.finish_reason: str | None = None
        self.usage_sent = False
        self.done = False
        self.readable = True
        """False after the first event that is not framed or shaped as vLLM's; further bytes pass through unchanged."""

    @property
    def begun(self) -> bool:
        """True if any part of the answer has been sent to the client."""
        shown = self.content or self.reasoning or self.tool_calls or self.finish_reason
        return bool(shown or (self._keep_ids and self.ids))

    @property
    def tokens(self) -> int:
        """Tokens sent so far; events, if the engine does not report token ids."""
        return len(self.ids) if self.exact else self.pieces

    def feed(self, chunk: bytes) -> bytes:
        if self.readable and b"\r\n" not in self._held[-1:] + chunk:
            return super().feed(chunk)
        data, self._held = self._held + chunk, b""
        self.readable = False
        return data

    def _take(self, event: bytes) -> bytes:
        start = event.find(b"{")
        if start < 0:
            self.done = self.done or b"[DONE]" in event
            return event + b"\n\n"
        try:
            decoded = decode_event(event[start:])
        except msgspec.DecodeError:
            self.readable = False
            return event + b"\n\n"
        if not self.identity:
            self.begin(decoded)
        for choice in decoded.choices:
            self.add(choice, reported_ids=len(choice.token_ids or ()), clean=True)
        self.usage_sent = self.usage_sent or is_usage(decoded)
        return (event if self._keep_ids else _TOKEN_IDS.sub(b'token_ids":null', event)) + b"\n\n"

    def begin(self, event: StreamEvent) -> None:
        """Record the fields that only the first event carries."""
        fields = {"id": event.id, "object": event.object, "created": event.created, "model": event.model}
        self.identity = {name: value for name, value in fields.items() if value is not None}
        ids = bytes(event.prompt_token_ids) or (bytes(event.choices[0].prompt_token_ids) if event.choices else b"")
        self.prompt_ids = ids if ids.startswith(b"[") else b""

    def add(self, choice: StreamChoice, *, reported_ids: int, clean: bool) -> None:
        """Record a part of the answer as sent.

        Args:
            choice: the part.
            reported_ids: number of token ids in its event.
            clean: its end may be a clean position.
        """
        delta = choice.delta
        content = choice.text if delta is None else delta.content
        ids = choice.token_ids or ()
        self.finish_reason = choice.finish_reason or self.finish_reason
        reasoning = (delta.reasoning or delta.reasoning_content) if delta is not None else None
        self.tool_calls = self.tool_calls or calls_tool(choice)
        if not (content or ids or reasoning):
            return
        self.pieces += 1
        self.exact = self.exact and reported_ids > 0
        self.ids += ids
        if content:
            self.content.append(content)
        if reasoning:
            self.reasoning.append(reasoning)
        # With several tokens the text of the last may be held back. One token with text ends a character.
        if clean and content and reported_ids == 1:
            self.clean = Cut(len(self.ids), len(self.content))

    def usage_event(self) -> bytes:
        """Usage event of an answer that is complete except for this event."""
        prompt, completion = self.prompt_ids.count(b",") + 1, len(self.ids)
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        return b"data: " + _encode({**self.identity, "choices": [], "usage": usage}) + b"\n\n"


def decode_event(data: bytes) -> StreamEvent:
    """Decode one event. Raises StreamFailedError if the engine reports its own failure, or msgspec's errors."""
    event = _decode_event(data)
    if isinstance(event.error, dict):
        code = event.error.get("code")
        if not isinstance(code, int) or code >= _SERVER_ERROR:
            raise StreamFailedError(f"reported an error: {ReportedError.of(event.error).message}")
    return event


def calls_tool(choice: StreamChoice) -> bool:
    """True if the choice contains a part of a tool call."""
    return choice.delta is not None and bytes(choice.delta.tool_calls) not in _NONE


def is_usage(event: StreamEvent) -> bool:
    """True if the event only carries the usage."""
    return not event.choices and bytes(event.usage).startswith(b"{")
