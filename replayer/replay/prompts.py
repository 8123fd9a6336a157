"""Prompts from block ids, with exact prefix sharing: the same id always gives the same tokens.

A block's tokens are a pure function of (seed, hash id), always generated in full and cut where a prompt ends inside it,
so an id that is first seen as a short tail is not short later. Tokens that no id covers (the rest of a ``floor``
trace's prompt) are a function of (seed, request) and shared with no other. Two prompts differ from the first differing
id on, up to the chance that single tokens coincide (1 in ``high - low``).

Tokens come from splitmix64 (Steele, Lea, Flood, OOPSLA 2014) over counters, so no state and no order of calls matters.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from replayer.traces.trace import TraceRequest

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_TAIL_DOMAIN = 0xA5A5_5A5A_C3C3_3C3C
_ENTRY_BYTES = 120
"""Memory of a cached block besides its text: dict entry, key, object headers."""


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's output function, element by element."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def decimal_rows(tokens: npt.NDArray[np.int64]) -> list[bytes]:
    """Every row as ASCII ``b"12,7,"``: decimal numbers, a comma after each. Shape (rows, columns), values >= 0."""
    width = len(str(int(tokens.max(initial=0))))
    rows, columns = tokens.shape
    powers = 10 ** np.arange(width - 1, -1, -1, dtype=np.int64)
    text = np.empty((rows, columns, width + 1), dtype=np.uint8)
    text[..., :width] = (tokens[..., None] // powers) % 10 + ord("0")
    text[..., width] = ord(",")
    keep = np.ones(text.shape, dtype=bool)
    keep[..., : width - 1] = tokens[..., None] >= powers[:-1]
    lengths = keep.reshape(rows, -1).sum(axis=1)
    flat = text[keep].tobytes()
    ends = np.cumsum(lengths).tolist()
    return [flat[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


class PromptBuilder:
    """Builds prompts; keeps serialised blocks in an LRU cache bounded by bytes.

    Args:
        block_tokens: tokens per block id.
        seed: another seed gives other tokens for every id.
        low: smallest token id used (special tokens are usually below it, or at the top of the vocabulary).
        high: largest token id used plus one; at most the model's vocabulary.
        cache_bytes: bound of the cache.
    """

    def __init__(
        self, block_tokens: int, *, seed: int = 0, low: int = 1000, high: int = 100_000, cache_bytes: int = 256 << 20
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}; it must be at least 1")
        if not 0 <= low < high:
            raise ValueError(f"token range [{low}, {high}) is empty; --token-low must be below --token-high")
        self.block_tokens = block_tokens
        self.low, self.high = low, high
        self._seed = int(_mix(np.array([(seed * _GOLDEN + 1) & _MASK], dtype=np.uint64))[0])
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[int, bytes] = OrderedDict()
        self._used_bytes = 0

    def _draw(self, keys: Iterable[int], domain: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens of shape (keys, count), each row a function of (seed, domain, key)."""
        start = np.array([(key ^ domain) & _MASK for key in keys], dtype=np.uint64)
        start = _mix(start * np.uint64(_GOLDEN) + np.uint64(self._seed))
        counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        drawn = _mix(start[:, None] + counters[None, :])
        return (drawn % np.uint64(self.high - self.low)).astype(np.int64) + self.low

    def _split(self, request: TraceRequest) -> tuple[Sequence[int], int, int]:
        """(ids of whole blocks, tokens taken of the block after them, tokens that no id covers)."""
        size, length = self.block_tokens, request.input_length
        covered = min(len(request.hash_ids) * size, length)
        whole = covered // size
        return request.hash_ids[:whole], covered - whole * size, length - covered

    def tokens(self, request: TraceRequest) -> list[int]:
        """The prompt as token ids; its length is ``input_length``."""
        whole, partial, uncovered = self._split(request)
        parts = [self._draw(whole, 0, self.block_tokens).ravel()]
        if partial:
            parts.append(self._draw([request.hash_ids[len(whole)]], 0, partial).ravel())
        if uncovered:
            parts.append(self._draw([request.chat_id], _TAIL_DOMAIN, uncovered).ravel())
        tokens: list[int] = np.concatenate(parts).tolist()
        return tokens

    def tokens_json(self, request: TraceRequest) -> bytes:
        """The prompt as a JSON array of token ids: ``b"[1,2,3]"``."""
        whole, partial, uncovered = self._split(request)
        parts = self._blocks_json(whole)
        if partial:
            parts += decimal_rows(self._draw([request.hash_ids[len(whole)]], 0, partial))
        if uncovered:
            parts += decimal_rows(self._draw([request.chat_id], _TAIL_DOMAIN, uncovered))
        return b"[" + b"".join(parts)[:-1] + b"]"

    def _blocks_json(self, ids: Sequence[int]) -> list[bytes]:
        cache = self._cache
        found: dict[int, bytes] = {}
        missing: list[int] = []
        for block in ids:
            text = cache.get(block)
            if text is None:
                missing.append(block)
            else:
                found[block] = text
                cache.move_to_end(block)
        if missing:
            missing = list(dict.fromkeys(missing))
            for block, text in zip(missing, decimal_rows(self._draw(missing, 0, self.block_tokens)), strict=True):
                found[block] = cache[block] = text
                self._used_bytes += len(text) + _ENTRY_BYTES
            while self._used_bytes > self._cache_bytes:
                _, evicted = cache.popitem(last=False)
                self._used_bytes -= len(evicted) + _ENTRY_BYTES
        return [found[block] for block in ids]

    @property
    def cache_bytes(self) -> int:
        """Bytes the cache holds now; never past its bound after a call returns."""
        return self._used_bytes

    def text(self, request: TraceRequest) -> str:
        """The prompt as text: the trace's own where it has one, else about one short word per token.

        Inexact: the engine's tokenizer decides the length, merges words across block borders, and adds template tokens.
        Prompts with a common id prefix still share their beginning as text.
        """
        if request.text is not None:
            return request.text
        return " ".join(map(_word, self.tokens(request)))


# Prompts are built between the events of streams: without the memory a prompt of 57,000 words took 21 ms, with it 5.
@functools.lru_cache(1 << 17)
def _word(token: int) -> str:
    """A pronounceable word of one consonant-vowel pair per base-105 digit: the same token gives the same word."""
    consonants, vowels = "bcdfghjklmnpqrstvwxyz", "aeiou"
    letters = []
    while True:
        token, digit = divmod(token, 105)
        letters.append(consonants[digit // 5] + vowels[digit % 5])
        if not token:
            return "".join(letters)


class BodyTemplate(msgspec.Struct, frozen=True):
    """Builds request bodies; only prompt and output length change from one to the next."""

    model: str
    mode: str = "tokens"
    """"tokens" and "text" go to /v1/completions, "chat" (text as one user message) to /v1/chat/completions."""

    @property
    def path(self) -> str:
        """URL path below the endpoint's ``/v1``."""
        return "/chat/completions" if self.mode == "chat" else "/completions"

    def body(self, builder: PromptBuilder, request: TraceRequest) -> bytes:
        """The JSON body: streamed, greedy, with exactly ``max(output_length, 1)`` tokens and usage at the end."""
        fields = {
            "model": self.model,
            "max_tokens": max(request.output_length, 1),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.mode == "tokens":
            head = msgspec.json.encode(fields)
            return head[:-1] + b',"prompt":' + builder.tokens_json(request) + b"}"
        text = builder.text(request)
        if self.mode == "chat":
            return msgspec.json.encode(fields | {"messages": [{"role": "user", "content": text}]})
        return msgspec.json.encode(fields | {"prompt": text})
