"""Parsing of a generation request: the fields that routing reads, the prompt as blocks, the rest as bytes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from policies.predict.blocks import TOKEN_ID_BYTES, hash_byte_blocks, root_hash
from policies.predict.exact_index import plain_root
from policies.types import RequestView
from proxy.errors import RequestError
from proxy.request.token_chunks import TokenChunks

_MAX_SESSION_ID = 256
_MAX_MODEL_NAME = 256
_DEFAULT_COMPLETION_TOKENS = 16
_DEFAULT_CHAT_TOKENS = 1024


class Endpoint(StrEnum):
    """The generation endpoints."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class StreamOptions(msgspec.Struct):
    """The fields of ``stream_options`` that are read."""

    include_usage: bool | None = None


class GenerationBody(msgspec.Struct):
    """The fields of an OpenAI generation request that routing reads; all others are forwarded as bytes."""

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
    """A prompt as chained blocks; ``tokens`` is 0 for untokenized text, ``text_bytes`` is 0 for token ids."""

    hashes: list[int]
    tokens: int
    text_bytes: int
    prompts: int = 1
    plain: bool = False
    """Blocks of token ids, for a base model, without cache salt: those that KV events can report."""


class Parsed(msgspec.Struct, frozen=True):
    """A parsed request, ready for routing."""

    endpoint: Endpoint
    body: bytes
    fields: GenerationBody
    prompt: Prompt

    @property
    def stream(self) -> bool:
        """True if the client requested server-sent events."""
        return bool(self.fields.stream)

    @property
    def usage_requested(self) -> bool:
        """True if the client requested the usage event of a stream."""
        options = self.fields.stream_options
        return bool(options and options.include_usage)

    @property
    def max_tokens(self) -> int:
        """Upper bound of output tokens, or the endpoint's default if not given."""
        asked = self.fields.max_completion_tokens or self.fields.max_tokens
        default = _DEFAULT_CHAT_TOKENS if self.endpoint is Endpoint.CHAT else _DEFAULT_COMPLETION_TOKENS
        return max(0, asked) if asked is not None else default


_decode_body = msgspec.json.Decoder(GenerationBody).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


def parse_request(
    endpoint: Endpoint,
    body: bytes,
    block_tokens: int,
    text_block_bytes: int,
    is_base_model: Callable[[str], bool] = lambda _: False,
    chunks: TokenChunks | None = None,
    seed: int = 0,
) -> Parsed:
    """Parse one request body.

    Args:
        endpoint: the endpoint of the request.
        body: the body's JSON.
        block_tokens: tokens per block of token ids.
        text_block_bytes: bytes per block of text.
        is_base_model: returns True if a model name is served without an adapter.
        chunks: cache of token ids, kept between calls.
        seed: secret seed of the block hashes.

    Raises:
        RequestError: 400 with the problem and its location, in OpenAI's shape.
    """
    try:
        fields = _decode_body(body)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise RequestError(400, "the body's JSON is nested too deeply", code="invalid_json") from error
    if bytes(fields.kv_transfer_params) not in {b"", b"null"}:
        raise RequestError(
            400,
            "'kv_transfer_params' may be set by the proxy only: a wrong value can crash an engine",
            param="kv_transfer_params",
        )
    if len(fields.model) > _MAX_MODEL_NAME:
        raise RequestError(400, f"'model' is longer than {_MAX_MODEL_NAME} characters", param="model")
    salts = (fields.model, fields.cache_salt or "")
    if endpoint is Endpoint.CHAT:
        prompt = _chat_prompt(fields, text_block_bytes, salts, seed)
    else:
        ids = _Ids(block_tokens, salts, is_base_model(fields.model), seed)
        prompt = _completion_prompt(fields, text_block_bytes, ids, TokenChunks(1) if chunks is None else chunks)
    return Parsed(endpoint, body, fields, prompt)


def request_view(
    parsed: Parsed,
    request_id: str,
    session_id: str | None,
    block_tokens: int,
    text_block_bytes: int,
    bytes_per_token: float,
) -> RequestView:
    """View of a request for policies: exact for token ids, by the learned ratio for text."""
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


def with_token_ids(parsed: Parsed, ids: Sequence[int], block_tokens: int, base_model: bool, seed: int = 0) -> Parsed:
    """A text or chat request with the blocks of its tokenized prompt; the body is unchanged."""
    fields = parsed.fields
    prompt = _token_prompt(ids, _Ids(block_tokens, (fields.model, fields.cache_salt or ""), base_model, seed))
    return msgspec.structs.replace(parsed, prompt=msgspec.structs.replace(prompt, text_bytes=parsed.prompt.text_bytes))


def session_of(headers: dict[bytes, bytes], names: tuple[bytes, ...], fields: GenerationBody) -> str | None:
    """Session id: the first of the configured headers, then ``prompt_cache_key``, then ``user``; None if absent."""
    for name in names:
        value = headers.get(name)
        if value:
            return value.decode("latin-1")[:_MAX_SESSION_ID]
    from_body = fields.prompt_cache_key or fields.user
    return from_body[:_MAX_SESSION_ID] if from_body else None


