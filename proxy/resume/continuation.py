"""What of a stream has gone to the client, so that another engine can go on with it.

A position in an answer is *clean* when the text of all its tokens has been sent. Others are not: the bytes of a
character may be spread over tokens, and an engine keeps the text back until the character is whole. An engine that is
given such a beginning as a prompt would not know of the text kept back (vLLM's detokenizer would even repeat the
prompt's text), so an answer goes on from its last clean position.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from proxy.engines.upstream import UpstreamError

_TOKEN_IDS = re.compile(rb'token_ids"\s*:\s*\[[^\]]*\]')
"""The ids in an event, those of the prompt too. Inside a JSON string the quote would be escaped."""
_SERVER_ERROR = 500
_NONE = (b"", b"null", b"[]")


class StreamFailedError(UpstreamError):
    """The engine said in its stream that it failed, or the stream is not one that can be continued."""


class Cut(NamedTuple):
    """Where another engine goes on: how much of the answer is given to it as prompt."""

    ids: int
    """Generated tokens that become prompt; 0: the request is repeated from its first token."""
    content: int
    """Pieces of ``StreamSoFar.content`` that those tokens are."""


class Delta(msgspec.Struct):
    """Of a chat stream's delta, what is text or a tool call."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class Choice(msgspec.Struct):
    """A part of an answer: ``text`` in a completion's stream, ``delta`` in a chat's."""

    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    finish_reason: str | None = None


class Event(msgspec.Struct):
    """One event of either kind of stream."""

    id: str | None = None
    object: str | None = None
    created: int | None = None
    model: str | None = None
    choices: list[Choice] = []
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    usage: msgspec.Raw = msgspec.Raw()
    error: Any = None


_decode_event = msgspec.json.Decoder(Event).decode
_encode = msgspec.json.encode


class EventReader:
    """Cuts a stream into events and turns each into what the client gets.

    An event may tell of a failure. What came before it in the same bytes is still the client's, so ``feed`` gives that,
    and it is the next call that raises.
    """

    def __init__(self) -> None:
        self._held = b""
        self._failure: Exception | None = None

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes of the stream; return what the client gets of its complete events.

        Raises:
            StreamFailedError: the event after the last ones given told of a failure, or cannot be used.
        """
        if self._failure is not None:
            raise self._failure
        *events, self._held = (self._held + chunk).split(b"\n\n")
        said = []
        for event in events:
            try:
                said.append(self._take(event))
            except StreamFailedError as error:
                self._failure = error
                break
        return b"".join(said)

    def flush(self) -> bytes:
        """The end of the stream: a torn event is dropped. Raises as ``feed`` does."""
        if self._failure is not None:
            raise self._failure
        self._held = b""
        return b""

    def _take(self, event: bytes) -> bytes:
        raise NotImplementedError


class StreamSoFar(EventReader):
    """Takes every complete event of a stream before it goes to the client; the rest of an event is never sent."""

    def __init__(self, *, keep_ids: bool) -> None:
        """``keep_ids``: the client asked for the token ids, so they are not taken out of its events."""
        super().__init__()
        self._keep_ids = keep_ids
        self.identity: dict[str, Any] = {}
        """``id``, ``object``, ``created``, ``model`` of the first event: the client's stream has these throughout."""
        self.prompt_ids = b""
        """The prompt's token ids as a JSON list; empty where the engine did not tell them."""
        self.ids: list[int] = []
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.pieces = 0
        """Events with a part of the answer in them."""
        self.clean = Cut(0, 0)
        self.exact = True
        """Every part of the answer came with its token ids."""
        self.tool_calls = False
        self.finish_reason: str | None = None
        self.usage_sent = False
        self.done = False
        self.readable = True
        """False from the first event on that is not framed or shaped as vLLM's: all else passes by as it came."""

    @property
    def begun(self) -> bool:
        """Whether any part of the answer has gone to the client."""
        shown = self.content or self.reasoning or self.tool_calls or self.finish_reason
        return bool(shown or (self._keep_ids and self.ids))

    @property
    def tokens(self) -> int:
        """Tokens so far; events, where the engine does not tell ids."""
        return len(self.ids) if self.exact else self.pieces

    def feed(self, chunk: bytes) -> bytes:
        """As of ``EventReader``; what is not framed as vLLM does it passes by as it came."""
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
            self.add(choice, told=len(choice.token_ids or ()), clean=True)
        self.usage_sent = self.usage_sent or is_usage(decoded)
        return (event if self._keep_ids else _TOKEN_IDS.sub(b'token_ids":null', event)) + b"\n\n"

    def begin(self, event: Event) -> None:
        """Keep what is told once, in the first event."""
        told = {"id": event.id, "object": event.object, "created": event.created, "model": event.model}
        self.identity = {name: value for name, value in told.items() if value is not None}
        ids = bytes(event.prompt_token_ids) or (bytes(event.choices[0].prompt_token_ids) if event.choices else b"")
        self.prompt_ids = ids if ids.startswith(b"[") else b""

    def add(self, choice: Choice, *, told: int, clean: bool) -> None:
        """Count a part of the answer as sent, its event having told ``told`` ids; ``clean``: it may end clean."""
        delta = choice.delta
        content = choice.text if delta is None else delta.content
        ids = choice.token_ids or ()
        self.finish_reason = choice.finish_reason or self.finish_reason
        reasoning = (delta.reasoning or delta.reasoning_content) if delta is not None else None
        self.tool_calls = self.tool_calls or calls_tool(choice)
        if not (content or ids or reasoning):
            return
        self.pieces += 1
        self.exact = self.exact and told > 0
        self.ids += ids
        if content:
            self.content.append(content)
        if reasoning:
            self.reasoning.append(reasoning)
        # Of several tokens the last ones' text may be held back. One token with text ends a character.
        if clean and content and told == 1:
            self.clean = Cut(len(self.ids), len(self.content))

    def usage_event(self) -> bytes:
        """The usage of an answer that is complete but for this event."""
        prompt, completion = self.prompt_ids.count(b",") + 1, len(self.ids)
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        return b"data: " + _encode({**self.identity, "choices": [], "usage": usage}) + b"\n\n"


def decode_event(data: bytes) -> Event:
    """One event's JSON. Raises StreamFailedError for an engine's report of its own failure, else msgspec's errors."""
    event = _decode_event(data)
    if isinstance(event.error, dict):
        code = event.error.get("code")
        if not isinstance(code, int) or code >= _SERVER_ERROR:
            raise StreamFailedError(f"reported an error: {event.error.get('message')}")
    return event


def calls_tool(choice: Choice) -> bool:
    """Whether a part of a tool call is in it."""
    return choice.delta is not None and bytes(choice.delta.tool_calls) not in _NONE


def is_usage(event: Event) -> bool:
    """Whether an event only carries the usage."""
    return not event.choices and bytes(event.usage).startswith(b"{")
