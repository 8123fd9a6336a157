"""Block hashes of token-id prompts, with a cache of earlier prompts, since a conversation's next turn begins equally.

Decoding 33,000 ids and hashing their blocks takes longer than everything else the proxy does with a request. The
JSON text of the ids is therefore processed in pieces of `CHUNK_BYTES`, chained by hash like prefix blocks, and the
result of each piece is cached: for a prompt that extends an earlier one, only the new part is decoded.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from policies.predict.blocks import TOKEN_ID_BYTES, hash_byte_blocks, root_hash
from policies.predict.exact_index import plain_root
from proxy.request.steps import Steps, at_once

CHUNK_BYTES = 8192
_CHUNKS_PER_STEP = 16
"""Decoding and hashing 128 KB of ids takes about 5 ms."""
MAX_BLOCKS = 65_536
"""Blocks of one prompt that are hashed: 1 M tokens of 16; the ids after them are counted by their commas."""
_COUNTED_BYTES = 1024 * 1024

_decode_ids = msgspec.json.Decoder(list[int]).decode


class PromptHashing(NamedTuple):
    """Parameters of hashing a completion's prompt into blocks."""

    block_tokens: int
    salts: tuple[str, ...]
    """Model and cache salt."""
    base_model: bool
    seed: int

    @property
    def plain(self) -> bool:
        """True for blocks that KV events can report: of a base model, without cache salt."""
        return self.base_model and not self.salts[1]

    @property
    def root(self) -> int:
        """Hash that the chain of a prompt's token ids begins with."""
        return plain_root(self.seed) if self.plain else root_hash("ids", *self.salts, seed=self.seed)


class TokenBlocks(NamedTuple):
    """Blocks of a list of token ids."""

    hashes: list[int]
    """Chained hash of every full block."""
    tokens: int


class _Chunk(NamedTuple):
    """Result for a prompt up to the last complete id of one chunk."""

    end: int
    """Position in the text at which the next id begins."""
    tokens: int
    hashes: bytes
    """Hashes of the blocks that this chunk completed, 8 bytes each."""
    left: bytes
    """Packed ids after the last full block."""
    parent: int
    """Hash of that block."""


class TokenChunks:
    """Cache of ``capacity`` chunks, least recently used evicted first: at most 2 KB each, for 8 KB of JSON.

    Complexity for a prompt of n bytes, d of which are not cached: O(n) for one fast hash over the text and a copy of
    the known block hashes, and O(d) for decoding and hashing.
    """

    def __init__(self, capacity: int = 8192) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._chunks: OrderedDict[int, _Chunk] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def blocks(self, text: memoryview, block_tokens: int, root: int) -> TokenBlocks:
        """Blocks of the JSON list ``text``, brackets included, in the chain that starts at ``root``.

        Raises:
            msgspec.DecodeError: not a list of integers only.
            OverflowError: an id is not within 0..2**32 - 1.
        """
        return at_once(self.steps(text, block_tokens, root))

    def steps(self, text: memoryview, block_tokens: int, root: int) -> Steps[TokenBlocks]:
        """``blocks`` in steps; the cache stays consistent whatever runs between them."""
        at = _Chunk(1, 0, b"", b"", root)
        key = xxh3_64_intdigest(block_tokens.to_bytes(8, "little"), root)
        known = array("Q")
        last = len(text) - 1
        for number, limit in enumerate(range(1 + CHUNK_BYTES, last, CHUNK_BYTES), 1):
            if not number % _CHUNKS_PER_STEP:
                yield
            if len(known) >= MAX_BLOCKS:
                rest = yield from _counted(text[at.end : last])
                return TokenBlocks(known.tolist(), at.tokens + rest)
            key = xxh3_64_intdigest(text[limit - CHUNK_BYTES : limit], key)
            chunk = self._chunks.get(key)
            if chunk is None:
                comma = bytes(text[at.end : limit]).rfind(b",")
                if comma < 0:
                    break
                chunk = self._chunks[key] = _extended(at, text[at.end : at.end + comma], block_tokens)
                if len(self._chunks) > self._capacity:
                    self._chunks.popitem(last=False)
            else:
                self._chunks.move_to_end(key)
            known.frombytes(chunk.hashes)
            at = chunk
        if last - at.end > _CHUNKS_PER_STEP * CHUNK_BYTES:  # an id longer than a chunk, or blanks
            raise msgspec.DecodeError("no list of token ids")
        end = _extended(at, text[at.end : last], block_tokens)
        known.frombytes(end.hashes)
        return TokenBlocks(known.tolist(), end.tokens)


def _counted(text: memoryview) -> Steps[int]:
    """Number of ids in a list without its brackets."""
    commas = 0
    for at in range(0, len(text), _COUNTED_BYTES):
        commas += bytes(text[at : at + _COUNTED_BYTES]).count(b",")
        yield
    return commas + 1


def _extended(at: _Chunk, text: memoryview, block_tokens: int) -> _Chunk:
    """Extend a chunk by the ids in ``text``, a list without its brackets."""
    ids = _decode_ids(b"".join((b"[", text, b"]")))
    packed = at.left + array("I", ids).tobytes()
    block_bytes = block_tokens * TOKEN_ID_BYTES
    hashes = hash_byte_blocks(packed, block_bytes, at.parent)
    return _Chunk(
        at.end + len(text) + 1,
        at.tokens + len(ids),
        array("Q", hashes).tobytes(),
        packed[len(hashes) * block_bytes :],
        hashes[-1] if hashes else at.parent,
    )
