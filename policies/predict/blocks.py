"""Prefix blocks: a prompt as a chain of hashes, each covering its block and everything before it.

The chain is ``h[i] = xxh3_64(block[i], seed=h[i-1])``, so equal hashes mean equal prefixes (up to 64-bit collisions).
``h[-1]``, the root, is the hash of the namespace: prompts for different models, adapters or cache salts share no
blocks.

xxh3 is not cryptographic: with a known root, colliding prompts take no effort to construct. The root is therefore
hashed with a secret seed, and every hash of a chain depends on it. Accidental collisions: n different blocks contain
one with probability n² / 2^65, which is 3e-8 for a million.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from struct import iter_unpack

from xxhash import xxh3_64_intdigest

TOKEN_ID_BYTES = 4


def root_hash(*namespace: str, seed: int = 0) -> int:
    """Root of the chains of one namespace (model, adapter, cache salt), like ``seed`` an unsigned 64-bit integer."""
    # Length-prefixed parts: a client chooses its salt and must not be able to collide with another namespace.
    framed = "".join(f"{len(part)}:{part}" for part in namespace)
    return xxh3_64_intdigest(framed.encode("utf-8", "surrogatepass"), seed)


def hash_byte_blocks(data: bytes | memoryview, block_bytes: int, root: int = 0) -> list[int]:
    """Chained hashes of all *full* blocks of ``data``; the tail shorter than ``block_bytes`` has none.

    Complexity: O(len(data)), one hash call per block.
    """
    if block_bytes < 1:
        raise ValueError(f"block_bytes must be at least 1, got {block_bytes}")
    full = memoryview(data)[: len(data) // block_bytes * block_bytes]
    digest = xxh3_64_intdigest
    parent = root
    # Split in C: slicing block by block takes as long as hashing the small blocks of token ids.
    return [parent := digest(block, parent) for (block,) in iter_unpack(f"{block_bytes}s", full)]


def hash_token_blocks(token_ids: Iterable[int], block_tokens: int, root: int = 0) -> list[int]:
    """Chained hashes of all full blocks of ``block_tokens`` token ids (each 0 <= id < 2**32).

    Raises:
        ValueError: an id is not an integer in range, or ``block_tokens`` is below 1.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from error
    return hash_byte_blocks(memoryview(packed).cast("B"), block_tokens * TOKEN_ID_BYTES, root)
