"""Parsing of a generation request: the fields that routing reads, the prompt as blocks, the rest as bytes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from xxhash import xxh3_128_hexdigest

from policies.predict.blocks import TOKEN_ID_BYTES, hash_byte_blocks, root_hash
from policies.types import NO_TENANT, RequestView, Tenant
from proxy.errors import RequestError
from proxy.paths import HANDED_OFF
from proxy.request.aliases import NO_ALIASES, ModelAliases, model_of_none
from proxy.request.bodies import with_model
from proxy.request.conversation import messages_text, responses_text
from proxy.request.generation_body import (
    GenerationBody,
    MessagesBody,
    ResponsesBody,
    decode_fields,
    large_fields,
)
from proxy.request.media import may_have_media, stand_in, without_media
from proxy.request.outline import TooManyMembersError, members_of
from proxy.request.steps import Steps
from proxy.request.token_chunks import MAX_BLOCKS, PromptHashing, TokenChunks

AT_ONCE_BYTES = 512 * 1024
"""Bodies up to this size are parsed without a pause: 20 ms in the worst case (ids of one digit), 1 ms for text."""
_OFFLOADED_BYTES = 8 * 1024 * 1024
"""Both legs of a hand-off write the body again; the prompt of a longer one does not fit any model."""
_SMALL_BYTES = 64 * 1024
_MAX_MODEL_NAME = 256
_NO_TEXT = frozenset((b"", b"null", b'""', b"[]"))
_OFF = frozenset((b"", b"null", b"false"))
_DEFAULT_COMPLETION_TOKENS = 16
_DEFAULT_CHAT_TOKENS = 1024


class Endpoint(StrEnum):
    """The generation endpoints."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"


_KINDS: Mapping[Endpoint, type[GenerationBody]] = MappingProxyType(
    {Endpoint.MESSAGES: MessagesBody, Endpoint.RESPONSES: ResponsesBody}
)
_WITH_USAGE_OPTION = frozenset((Endpoint.COMPLETIONS, Endpoint.CHAT))
"""Endpoints whose streams report usage only if ``stream_options`` requests it."""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as chained blocks; ``tokens`` is 0 for untokenized text, ``text_bytes`` is 0 for token ids."""

    hashes: list[int]
    tokens: int
    text_bytes: int
    prompts: int = 1
    plain: bool = False
    """Blocks of token ids, for a base model, without cache salt: those that KV events can report."""
    media: int = 0
    """Images and other media, embeddings too, each counted as a constant length of text."""
    lead_blocks: int = 0
    """Blocks of a chat's tools, before those of its messages."""
    continued: bool = False
    """The engine puts a stored conversation before it, whose length is estimated."""


class Parsed(msgspec.Struct, frozen=True):
    """A parsed request, ready for routing."""

    endpoint: Endpoint
    body: bytes
    fields: GenerationBody
    prompt: Prompt
    only: str | None = None
    """The one instance that can serve it, since it stored what the request continues; None: any."""
    chain: str | None = None
    """Id of the first of the stored responses that it continues, one after the other; None: it continues none."""

    @property
    def stream(self) -> bool:
        """True if the client requested server-sent events."""
        return bool(self.fields.stream)

    @property
    def usage_requested(self) -> bool:
        """True if the client requested the usage event of a stream."""
        return bool(self.fields.stream_options and self.fields.stream_options.include_usage)

    @property
    def hides_usage(self) -> bool:
        """True if the engine's stream has no usage unless the proxy requests it."""
        # Options without the field do not request it, as in OpenAI's API and vLLM 0.18.
        return bool(self.fields.stream) and not self.usage_requested and self.endpoint in _WITH_USAGE_OPTION

    @property
    def several(self) -> bool:
        """True if more than one text is generated, for several prompts or as choices."""
        return self.prompt.prompts > 1 or (self.fields.n or 1) > 1 or (self.fields.best_of or 1) > 1

    @property
    def max_tokens(self) -> int:
        """Upper bound of output tokens, or the endpoint's default if not given."""
        asked = self.fields.asked_tokens
        default = _DEFAULT_COMPLETION_TOKENS if self.endpoint is Endpoint.COMPLETIONS else _DEFAULT_CHAT_TOKENS
        return max(0, asked) if asked is not None else default

    def context_tokens(self, prompt_tokens: int) -> int:
        """Context in tokens that an engine must have to accept it, as vLLM counts; 0: unknown, for several prompts."""
        return prompt_tokens + (self.fields.asked_tokens or 1) if self.prompt.prompts == 1 else 0


