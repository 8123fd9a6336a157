"""Embeddings, scores and rankings without a model: bags of hashed words; texts with common words are similar."""

from __future__ import annotations

import base64
import time
import uuid
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from sim.core.content import text_token_bytes, token_bytes
from sim.server.parsing import ApiError, check_model, decode_body
from sim.server.settings import ServerSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_DIMENSIONS = 256
_MOST_DIMENSIONS = 8192
_MOST_TEXTS = 2048

Content = str | list[int]


class EmbeddingFields(msgspec.Struct):
    """Body of POST /v1/embeddings: the fields that the simulator reads."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class ScoreFields(msgspec.Struct):
    """Body of POST /v1/score: the fields that the simulator reads."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None


class RerankFields(msgspec.Struct):
    """Body of POST /v1/rerank: the fields that the simulator reads."""

    query: str
    documents: list[str]
    model: str | None = None
    top_n: int | None = None


class DetokenizeFields(msgspec.Struct):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


_embedding = msgspec.json.Decoder(EmbeddingFields)
_score = msgspec.json.Decoder(ScoreFields)
_rerank = msgspec.json.Decoder(RerankFields)
_detokenize = msgspec.json.Decoder(DetokenizeFields)


def embeddings(body: bytes, settings: ServerSettings) -> bytes:
    """The answer to POST /v1/embeddings. Raises ApiError."""
    fields = decode_body(_embedding, body)
    check_model(fields.model, settings)
    size = _DIMENSIONS if fields.dimensions is None else fields.dimensions
    if not 1 <= size <= _MOST_DIMENSIONS:
        raise ApiError(400, f"dimensions must be in 1 .. {_MOST_DIMENSIONS}, got {size}", param="dimensions")
    contents = _contents(fields.input)
    tokens = [_tokens(content, settings, "input") for content in contents]
    vectors = [_vector(content, size) for content in contents]
    data = [
        {"index": index, "object": "embedding", "embedding": _encoded(vector, fields.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    return _listed("embd", data, sum(tokens), settings)


def score(body: bytes, settings: ServerSettings) -> bytes:
    """The answer to POST /v1/score: one text with each of the others, or pairs. Raises ApiError."""
    fields = decode_body(_score, body)
    check_model(fields.model, settings)
    left = [fields.text_1] if isinstance(fields.text_1, str) else fields.text_1
    right = [fields.text_2] if isinstance(fields.text_2, str) else fields.text_2
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right) or not left:
        raise ApiError(400, "text_1 has one text, or as many as text_2", param="text_1")
    scores, tokens = _similarities(left, right, settings, "text_2")
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return _listed("score", data, tokens, settings)


def rerank(body: bytes, settings: ServerSettings) -> bytes:
    """The answer to POST /v1/rerank: documents by falling relevance. Raises ApiError."""
    fields = decode_body(_rerank, body)
    check_model(fields.model, settings)
    scores, tokens = _similarities([fields.query] * len(fields.documents), fields.documents, settings, "documents")
    results = [
        {"index": index, "document": {"text": text}, "relevance_score": value}
        for index, (text, value) in enumerate(zip(fields.documents, scores, strict=True))
    ]
    results.sort(key=lambda result: -float(str(result["relevance_score"])))
    answer = {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": settings.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": results[: fields.top_n or None],
    }
    return msgspec.json.encode(answer)


def detokenize(body: bytes, settings: ServerSettings) -> bytes:
    """The answer to POST /detokenize. Raises ApiError."""
    fields = decode_body(_detokenize, body)
    check_model(fields.model, settings)
    try:
        raw = token_bytes(fields.tokens)
    except OverflowError as error:
        raise ApiError(400, "token ids must be in 0 .. 2**32 - 1", param="tokens") from error
    return msgspec.json.encode({"prompt": raw.rstrip(b"\0").decode("utf-8", "replace")})


def _contents(given: str | list[str | int | list[int]]) -> list[Content]:
    """Texts or lists of token ids. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    ids = [each for each in given if isinstance(each, int)]
    if ids:
        if len(ids) < len(given):
            raise ApiError(400, "input mixes token ids with texts", param="input")
        return [ids]
    contents: list[Content] = [each for each in given if isinstance(each, str | list)]
    if not 0 < len(contents) <= _MOST_TEXTS:
        raise ApiError(400, f"input has 1 .. {_MOST_TEXTS} texts, got {len(contents)}", param="input")
    return contents


def _tokens(content: Content, settings: ServerSettings, param: str) -> int:
    """Length in tokens. Raises ApiError for an empty text, one that is too long, and ids out of range."""
    try:
        count = len(text_token_bytes(content) if isinstance(content, str) else token_bytes(content)) // 4
    except OverflowError as error:
        raise ApiError(400, "token ids must be in 0 .. 2**32 - 1", param=param) from error
    if not count:
        raise ApiError(400, f"{param} has an empty text", param=param)
    limit = settings.config.max_model_len
    if count > limit:
        message = f"This model's maximum context length is {limit} tokens. However, your input has {count}."
        raise ApiError(400, message, param=param)
    return count


def _vector(content: Content, size: int) -> NDArray[np.float32]:
    """Counts of hashed words, or of token ids, as a vector of length 1."""
    import numpy as np  # a fifth of the time in which an engine starts

    if isinstance(content, str):
        keys = [zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in content.lower().split() or [content]]
    else:
        keys = content
    counts = np.bincount(np.asarray(keys, np.uint32) % np.uint32(size), minlength=size).astype(np.float32)
    vector: NDArray[np.float32] = counts / np.linalg.norm(counts)
    return vector


def _similarities(
    left: Sequence[str], right: Sequence[str], settings: ServerSettings, param: str
) -> tuple[list[float], int]:
    """Cosine of each pair, and all tokens."""
    tokens = sum(_tokens(text, settings, param) for text in (*left, *right))
    pairs = zip(left, right, strict=True)
    return [round(float(_vector(a, _DIMENSIONS) @ _vector(b, _DIMENSIONS)), 6) for a, b in pairs], tokens


def _encoded(vector: NDArray[np.float32], encoding: str | None) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    floats: list[float] = vector.tolist()
    return floats


def _listed(kind: str, data: list[dict[str, Any]], tokens: int, settings: ServerSettings) -> bytes:
    answer = {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": settings.model,
        "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }
    return msgspec.json.encode(answer)
