"""Embeddings, scores, rankings and detokenization of the simulated engine."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sim.core.content import text_token_bytes, token_ids
from sim.server.parsing import ApiError
from sim.server.settings import ServerSettings
from sim.server.similarity import detokenize, embeddings, rerank, score

SETTINGS = ServerSettings.resolve(port=0, kv_capacity_tokens=4096, block_size=16)
Answered = Callable[[bytes, ServerSettings], bytes]


def ask(answered: Answered, **body: Any) -> Any:
    return json.loads(answered(json.dumps(body).encode(), SETTINGS))


def vectors(**body: Any) -> list[list[float]]:
    return [each["embedding"] for each in ask(embeddings, **body)["data"]]


def test_an_embedding_has_length_one_and_depends_on_the_text_only() -> None:
    one, two, other = vectors(input=["a b c", "a b c", "x y z"], dimensions=64)
    assert one == two != other
    assert len(one) == 64
    assert np.linalg.norm(one) == pytest.approx(1.0)
    assert vectors(input="a b c", dimensions=64) == [one]
    assert vectors(input=[1, 2, 3]) == vectors(input=[[1, 2, 3]])
    answer = ask(embeddings, input=["abcd", "abcdefgh"], model="warm-sim")
    assert (answer["usage"]["prompt_tokens"], answer["model"]) == (3, "warm-sim")


def test_base64_holds_the_same_floats() -> None:
    [floats] = vectors(input="some text")
    [encoded] = ask(embeddings, input="some text", encoding_format="base64")["data"]
    assert np.frombuffer(base64.b64decode(encoded["embedding"]), "<f4").tolist() == floats


def test_texts_with_common_words_are_similar() -> None:
    scores = ask(score, text_1="warm cache", text_2=["warm cache", "cold cache", "nothing"])["data"]
    values = [each["score"] for each in scores]
    assert values[0] == 1.0 > values[1] > values[2] == 0.0
    pairs = ask(score, text_1=["a", "b"], text_2=["a", "c"])["data"]
    assert [each["score"] for each in pairs] == [1.0, 0.0]
    ranked = ask(rerank, query="warm cache", documents=["nothing", "cold cache", "warm cache"], top_n=2)["results"]
    assert [(each["index"], each["document"]["text"]) for each in ranked] == [(2, "warm cache"), (1, "cold cache")]


def test_detokenizing_undoes_tokenizing() -> None:
    for text in ("four byte pieces", "é", "a\nb"):
        assert ask(detokenize, tokens=token_ids(text_token_bytes(text))) == {"prompt": text}


@pytest.mark.parametrize(
    ("answered", "body", "status", "message"),
    [
        (embeddings, {"input": []}, 400, "1 .. 2048 texts"),
        (embeddings, {"input": ""}, 400, "empty text"),
        (embeddings, {"input": [1, "a"]}, 400, "mixes"),
        (embeddings, {"input": [2**32]}, 400, "token ids"),
        (embeddings, {"input": "x" * 20_000}, 400, "maximum context length is 4096"),
        (embeddings, {"input": "x", "dimensions": 0}, 400, "dimensions"),
        (embeddings, {"input": "x", "encoding_format": "bytes"}, 400, "encoding_format"),
        (embeddings, {"input": "x", "model": "gpt-9"}, 404, "does not exist"),
        (score, {"text_1": ["a", "b"], "text_2": ["c"]}, 400, "text_1"),
        (rerank, {"query": "a"}, 400, "documents"),
        (detokenize, {"tokens": [-1]}, 400, "token ids"),
    ],
)
def test_bodies_that_are_refused(answered: Answered, body: dict[str, Any], status: int, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        ask(answered, **body)
    assert refused.value.status == status
