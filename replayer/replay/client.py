"""One request to an OpenAI-compatible endpoint: send, read the stream, measure; every failure becomes a reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import msgspec

READ_BYTES = 1 << 18
CONNECT_TIMEOUT_S = 30.0
ERROR_EXCERPT = 300


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
        """Whether the event brings output (a role-only first chunk of a chat does not)."""
        delta = self.delta
        spoken = delta is not None and (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)
        return bool(self.text or self.token_ids or spoken)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    message: str | None = None


_DECODER = msgspec.json.Decoder(_Event)


class Outcome(msgspec.Struct, kw_only=True):
    """What became of one request. Times are `time.perf_counter` readings, in wall seconds."""

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
    """Puts server-sent events together from pieces and reads what matters into an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._pending = b""
        self._token_events = 0
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
        outcome = self._outcome
        if event.error is not None:
            outcome.error = f"engine error in the stream: {str(event.error)[:ERROR_EXCERPT]}"
        for choice in event.choices:
            self._finished = self._finished or choice.finish_reason is not None
            # An event that only ends the answer counts when nothing came before it: its token printed as nothing.
            if choice.carries_token() or (choice.finish_reason is not None and outcome.first_token is None):
                outcome.first_token = now if outcome.first_token is None else outcome.first_token
                outcome.last_token = now
                self._token_events += 1
        if event.usage is not None:
            outcome.prompt_tokens = event.usage.prompt_tokens
            outcome.completion_tokens = event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            outcome.cached_tokens = details.cached_tokens if details is not None else None

    def close(self) -> None:
        outcome = self._outcome
        if outcome.completion_tokens is None and self._token_events:
            outcome.completion_tokens = self._token_events
        if outcome.error is None and not (self.done or self._finished):
            outcome.error = "the stream ended early, before finish_reason and [DONE]"
        elif outcome.error is None and outcome.first_token is None:
            outcome.error = "the stream carried no token"
        outcome.ok = outcome.error is None


async def send(
    http: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float
) -> Outcome:
    """Send one streamed request and read it to its end.

    Args:
        http: Client session; kept open by its owner.
        url: Full URL of the generation endpoint.
        body: JSON body.
        headers: Request headers.
        timeout_s: Wall seconds for the whole exchange.

    Returns:
        The outcome; failures (refused, timed out, HTTP error, broken stream) are outcomes too, never exceptions.
    """
    outcome = Outcome(sent=time.perf_counter())
    stream = _Stream(outcome)
    try:
        async with (
            asyncio.timeout(timeout_s),
            http.post(url, data=body, headers=headers) as response,
        ):
            outcome.http_status = response.status
            outcome.headers = response.headers
            if response.status != 200:
                text = (await response.content.read(ERROR_EXCERPT)).decode(errors="replace")
                outcome.error = f"http {response.status}: {text.strip()}"
            else:
                async for piece in response.content.iter_any():
                    stream.feed(piece, time.perf_counter())
                stream.close()
    except TimeoutError:
        stage = "first token" if outcome.first_token is None else "end of the stream"
        outcome.error = f"timeout: no {stage} within {timeout_s:g} s of wall time"
    except aiohttp.ClientError as error:
        outcome.error = f"{_stage(error)}: {error or type(error).__name__}"
    except msgspec.MsgspecError as error:
        outcome.error = f"bad event in the stream: {error}"
    except OSError as error:
        outcome.error = f"connection: {error}"
    if outcome.error is not None:
        outcome.ok = False
    outcome.finished = time.perf_counter()
    return outcome


def _stage(error: aiohttp.ClientError) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connect"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "stream cut"
    return "connection"
