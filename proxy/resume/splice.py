"""Splice point of a resumed stream: turns a second engine's stream into the continuation of the client's."""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.resume.continuation import (
    Cut,
    Delta,
    EventReader,
    StreamChoice,
    StreamFailedError,
    StreamSoFar,
    calls_tool,
    decode_event,
    is_usage,
)

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.encode

_CHAT_CHUNK = "chat.completion.chunk"


class DivergedError(StreamFailedError):
    """The continuing engine generated a different text than the one already sent."""


class Splice(EventReader):
    """Converts the second engine's events into the continuation of the client's stream: same identity, no repetition.

    Also raises DivergedError.
    """

    def __init__(self, so_far: StreamSoFar, cut: Cut, *, keep_ids: bool) -> None:
        """``keep_ids``: the client requested the token ids, so those sent beyond the cut must be repeated exactly."""
        super().__init__()
        self._so_far = so_far
        self._cut = cut
        self._keep_ids = keep_ids
        if not keep_ids:
            # The client has not seen them; held-back text may come from other tokens.
            del so_far.ids[cut.ids :]
        self._ids = so_far.ids[cut.ids :]
        self._content = "".join(so_far.content[cut.content :])
        self._reasoning = "" if cut.ids else "".join(so_far.reasoning)
        self._chat = so_far.identity.get("object") == _CHAT_CHUNK
        self._opened = bool(so_far.identity)

    @property
    def _behind(self) -> bool:
        return bool(self._ids or self._content or self._reasoning)

    def _take(self, raw: bytes) -> bytes:
        so_far = self._so_far
        start = raw.find(b"{")
        if start < 0:
            if b"[DONE]" in raw:
                if self._behind:
                    raise DivergedError("the stream ended before the part already sent")
                so_far.done = True
            return raw + b"\n\n"
        try:
            event = decode_event(raw[start:])
        except msgspec.DecodeError as error:
            raise StreamFailedError(f"an unreadable event: {error}") from error
        if not so_far.identity:
            so_far.begin(event)
            self._chat = event.object == _CHAT_CHUNK
        content = _decode(raw[start:])
        if event.choices:
            rest = self._rest(event.choices[0])
            if rest is None:
                return b""
            content = self._put(content, rest)
        if isinstance(content.get("usage"), dict):
            content["usage"] = self._usage(content["usage"])
        self._opened = True
        encoded = _encode({**content, **so_far.identity})
        so_far.usage_sent = so_far.usage_sent or is_usage(event)
        return b"data: " + encoded + b"\n\n"

    def _rest(self, choice: StreamChoice) -> StreamChoice | None:
        """The part of this choice that the client does not have yet, recorded as sent; None if nothing."""
        delta = choice.delta
        text = choice.text if delta is None else delta.content
        reasoning_text = (delta.reasoning or delta.reasoning_content) if delta is not None else None
        ids = choice.token_ids or []
        if text and not ids:
            self._ids = []  # this engine does not report ids: only the text can be compared
        skipped = min(len(self._ids), len(ids))
        if ids[:skipped] != self._ids[:skipped]:
            raise DivergedError(f"other tokens: {ids[:skipped]} instead of {self._ids[:skipped]}")
        content, self._content = _after(text or "", self._content)
        reasoning, self._reasoning = _after(reasoning_text or "", self._reasoning)
        del self._ids[:skipped]
        tools = calls_tool(choice)
        if self._behind and (tools or choice.finish_reason):
            raise DivergedError("it ended, or called a tool, before the part already sent")
        field = "reasoning_content" if delta is not None and delta.reasoning_content else "reasoning"
        left = msgspec.structs.replace(choice, token_ids=ids[skipped:])
        if delta is None:
            left.text = content
        else:
            left.delta = Delta(content or None, tool_calls=delta.tool_calls)
            setattr(left.delta, field, reasoning or None)
        self._so_far.add(left, reported_ids=len(ids), clean=not self._behind)
        new = content or reasoning or tools or choice.finish_reason or (self._keep_ids and left.token_ids)
        return left if new or not self._opened else None

    def _put(self, content: dict[str, Any], new: StreamChoice) -> dict[str, Any]:
        """The event in the client's format, with only the new parts."""
        choice = content["choices"][0]
        if choice.get("token_ids") is not None:
            choice["token_ids"] = new.token_ids if self._keep_ids else None
        holders: tuple[dict[str, Any], ...] = (content, choice)
        for holder in holders:
            if holder.get("prompt_token_ids") is not None and (self._opened or not self._keep_ids):
                holder["prompt_token_ids"] = None
        if new.delta is None:
            choice["text"] = new.text
            if not self._chat:
                return content
            usage = {"usage": content["usage"]} if content.get("usage") else {}
            return {**self._so_far.identity, "choices": [_as_chat(choice)], **usage}
        delta: dict[str, Any] = choice["delta"]
        if self._opened:
            delta.pop("role", None)
        for name in ("content", "reasoning", "reasoning_content"):
            if delta.get(name):
                delta[name] = getattr(new.delta, name) or ""
        return content

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage relative to the original prompt: the tokens of the cut were generated."""
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not isinstance(prompt, int) or not isinstance(completion, int):
            return usage
        changed: dict[str, Any] = {
            "prompt_tokens": prompt - self._cut.ids,
            "completion_tokens": completion + self._cut.ids,
        }
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            cached = min(details["cached_tokens"], changed["prompt_tokens"])
            changed["prompt_tokens_details"] = {**details, "cached_tokens": cached}
        return {**usage, **changed}


def _after(text: str, sent: str) -> tuple[str, str]:
    """``text`` without its beginning that was already ``sent``, and the part of ``sent`` still to come."""
    if text.startswith(sent):
        return text[len(sent) :], ""
    if sent.startswith(text):
        return "", sent[len(text) :]
    raise DivergedError(f"other text: {text[:40]!r} instead of {sent[:40]!r}")


def _as_chat(choice: dict[str, Any]) -> dict[str, Any]:
    """A completion's choice in the format of vLLM's chat streams."""
    kept = {name: choice.get(name) for name in ("finish_reason", "stop_reason", "token_ids")}
    if kept["finish_reason"] is None:
        del kept["stop_reason"]
    return {"index": 0, "delta": {"content": choice["text"]}, "logprobs": None, **kept}
