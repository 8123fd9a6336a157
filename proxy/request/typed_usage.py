"""Usage of the APIs that count ``input_tokens``: Anthropic's Messages and OpenAI's Responses."""

from __future__ import annotations

from typing import Annotated

import msgspec

from proxy.request.usage import PromptDetails, Usage

_MAX_BYTES = 8 * 1024 * 1024
"""Decoding a larger answer would hold the event loop for over 20 ms; its usage is not read."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]


class CountsOnly(Usage):
    """Usage without a report of cached tokens."""

    @property
    def cached_tokens(self) -> int | None:
        """None: unknown."""
        return None


class TypedUsage(msgspec.Struct, omit_defaults=True):
    """``usage`` of a message or of a response."""

    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None
    input_tokens_details: PromptDetails | None = None

    def updated(self, later: TypedUsage) -> TypedUsage:
        """This usage with every count that a later event of the stream reports."""
        return TypedUsage(
            *(
                old if new is None else new
                for old, new in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(later), strict=True)
            )
        )

    def as_usage(self) -> Usage:
        """The usage in the terms of chat.

        Anthropic's ``input_tokens`` are those that were neither read from the cache nor written to it. Without
        ``cache_read_input_tokens`` (vLLM 0.18) they are the whole prompt, and nothing is reported about the cache.
        """
        cached, prompt = self.cache_read_input_tokens, self.input_tokens
        if cached is not None and prompt is not None:
            prompt += cached + (self.cache_creation_input_tokens or 0)
        elif self.input_tokens_details is not None:
            cached = self.input_tokens_details.cached_tokens
        if cached is None:
            return CountsOnly(prompt, self.output_tokens)
        return Usage(prompt, self.output_tokens, PromptDetails(cached))


class TypedAnswer(msgspec.Struct):
    """The fields of a message or response that are read."""

    id: str | None = None
    usage: TypedUsage | None = None


_decode_answer = msgspec.json.Decoder(TypedAnswer).decode


def read_typed_answer(body: bytes) -> TypedAnswer:
    """Id and usage of a whole answer; empty if it is not one."""
    if len(body) > _MAX_BYTES:
        return TypedAnswer()
    try:
        return _decode_answer(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return TypedAnswer()
