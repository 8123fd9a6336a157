"""One request to an OpenAI-compatible endpoint: send it, read the stream, measure; failures become reasons."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import aiohttp
import msgspec

READ_BYTES = 1 << 18
CONNECT_TIMEOUT_S = 30.0
ERROR_EXCERPT = 300

OnOutput = Callable[[str, int, float], None]
"""(text, tokens, time) of one event with output; tokens are 1 where it has neither token ids nor usage."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def carries_token(self) -> bool:
        """Test for output in the event; a role-only first chunk of a chat has none."""
        delta = self.delta
        spoken = delta is not None and (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)
        return bool(self.text or self.token_ids or spoken)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    message: str | None = None


_DECODER = msgspec.json.Decoder(_Event)


class ReplayedAnswer(msgspec.Struct, kw_only=True):
    """Answer to one request, or the reason for its failure. Times are `time.perf_counter` readings, wall seconds."""

    sent: float
    first_token: float | None = None
    last_token: float | None = None
    finished: float = 0.0
    ok: bool = False
    error: str | None = None
    http_status: int | None = None
    headers: Mapping[str, str] = {}
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _Stream:
    """Parser of server-sent events that arrive in pieces; fills an answer."""

    def __init__(self, answer: ReplayedAnswer, on_output: OnOutput | None = None) -> None:
        self._answer = answer
        self._on_output = on_output
        self._pending = b""
        self._token_events = 0
        self._counted = 0
        """Tokens that ``on_output`` has reported."""
        self._finished = False
        self.done = False

    def feed(self, piece: bytes, now: float) -> None:
        for data in self._lines(piece):
            if data == b"[DONE]":
                self.done = True
                continue
            self._event(_DECODER.decode(data), now)

    def _lines(self, piece: bytes) -> Iterator[bytes]:
        *lines, self._pending = (self._pending + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()

    def _event(self, event: _Event, now: float) -> None:
        answer = self._answer
        if event.error is not None:
            answer.error = f"engine error in the stream: {str(event.error)[:ERROR_EXCERPT]}"
        for choice in event.choices:
            self._finished = self._finished or choice.finish_reason is not None
            # An event that only ends the answer counts if it is the first: its token has no text.
            if choice.carries_token() or (choice.finish_reason is not None and answer.first_token is None):
                answer.first_token = now if answer.first_token is None else answer.first_token
                answer.last_token = now
                self._token_events += 1
                if self._on_output is not None:
                    self._on_output(choice.text or "", self._tokens_of(choice, event.usage), now)
        if event.usage is not None:
            answer.prompt_tokens = event.usage.prompt_tokens
            answer.completion_tokens = event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            answer.cached_tokens = details.cached_tokens if details is not None else None

    def _tokens_of(self, choice: _Choice, usage: _Usage | None) -> int:
        """Tokens of one event, by its token ids or by usage that every event has."""
        total = usage.completion_tokens if usage is not None else None
        tokens = len(choice.token_ids or ()) or (total or 0) - self._counted
        self._counted += max(tokens, 1)
        return max(tokens, 1)

    def close(self) -> None:
        answer = self._answer
        if answer.completion_tokens is None and self._token_events:
            answer.completion_tokens = self._token_events
        if answer.error is None and not (self.done or self._finished):
            answer.error = "the stream ended early, before finish_reason and [DONE]"
        elif answer.error is None and answer.first_token is None:
            answer.error = "the stream carried no token"
        answer.ok = answer.error is None


async def send(
    http: aiohttp.ClientSession,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    timeout_s: float,
    on_output: OnOutput | None = None,
) -> ReplayedAnswer:
    """Send one streamed request and read it to its end.

    Args:
        http: client session; its owner closes it.
        url: full URL of the generation endpoint.
        body: JSON body.
        headers: request headers.
        timeout_s: wall seconds for the whole exchange.
        on_output: called at once for each event that carries output.

    Returns:
        The answer. A failure (refused, timed out, HTTP error, broken stream) is in its ``error``, never an exception.
    """
    answer = ReplayedAnswer(sent=time.perf_counter())
    stream = _Stream(answer, on_output)
    try:
        async with (
            asyncio.timeout(timeout_s),
            http.post(url, data=body, headers=headers) as response,
        ):
            answer.http_status = response.status
            answer.headers = response.headers
            if response.status != 200:
                text = (await response.content.read(ERROR_EXCERPT)).decode(errors="replace")
                answer.error = f"http {response.status}: {text.strip()}"
            else:
                async for piece in response.content.iter_any():
                    stream.feed(piece, time.perf_counter())
                stream.close()
    except TimeoutError:
        stage = "first token" if answer.first_token is None else "end of the stream"
        answer.error = f"timeout: no {stage} within {timeout_s:g} s of wall time"
    except aiohttp.ClientError as error:
        answer.error = f"{_stage(error)}: {error or type(error).__name__}"
    except msgspec.MsgspecError as error:
        answer.error = f"bad event in the stream: {error}"
    except OSError as error:
        answer.error = f"connection: {error}"
    if answer.error is not None:
        answer.ok = False
    answer.finished = time.perf_counter()
    return answer


def _stage(error: aiohttp.ClientError) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connect"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "stream cut"
    return "connection"