def _may_offload(parsed: Parsed) -> bool:
    """True for one prompt, one choice and no output about the prompt's tokens, so that P's work is all D needs."""
    fields = parsed.fields
    several = parsed.prompt.prompts > 1 or (fields.n or 1) > 1 or (fields.best_of or 1) > 1
    return not (several or fields.echo or fields.prompt_logprobs is not None)


def _chat_prompt(fields: GenerationBody, text_block_bytes: int, salts: tuple[str, ...], seed: int) -> Prompt:
    raw = memoryview(fields.messages)
    if not raw:
        raise RequestError(400, "'messages' is missing: give a list of messages", param="messages")
    if raw[0] != ord("[") or len(raw) < 3:
        raise RequestError(400, "'messages' must be a non-empty list of messages", param="messages")
    # Without the closing bracket a continued conversation has the earlier one as an exact byte prefix. Tools come
    # before the messages in every chat template, so they belong to the root of the chain.
    history = raw[:-1]
    root = root_hash("chat", *salts, bytes(fields.tools).decode("utf-8", "replace"), seed=seed)
    return Prompt(hash_byte_blocks(history, text_block_bytes, root), 0, len(history))


class _Ids(NamedTuple):
    """Parameters of hashing a completion's prompt into blocks."""

    block_tokens: int
    salts: tuple[str, ...]
    """Model and cache salt."""
    base_model: bool
    seed: int

    @property
    def plain(self) -> bool:
        return self.base_model and not self.salts[1]

    @property
    def root(self) -> int:
        return plain_root(self.seed) if self.plain else root_hash("ids", *self.salts, seed=self.seed)


def _completion_prompt(fields: GenerationBody, text_block_bytes: int, ids: _Ids, chunks: TokenChunks) -> Prompt:
    raw = memoryview(fields.prompt)
    if not raw:
        raise RequestError(400, "'prompt' is missing: give a string or a list of token ids", param="prompt")
    if raw[0] == ord("["):
        try:
            blocks = chunks.blocks(raw, ids.block_tokens, ids.root)
        except msgspec.DecodeError:
            return _batch_prompt(_decode_items(fields.prompt), text_block_bytes, ids)
        except OverflowError as error:
            raise _out_of_range(error) from error
        if not blocks.tokens:
            raise _no_ids()
        return Prompt(blocks.hashes, blocks.tokens, 0, plain=ids.plain)
    if raw[0] != ord('"') or len(raw) < 3:
        raise RequestError(400, "'prompt' must be a non-empty string or list of token ids", param="prompt")
    return _text_prompt(raw, text_block_bytes, ids)


def _token_prompt(ids: Sequence[int], how: _Ids) -> Prompt:
    if not ids:
        raise _no_ids()
    try:
        packed = array("I", ids)
    except OverflowError as error:
        raise _out_of_range(error) from error
    view = memoryview(packed).cast("B")
    return Prompt(hash_byte_blocks(view, how.block_tokens * TOKEN_ID_BYTES, how.root), len(ids), 0, plain=how.plain)


def _no_ids() -> RequestError:
    return RequestError(400, "'prompt' is an empty list: give at least one token id", param="prompt")


def _out_of_range(error: OverflowError) -> RequestError:
    return RequestError(400, f"'prompt' holds a token id out of range: {error}", param="prompt")


def _text_prompt(quoted: memoryview, text_block_bytes: int, how: _Ids) -> Prompt:
    """Hash a JSON string without decoding it: one client escapes equal text equally."""
    text = quoted[1:-1]
    root = root_hash("text", *how.salts, seed=how.seed)
    return Prompt(hash_byte_blocks(text, text_block_bytes, root), 0, len(text))


def _batch_prompt(items: list[msgspec.Raw], text_block_bytes: int, how: _Ids) -> Prompt:
    """Combine several prompts of one request: blocks of the first one, lengths of all."""
    raws = [memoryview(item) for item in items]
    if raws and all(raw[0] == ord('"') and len(raw) > 2 for raw in raws):
        first = _text_prompt(raws[0], text_block_bytes, how)
        return Prompt(first.hashes, 0, sum(len(raw) - 2 for raw in raws), len(raws))
    try:
        ids = [_decode_ids(item) for item in items]
    except msgspec.ValidationError:
        ids = []
    if ids and all(ids):
        first = _token_prompt(ids[0], how)
        return Prompt(first.hashes, sum(len(each) for each in ids), 0, len(ids), first.plain)
    raise RequestError(
        400, "'prompt' must be a string, a list of strings, a list of token ids or a list of such lists", param="prompt"
    )


def _invalid(error: msgspec.ValidationError) -> RequestError:
    text = str(error)
    param = text.rsplit("`$.", 1)[1].rstrip("`") if "`$." in text else None
    if "missing required field" in text:
        param = text.split("`")[1]
    return RequestError(400, text, param=param, code="invalid_type" if param else None)
