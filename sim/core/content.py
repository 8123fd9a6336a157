"""Contents of blocks: token bytes, chained block keys, and the pseudo-words an engine generates.

A token is 4 bytes everywhere: a token id as a 32-bit integer, a piece of text as 4 bytes of UTF-8, a generated token
as a space and three letters. Equal text prefixes therefore give equal token prefixes (in steps of 4 bytes).
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4
ROOT_KEY = 0
"""Parent of a prompt's first block."""

_WORD_COUNT = 16_384


@functools.cache
def _pseudo_words() -> bytes:
    """Made at the first use: simulations in virtual time generate no text."""
    generator = random.Random(20260)
    consonants, vowels = "bcdfghjklmnprstvz", "aeiou"
    draw = generator.choice
    words = [f" {draw(consonants)}{draw(vowels)}{draw(consonants)}" for _ in range(_WORD_COUNT)]
    return "".join(words).encode("ascii")


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Token ids (0 .. 2**32 - 1) as bytes.

    Raises:
        OverflowError, TypeError: an id is out of range or not an integer.
    """
    return array("I", token_ids).tobytes()


def text_token_bytes(text: str) -> bytes:
    """Text as token bytes: 4 bytes of UTF-8 a token, the last one padded with zero bytes."""
    raw = text.encode("utf-8", "surrogatepass")
    return raw + b"\0" * (-len(raw) % TOKEN_BYTES)


def token_ids(tokens: bytes) -> list[int]:
    """Token bytes as ids, the inverse of ``token_bytes``."""
    return array("I", tokens).tolist()


def chain_keys(tokens: bytes, block_tokens: int, parent: int = ROOT_KEY) -> list[int]:
    """Key of every full block of ``block_tokens`` tokens: xxh3-64 of its bytes, seeded with the key before it."""
    size = block_tokens * TOKEN_BYTES
    keys = []
    for start in range(0, len(tokens) - size + 1, size):
        parent = xxh3_64_intdigest(tokens[start : start + size], parent)
        keys.append(parent)
    return keys


def block_key(tokens: bytes, parent: int) -> int:
    """Key of one block with ``tokens`` after the block with key ``parent``."""
    return xxh3_64_intdigest(tokens, parent)


def output_offset(prompt_key: int, tail: bytes, seed: int) -> int:
    """Offset in the endless pseudo-text at which a prompt's output starts: from its last block key, partial block,
    seed."""
    return xxh3_64_intdigest(tail + seed.to_bytes(8, "little", signed=True), prompt_key) % _WORD_COUNT


def output_bytes(offset: int, start: int, stop: int) -> bytes:
    """Bytes (4 a token, ASCII text too) of generated tokens ``start`` to ``stop`` of an output at ``offset``."""
    first = (offset + start) % _WORD_COUNT
    count = stop - start
    if first + count <= _WORD_COUNT:
        return _pseudo_words()[first * TOKEN_BYTES : (first + count) * TOKEN_BYTES]
    repeats = (first + count) // _WORD_COUNT + 1
    return (_pseudo_words() * repeats)[first * TOKEN_BYTES : (first + count) * TOKEN_BYTES]