class ParseRules(NamedTuple):
    """Settings of parsing."""

    block_tokens: int
    """Tokens per block of token ids."""
    text_block_bytes: int
    """Bytes per block of text."""
    max_prompts: int = 1024
    allowed_fields: Set[str] = frozenset()
    """Guarded fields that clients may send."""
    seed: int = 0
    """Secret seed of the block hashes."""
    aliases: ModelAliases = NO_ALIASES
    """Further names of models, and the names that replace them in the body."""
    sole_model: Callable[[], str | None] = lambda: None
    """Returns the model of requests that name none; None: several are served."""


_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


def parse_steps(
    endpoint: Endpoint, body: bytes, rules: ParseRules, is_base_model: Callable[[str], bool], chunks: TokenChunks
) -> Steps[Parsed]:
    """Parse one request body; steps end only in bodies over ``AT_ONCE_BYTES``.

    Args:
        endpoint: the endpoint of the request.
        body: the body's JSON.
        rules: settings.
        is_base_model: returns True if a model name is served without an adapter.
        chunks: cache of token ids, kept between calls.

    Raises:
        RequestError: 400 with the problem and its location.
    """
    kind = _KINDS.get(endpoint, GenerationBody)
    fields = (
        decode_fields(body, rules.allowed_fields, kind)
        if len(body) <= AT_ONCE_BYTES
        else (yield from large_fields(body, rules.allowed_fields, kind))
    )
    if not fields.model:
        fields.named_model = model_of_none(rules.sole_model())
    elif len(fields.model) > _MAX_MODEL_NAME:
        raise RequestError(400, f"'model' is longer than {_MAX_MODEL_NAME} characters", param="model")
    elif (model := rules.aliases.get(fields.model)) is not None:
        fields.named_model = model
        body = yield from with_model(body, model)
    salts = (fields.model, fields.cache_salt or "")
    if endpoint is Endpoint.COMPLETIONS:
        ids = PromptHashing(rules.block_tokens, salts, is_base_model(fields.model), rules.seed)
        embedded = fields.embedded_prompts
        if embedded > rules.max_prompts:
            raise _too_many(rules, "prompt_embeds")
        if embedded and bytes(memoryview(fields.prompt)[:5]) in _NO_TEXT:
            prompt = _embedded_prompt(fields.prompt_embeds, embedded, rules, ids)
        else:
            prompt = yield from _completion_prompt(fields, rules, ids, chunks)
        if embedded:  # engines take both, each as prompts of its own
            prompt = msgspec.structs.replace(prompt, prompts=prompt.prompts + embedded, media=embedded)
    elif endpoint is Endpoint.CHAT:
        prompt = yield from _chat_prompt(fields, rules, salts, may_have_media(body))
    elif isinstance(fields, MessagesBody):
        text = yield from messages_text(fields)
        prompt = yield from _conversation_prompt(text, "messages", fields, rules, salts)
    else:
        assert isinstance(fields, ResponsesBody)
        prompt = yield from _conversation_prompt(responses_text(fields), "responses", fields, rules, salts)
    return Parsed(endpoint, body, fields, prompt)


