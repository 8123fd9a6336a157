"""OpenAI request bodies into engine requests, with the checks and messages of vLLM's API server."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from sim.core.content import output_bytes, text_token_bytes, token_bytes
from sim.core.sequence import KvTransfer, Request
from sim.server.fields import GenerationFields, KvTransferParams, OpenAiFields, OrderedFields, logprobs_asked
from sim.server.settings import ServerSettings

DEFAULT_MAX_TOKENS = 16
_MOST_CHOICES = 256

_T = TypeVar("_T")


class ApiError(Exception):
    """An error answer of the API: its HTTP status and OpenAI's error object."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


class CompletionBody(OpenAiFields, kw_only=True):
    """Body of POST /v1/completions: the fields that the simulator reads."""

    prompt: msgspec.Raw
    logprobs: int | None = None


class ChatBody(OpenAiFields, kw_only=True):
    """Body of POST /v1/chat/completions: the fields that the simulator reads."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeBody(msgspec.Struct):
    """Body of POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class GenerationCall(NamedTuple):
    """One generation request, ready to be submitted, with the format of its answer."""

    request: Request
    chat: bool
    stream: bool
    include_usage: bool
    public_id: str
    others: tuple[Request, ...] = ()
    """Requests of the further choices: those of the first prompt, then those of the next ones."""
    choices: int = 1
    """Choices of each prompt."""
    logprobs: int | None = None
    """Alternatives to report for each token; None: no log probabilities."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests, by the index of their choice."""
        return (self.request, *self.others)


_completion = msgspec.json.Decoder(CompletionBody, strict=False)
_chat = msgspec.json.Decoder(ChatBody, strict=False)
_tokenize = msgspec.json.Decoder(TokenizeBody)
_ids = msgspec.json.Decoder(list[int])
_prompt = msgspec.json.Decoder(str | list[str | list[int]])


def parse_completion(body: bytes, settings: ServerSettings, request_id: str | None) -> GenerationCall:
    """A /v1/completions body as an engine request.

    Raises:
        ApiError: 400 or 404, with vLLM's wording.
    """
    decoded = decode_body(_completion, body)
    first, *more = _prompts(bytes(decoded.prompt))
    call = call_of(
        decoded,
        first,
        decoded.max_tokens,
        settings,
        request_id,
        chat=False,
        more=more,
        choices=1 if decoded.n is None else decoded.n,
    )
    return call._replace(logprobs=_checked(decoded, decoded.logprobs, None))


def parse_chat(body: bytes, settings: ServerSettings, request_id: str | None) -> GenerationCall:
    """A /v1/chat/completions body as an engine request.

    Raises:
        ApiError: 400 or 404, with vLLM's wording.
    """
    decoded = decode_body(_chat, body)
    tokens = text_token_bytes(render_chat(decoded.messages, decoded.tools))
    limit = decoded.max_completion_tokens if decoded.max_completion_tokens is not None else decoded.max_tokens
    call = call_of(
        decoded, tokens, limit, settings, request_id, chat=True, choices=1 if decoded.n is None else decoded.n
    )
    return call._replace(logprobs=_checked(decoded, decoded.logprobs, decoded.top_logprobs))


def parse_tokenize(body: bytes) -> bytes:
    """A /tokenize body's token bytes.

    Raises:
        ApiError: 400: neither a prompt nor messages.
    """
    decoded = decode_body(_tokenize, body)
    if decoded.messages is not None:
        return text_token_bytes(render_chat(decoded.messages, None))
    if decoded.prompt is None:
        raise ApiError(400, "either prompt or messages is required", param="prompt")
    return text_token_bytes(decoded.prompt)


