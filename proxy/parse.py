"""Parses a generation request once: the fields routing needs, the prompt as blocks, the rest left as bytes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from policies.blocks import TOKEN_ID_BYTES, hash_byte_blocks, root_hash
from policies.exact_index import PLAIN_ROOT
from policies.types import RequestView
from proxy.errors import RequestError

_MAX_SESSION_ID = 256
_DEFAULT_COMPLETION_TOKENS = 16
_DEFAULT_CHAT_TOKENS = 1024


class Endpoint(StrEnum):
    """The generation endpoints."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class StreamOptions(msgspec.Struct):
    """Of ``stream_options``, what matters here."""

    include_usage: bool | None = None


class GenerationBody(msgspec.Struct):
    """The fields of an OpenAI generation request that routing reads; all others pass by as bytes."""

    model: str
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as chained blocks; ``tokens`` is 0 for text nobody has tokenized, ``text_bytes`` for token ids."""

    hashes: list[int]
    tokens: int
    text_bytes: int
    prompts: int = 1
    plain: bool = False
    """Blocks of token ids, for a base model, without cache salt: those that engines' KV events tell of."""


class Parsed(msgspec.Struct, frozen=True):
    """A request that can be routed."""

    endpoint: Endpoint
    body: bytes
    fields: GenerationBody
    prompt: Prompt

    @property
    def stream(self) -> bool:
        """Whether the client asked for server-sent events."""
        return bool(self.fields.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for the usage event of a stream."""
        options = self.fields.stream_options
        return bool(options and options.include_usage)

    @property
    def max_tokens(self) -> int:
        """Upper bound of output tokens, or the default where the client named none."""
        asked = self.fields.max_completion_tokens or self.fields.max_tokens
        default = _DEFAULT_CHAT_TOKENS if self.endpoint is Endpoint.CHAT else _DEFAULT_COMPLETION_TOKENS
        return max(0, asked) if asked is not None else default


_decode_body = msgspec.json.Decoder(GenerationBody).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_any = msgspec.json.Decoder().decode


def parse_request(
    endpoint: Endpoint,
    body: bytes,
    block_tokens: int,
    text_block_bytes: int,
    is_base_model: Callable[[str], bool] = lambda _: False,
) -> Parsed:
    """Read one request body. ``is_base_model`` says of a model's name whether it is served without an adapter.

    Raises:
        RequestError: 400 with what is wrong and where, in OpenAI's shape.
    """
    try:
        fields = _decode_body(body)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if bytes(fields.kv_transfer_params) not in {b"", b"null"}:
        raise RequestError(
            400,
            "'kv_transfer_params' is set by the proxy alone: a wrong one can take an engine down",
            param="kv_transfer_params",
        )
    salts = (fields.model, fields.cache_salt or "")
    if endpoint is Endpoint.CHAT:
        prompt = _chat_prompt(fields, text_block_bytes, salts)
    else:
        prompt = _completion_prompt(fields, block_tokens, text_block_bytes, salts, is_base_model(fields.model))
    return Parsed(endpoint, body, fields, prompt)


def request_view(
    parsed: Parsed,
    request_id: str,
    session_id: str | None,
    block_tokens: int,
    text_block_bytes: int,
    bytes_per_token: float,
) -> RequestView:
    """What policies see: exact for token ids, by the learned ratio for text."""
    prompt = parsed.prompt
    if not prompt.tokens:
        tokens, block, exact = (
            max(1, round(prompt.text_bytes / bytes_per_token)),
            text_block_bytes / bytes_per_token,
            False,
        )
    else:
        tokens, block, exact = prompt.tokens, float(block_tokens), True
    return RequestView(
        request_id,
        tokens,
        prompt.hashes,
        block,
        session_id,
        parsed.max_tokens,
        exact,
        _may_offload(parsed),
        prompt.plain,
    )


def with_token_ids(parsed: Parsed, ids: Sequence[int], block_tokens: int, base_model: bool) -> Parsed:
    """A text or chat request whose prompt was tokenized: blocks of token ids, the body as it came."""
    fields = parsed.fields
    prompt = _token_prompt(ids, block_tokens, (fields.model, fields.cache_salt or ""), base_model)
    return msgspec.structs.replace(parsed, prompt=msgspec.structs.replace(prompt, text_bytes=parsed.prompt.text_bytes))


def session_of(headers: dict[bytes, bytes], names: tuple[bytes, ...], fields: GenerationBody) -> str | None:
    """Session id: the first of the configured headers, then ``prompt_cache_key``, then ``user``; None without any."""
    for name in names:
        value = headers.get(name)
        if value:
            return value.decode("latin-1")[:_MAX_SESSION_ID]
    from_body = fields.prompt_cache_key or fields.user
    return from_body[:_MAX_SESSION_ID] if from_body else None


def _may_offload(parsed: Parsed) -> bool:
    """One prompt, one choice, nothing asked about the prompt's own tokens: else P's work is not all that D needs."""
    fields = parsed.fields
    several = parsed.prompt.prompts > 1 or (fields.n or 1) > 1 or (fields.best_of or 1) > 1
    return not (several or fields.echo or fields.prompt_logprobs is not None)


def _chat_prompt(fields: GenerationBody, text_block_bytes: int, salts: tuple[str, ...]) -> Prompt:
    raw = memoryview(fields.messages)
    if not raw:
        raise RequestError(400, "'messages' is missing: give a list of messages", param="messages")
    if raw[0] != ord("[") or len(raw) < 3:
        raise RequestError(400, "'messages' must be a non-empty list of messages", param="messages")
    # Without the closing bracket, a conversation that goes on has the earlier one as an exact byte prefix.
    # Tools come before the messages in every chat template, so they belong to the root of the chain.
    history = raw[:-1]
    root = root_hash("chat", *salts, bytes(fields.tools).decode("utf-8", "replace"))
    return Prompt(hash_byte_blocks(history, text_block_bytes, root), 0, len(history))


def _completion_prompt(
    fields: GenerationBody, block_tokens: int, text_block_bytes: int, salts: tuple[str, ...], base_model: bool
) -> Prompt:
    raw_prompt = fields.prompt
    raw = memoryview(raw_prompt)
    if not raw:
        raise RequestError(400, "'prompt' is missing: give a string or a list of token ids", param="prompt")
    if raw[0] == ord("["):
        try:
            return _token_prompt(_decode_ids(raw_prompt), block_tokens, salts, base_model)
        except msgspec.ValidationError:
            return _batch_prompt(_decode_any(raw_prompt), block_tokens, text_block_bytes, salts, base_model)
    value = _decode_any(raw_prompt)
    if not isinstance(value, str) or not value:
        raise RequestError(400, "'prompt' must be a non-empty string or list of token ids", param="prompt")
    return _text_prompt(value, text_block_bytes, salts)


def _token_prompt(ids: Sequence[int], block_tokens: int, salts: tuple[str, ...], base_model: bool) -> Prompt:
    if not ids:
        raise RequestError(400, "'prompt' is an empty list: give at least one token id", param="prompt")
    try:
        packed = array("I", ids)
    except OverflowError as error:
        raise RequestError(400, f"'prompt' holds a token id out of range: {error}", param="prompt") from error
    view = memoryview(packed).cast("B")
    plain = base_model and not salts[1]
    root = PLAIN_ROOT if plain else root_hash("ids", *salts)
    return Prompt(hash_byte_blocks(view, block_tokens * TOKEN_ID_BYTES, root), len(ids), 0, plain=plain)


def _text_prompt(text: str, text_block_bytes: int, salts: tuple[str, ...]) -> Prompt:
    data = text.encode("utf-8", "surrogatepass")
    return Prompt(hash_byte_blocks(data, text_block_bytes, root_hash("text", *salts)), 0, len(data))


def _batch_prompt(
    items: list[Any], block_tokens: int, text_block_bytes: int, salts: tuple[str, ...], base_model: bool
) -> Prompt:
    """Several prompts in one request run on one instance; the first one's blocks decide, all their lengths count."""
    if items and all(isinstance(item, str) and item for item in items):
        first = _text_prompt(items[0], text_block_bytes, salts)
        return Prompt(first.hashes, 0, sum(len(item.encode("utf-8", "surrogatepass")) for item in items), len(items))
    if items and all(isinstance(item, list) and item and all(type(i) is int for i in item) for item in items):
        first = _token_prompt(items[0], block_tokens, salts, base_model)
        return Prompt(first.hashes, sum(len(item) for item in items), 0, len(items), first.plain)
    raise RequestError(
        400, "'prompt' must be a string, a list of strings, a list of token ids or a list of such lists", param="prompt"
    )


def _invalid(error: msgspec.ValidationError) -> RequestError:
    text = str(error)
    param = text.rsplit("`$.", 1)[1].rstrip("`") if "`$." in text else None
    if "missing required field" in text:
        param = text.split("`")[1]
    return RequestError(400, text, param=param, code="invalid_type" if param else None)