def request_view(
    parsed: Parsed,
    request_id: str,
    session_id: str | None,
    block_tokens: int,
    text_block_bytes: int,
    bytes_per_token: float,
    tenant: Tenant = NO_TENANT,
    agent: str | None = None,
    parent_session_id: str | None = None,
) -> RequestView:
    """View of a request for policies: exact for token ids, by the learned ratio for text."""
    prompt = parsed.prompt
    if not prompt.tokens:
        tokens = max(1, round(prompt.text_bytes / bytes_per_token))
        block, exact = text_block_bytes / bytes_per_token, False
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
        tenant,
        agent=agent,
        parent_session_id=parent_session_id,
        has_priority=parsed.endpoint is not Endpoint.MESSAGES,
        model=parsed.fields.model,
    )


def with_token_ids(parsed: Parsed, ids: Sequence[int], block_tokens: int, base_model: bool, seed: int = 0) -> Parsed:
    """A text or chat request with the blocks of its tokenized prompt; the body is unchanged."""
    salts = (parsed.fields.model, parsed.fields.cache_salt or "")
    prompt = _token_prompt(ids, PromptHashing(block_tokens, salts, base_model, seed))
    return msgspec.structs.replace(parsed, prompt=msgspec.structs.replace(prompt, text_bytes=parsed.prompt.text_bytes))


def _may_offload(parsed: Parsed) -> bool:
    """True for an API with hand-offs, one prompt in tokens, one choice, no output about it: P's work is all D needs.

    Also False for a beam search, to which vLLM does not apply the transfer's parameters, and for what only the D leg
    would be refused for, since P's has other values there: P would hold the KV until its abort timeout.
    """
    fields = parsed.fields
    if len(parsed.body) > _OFFLOADED_BYTES or parsed.endpoint not in HANDED_OFF:
        return False
    beams = bytes(fields.use_beam_search) not in _OFF
    refused = fields.only_d_refuses(_DEFAULT_COMPLETION_TOKENS if parsed.endpoint is Endpoint.COMPLETIONS else None)
    embedded = parsed.endpoint is Endpoint.COMPLETIONS and parsed.prompt.media
    return not (parsed.several or beams or embedded or refused or fields.echo or fields.prompt_logprobs is not None)


def _chat_prompt(
    fields: GenerationBody, rules: ParseRules, salts: tuple[str, ...], look_for_media: bool
) -> Steps[Prompt]:
    raw = memoryview(fields.messages)
    if not raw:
        raise RequestError(400, "'messages' is missing: give a list of messages", param="messages")
    if raw[0] != ord("[") or len(raw) < 3:
        raise RequestError(400, "'messages' must be a non-empty list of messages", param="messages")
    # Without the closing bracket a continued conversation has the earlier one as an exact byte prefix. Tools are in the
    # root of the chain, and blocks of their own before those of the messages.
    history: bytes | memoryview = raw[:-1]
    media = 0
    if look_for_media:
        history, media = yield from without_media(bytes(history), rules.seed)
    root = root_hash("chat", *salts, xxh3_128_hexdigest(fields.tools, rules.seed), seed=rules.seed)
    tools = memoryview(fields.tools)
    lead = _text_blocks(tools, rules.text_block_bytes, root)
    blocks = _text_blocks(history, rules.text_block_bytes, lead[-1] if lead else root)
    return Prompt(lead + blocks if lead else blocks, 0, len(tools) + len(history), media=media, lead_blocks=len(lead))


def _conversation_prompt(
    text: bytes, api: str, fields: GenerationBody, rules: ParseRules, salts: tuple[str, ...]
) -> Steps[Prompt]:
    media = 0
    if may_have_media(text):
        text, media = yield from without_media(text, rules.seed)
    root = root_hash(api, *salts, xxh3_128_hexdigest(fields.tools, rules.seed), seed=rules.seed)
    return Prompt(_text_blocks(text, rules.text_block_bytes, root), 0, len(text), media=media)