def render_chat(messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
    """A conversation as one text: conversations with equal prefixes give texts with equal prefixes. Raises ApiError
    (400)."""
    pieces = []
    if tools:
        pieces.append("<|tools|>\n" + msgspec.json.encode(tools, order="sorted").decode() + "<|end|>\n")
    for message in messages:
        role = message.get("role")
        if not isinstance(role, str):
            raise ApiError(400, "each message needs a role", param="messages")
        pieces.append(f"<|{role}|>\n{_content(message.get('content'))}")
        rest = {key: value for key, value in message.items() if key not in {"role", "content"} and value is not None}
        if rest:
            pieces.append(msgspec.json.encode(rest, order="sorted").decode())
        pieces.append("<|end|>\n")
    pieces.append("<|assistant|>\n")
    return "".join(pieces)


def _content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(
            part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else _canonical(part)
            for part in content
        )
    raise ApiError(400, "message content must be a string, a list of parts or null", param="messages")


def _canonical(part: object) -> str:
    return msgspec.json.encode(part, order="sorted").decode()


def decode_body(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """A body as its decoder's type. Raises ApiError (400)."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"invalid request: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


def _checked(fields: OpenAiFields, flag: bool | int | None, top: int | None) -> int | None:
    """Alternatives to report for each token. Raises ApiError (400) for features that the simulator does not have."""
    name = fields.unserved()
    if name is not None:
        raise ApiError(400, f"the simulator does not support this value of '{name}'", param=name)
    try:
        return logprobs_asked(flag, top)
    except ValueError as error:
        raise ApiError(400, str(error), param="logprobs") from error


def _prompts(raw: bytes) -> list[bytes]:
    """Token bytes of each prompt: a string, token ids, or a list of either."""
    try:
        if raw[:1] == b"[" and raw[1:].lstrip()[:1].isdigit():
            return [token_bytes(_ids.decode(raw))]
        prompt = _prompt.decode(raw)
        prompts = prompt if isinstance(prompt, list) else [prompt]
        if not prompts:
            raise ApiError(400, "The prompt is empty.", param="prompt")
        return [text_token_bytes(each) if isinstance(each, str) else token_bytes(each) for each in prompts]
    except msgspec.ValidationError as error:
        raise ApiError(400, f"invalid prompt: {error}", param="prompt") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the prompt is not JSON: {error}", param="prompt") from error
    except OverflowError as error:
        raise ApiError(400, "token ids must be in 0 .. 2**32 - 1", param="prompt") from error


def check_model(model: str | None, settings: ServerSettings) -> None:
    """Raise ApiError (404) for another model than the engine's. No model and an empty one are it, as in vLLM."""
    if model and model != settings.model:
        raise ApiError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")


def call_of(
    body: GenerationFields,
    tokens: bytes,
    limit: int | None,
    settings: ServerSettings,
    request_id: str | None,
    *,
    chat: bool,
    more: Sequence[bytes] = (),
    choices: int | None = None,
) -> GenerationCall:
    """A decoded body with the token bytes of its prompt as an engine request, or as several.

    Args:
        body: the decoded body.
        tokens: token bytes of the (first) prompt.
        limit: most tokens to generate; None: the default.
        settings: of the engine.
        request_id: the client's.
        chat: the answer is a chat's.
        more: token bytes of further prompts.
        choices: choices of each prompt; None: one, and the API has no ``n``.

    Raises:
        ApiError: 400 or 404, with vLLM's wording.
    """
    check_model(body.model, settings)
    count = 1 if choices is None else choices
    if choices is None and body.n not in {None, 1}:
        raise ApiError(400, "the simulator generates one choice a request here: n must be 1", param="n")
    if not 1 <= count * (1 + len(more)) <= _MOST_CHOICES:
        raise ApiError(400, f"n must be at least 1, and n times the prompts at most {_MOST_CHOICES}", param="n")
    internal_id = uuid.uuid4().hex
    requests = [
        _request(body, each, limit, settings, f"{internal_id}-{number}-{choice}", choice)
        for number, each in enumerate((tokens, *more))
        for choice in range(count)
    ]
    if len(requests) > 1 and requests[0].kv_transfer is not None:
        raise ApiError(400, "kv_transfer_params need one prompt and one choice", param="kv_transfer_params")
    return GenerationCall(
        requests[0],
        chat,
        bool(body.stream),
        body.stream_options is not None and bool(body.stream_options.include_usage),
        ("chatcmpl-" if chat else "cmpl-") + (request_id or internal_id),
        tuple(requests[1:]),
        count,
    )


def _request(
    body: GenerationFields, tokens: bytes, limit: int | None, settings: ServerSettings, request_id: str, choice: int
) -> Request:
    max_tokens = DEFAULT_MAX_TOKENS if limit is None else limit
    min_tokens = body.min_tokens or 0
    if max_tokens < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    if not 0 <= min_tokens <= max_tokens:
        message = f"min_tokens must be in 0 .. max_tokens={max_tokens}, got {min_tokens}."
        raise ApiError(400, message, param="min_tokens")
    count = len(tokens) // 4
    if not count:
        raise ApiError(400, "The prompt is empty.", param="prompt")
    if count + max_tokens > settings.config.max_model_len:
        raise ApiError(
            400,
            f"This model's maximum context length is {settings.config.max_model_len} tokens. However, you requested "
            f"{max_tokens} output tokens and your prompt contains {count} input tokens. Please reduce the length of "
            "the input prompt or the number of requested output tokens.",
            param="input_tokens",
        )
    request = Request.from_tokens(
        request_id,
        tokens,
        settings.config.block_tokens,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=((settings.seed if body.seed is None else body.seed) + choice) % 2**63,
        kv_transfer=_kv_transfer(body.kv_transfer_params),
    )._replace(priority=body.priority if isinstance(body, OrderedFields) else 0)
    if body.stop:
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        request = request._replace(stop_after=_stop_after(request, stops))
    return request


def _kv_transfer(params: KvTransferParams | None) -> KvTransfer | None:
    if params is None:
        return None
    return KvTransfer(
        bool(params.do_remote_decode),
        bool(params.do_remote_prefill),
        params.transfer_id,
        params.remote_engine_id,
        params.remote_bootstrap_addr,
    )


def _stop_after(request: Request, stops: list[str]) -> int | None:
    """Tokens up to and with the first stop string in the (predetermined) output."""
    text = output_bytes(request.output_offset, 0, request.max_tokens)
    least = request.min_tokens * 4
    ends = [text.find(stop.encode(), least) + len(stop) for stop in stops if stop and stop.encode() in text[least:]]
    return -(-min(ends) // 4) if ends else None
