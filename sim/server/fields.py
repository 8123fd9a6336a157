"""Fields of generation requests. What the simulator lacks is refused by its name instead of ignored."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

_MOST_LOGPROBS = 20


class StreamOptions(msgspec.Struct):
    """``stream_options`` of a request."""

    include_usage: bool | None = False


class KvTransferParams(msgspec.Struct):
    """``kv_transfer_params`` as received; unknown fields are ignored."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    transfer_id: str | None = None
    remote_engine_id: str | None = None
    remote_bootstrap_addr: str | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """The fields that all generation requests have."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = None
    kv_transfer_params: KvTransferParams | None = None


class OrderedFields(GenerationFields, kw_only=True):
    """The fields of OpenAI's APIs; vLLM's messages have no priority."""

    priority: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0
    """Read where the engine schedules by priority."""


class OpenAiFields(OrderedFields, kw_only=True):
    """The fields that completions and chats have besides; of those here only some values are accepted."""

    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None

    def unserved(self) -> str | None:
        """The first field with a value that is not served; None: all are."""
        given = {
            "response_format": (self.response_format or {}).get("type", "text") != "text",
            "prompt_logprobs": self.prompt_logprobs is not None,
            "use_beam_search": bool(self.use_beam_search),
            "best_of": (self.best_of or 1) > 1,
            "echo": bool(self.echo),
            "suffix": bool(self.suffix),
            "tool_choice": self.tool_choice not in (None, "auto", "none"),
            "functions": bool(self.functions),
            "function_call": self.function_call not in (None, "auto", "none"),
        }
        for name in ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"):
            given[name] = getattr(self, name) is not None
        return next((name for name, is_given in given.items() if is_given), None)


def logprobs_asked(flag: bool | int | None, top: int | None) -> int | None:
    """Alternatives to report for each token; None: no log probabilities.

    Args:
        flag: ``logprobs`` of a chat (true or false) or of a completion (a number).
        top: ``top_logprobs`` of a chat.

    Raises:
        ValueError: more than 20, or fewer than 0.
    """
    if flag is None or flag is False:
        return None
    count = (top or 0) if flag is True else flag
    if not 0 <= count <= _MOST_LOGPROBS:
        raise ValueError(f"logprobs must be in 0 .. {_MOST_LOGPROBS}, got {count}")
    return count