def _completion_prompt(
    fields: GenerationBody, rules: ParseRules, ids: PromptHashing, chunks: TokenChunks
) -> Steps[Prompt]:
    raw = memoryview(fields.prompt)
    if not raw:
        raise RequestError(400, "'prompt' is missing: give a string or a list of token ids", param="prompt")
    if raw[0] == ord("["):
        try:
            blocks = yield from chunks.steps(raw, ids.block_tokens, ids.root)
        except msgspec.DecodeError:
            return (yield from _batch_prompt(raw, rules, ids, chunks))
        except OverflowError as error:
            raise _out_of_range(error) from error
        if not blocks.tokens:
            raise _no_ids()
        return Prompt(blocks.hashes, blocks.tokens, 0, plain=ids.plain)
    if raw[0] != ord('"') or len(raw) < 3:
        raise RequestError(400, "'prompt' must be a non-empty string or list of token ids", param="prompt")
    return _text_prompt(raw, rules.text_block_bytes, ids)


def _embedded_prompt(given: msgspec.Raw, count: int, rules: ParseRules, how: PromptHashing) -> Prompt:
    """Blocks of embeddings in place of text; their length in tokens is in a tensor that is not read."""
    text, root = stand_in(given, how.seed), root_hash("embeds", *how.salts, seed=how.seed)
    return Prompt(_text_blocks(text, rules.text_block_bytes, root), 0, count * len(text), prompts=0)


def _token_prompt(ids: Sequence[int], how: PromptHashing) -> Prompt:
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


def _text_prompt(quoted: memoryview, text_block_bytes: int, how: PromptHashing) -> Prompt:
    """Hash a JSON string without decoding it: one client escapes equal text equally."""
    text = quoted[1:-1]
    return Prompt(_text_blocks(text, text_block_bytes, root_hash("text", *how.salts, seed=how.seed)), 0, len(text))


def _text_blocks(text: bytes | memoryview, text_block_bytes: int, root: int) -> list[int]:
    return hash_byte_blocks(memoryview(text)[: MAX_BLOCKS * text_block_bytes], text_block_bytes, root)


def _batch_prompt(raw: memoryview, rules: ParseRules, how: PromptHashing, chunks: TokenChunks) -> Steps[Prompt]:
    """Combine several prompts of one request: blocks of the first one, lengths of all."""
    if bytes(raw[1:_SMALL_BYTES]).lstrip()[:1] not in (b'"', b"["):
        raise _no_prompts()
    small = len(raw) <= AT_ONCE_BYTES
    try:
        if small:
            items = [memoryview(item) for item in _decode_items(raw)]
        else:
            items = yield from members_of(raw, rules.max_prompts)
        if len(items) > rules.max_prompts:
            raise TooManyMembersError
    except TooManyMembersError as error:
        raise _too_many(rules, "prompt") from error
    if items and all(item[0] == ord('"') for item in items):
        first = _text_prompt(items[0], rules.text_block_bytes, how)
        return Prompt(first.hashes, 0, sum(len(item) - 2 for item in items), len(items))
    if items and all(item[0] == ord("[") for item in items):
        try:
            first_ids = yield from chunks.steps(items[0], how.block_tokens, how.root)
            tokens = first_ids.tokens
            for item in items[1:]:
                if small:
                    count = len(_decode_ids(item))
                else:
                    yield
                    count = bytes(item).count(b",") + bool(bytes(item[1:-1]).strip())
                if not count:
                    raise _no_prompts()
                tokens += count
        except OverflowError as error:
            raise _out_of_range(error) from error
        except msgspec.DecodeError as error:
            raise _no_prompts() from error
        if first_ids.tokens:
            return Prompt(first_ids.hashes, tokens, 0, len(items), how.plain)
    raise _no_prompts()


def _too_many(rules: ParseRules, name: str) -> RequestError:
    return RequestError(400, f"'{name}' has more than {rules.max_prompts} prompts (limits.prompts)", param=name)


def _no_prompts() -> RequestError:
    return RequestError(
        400, "'prompt' must be a string, a list of strings, a list of token ids or a list of such lists", param="prompt"
    )
