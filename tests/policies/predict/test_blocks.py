"""Prefix blocks: the chain of hashes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.predict.blocks import TOKEN_ID_BYTES, hash_byte_blocks, hash_token_blocks, root_hash

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@given(a=IDS, b=IDS, block=st.integers(1, 9))
def test_hashes_agree_up_to_the_block_where_the_prompts_split_and_never_after(
    a: list[int], b: list[int], block: int
) -> None:
    split = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    common = split // block
    ours, theirs = hash_token_blocks(a, block), hash_token_blocks(b, block)
    assert ours[:common] == theirs[:common]
    assert not set(ours[common:]) & set(theirs[common:])


@given(shared=IDS, block=st.integers(1, 9), tail=IDS)
def test_a_longer_prompt_begins_with_the_hashes_of_the_shorter(shared: list[int], block: int, tail: list[int]) -> None:
    short, long = hash_token_blocks(shared, block), hash_token_blocks(shared + tail, block)
    assert long[: len(short)] == short
    assert len(long) == (len(shared) + len(tail)) // block


def test_the_same_block_at_another_depth_has_another_hash() -> None:
    assert len(set(hash_token_blocks([7] * 64, 16))) == 4


@given(data=st.binary(max_size=200), block=st.integers(1, 50))
def test_only_full_blocks_are_hashed(data: bytes, block: int) -> None:
    assert len(hash_byte_blocks(data, block)) == len(data) // block
    assert hash_byte_blocks(memoryview(data), block) == hash_byte_blocks(data[: len(data) // block * block], block)


def test_token_blocks_are_byte_blocks_of_32_bit_ids() -> None:
    data = b"".join(i.to_bytes(4, "little") for i in range(64))
    assert hash_token_blocks(range(64), 16) == hash_byte_blocks(data, 16 * TOKEN_ID_BYTES)


def test_namespaces_share_no_block() -> None:
    ids = list(range(64))
    chains = [
        hash_token_blocks(ids, 16, root_hash(*namespace)) for namespace in [(), ("m",), ("m", "lora"), ("m", "salt")]
    ]
    assert len({block for chain in chains for block in chain}) == 4 * 4


@given(
    a=st.lists(st.text(alphabet="ab:1\x1f", max_size=4), max_size=4),
    b=st.lists(st.text(alphabet="ab:1\x1f", max_size=4), max_size=4),
)
def test_no_choice_of_salt_spells_another_namespace(a: list[str], b: list[str]) -> None:
    assert (root_hash(*a) == root_hash(*b)) == (a == b)


def test_a_salt_with_a_separator_inside_is_not_two_parts() -> None:
    assert root_hash("model\x1fsalt") != root_hash("model", "salt")
    assert root_hash("model") != root_hash("model", "")


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["7"], [None], "text"])
def test_bad_ids_are_refused_with_the_range(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"token ids must be integers from 0 to 2\*\*32 - 1"):
        hash_token_blocks(bad, 16)


@pytest.mark.parametrize("size", [0, -4])
def test_a_block_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"block_tokens must be at least 1, got {size}"):
        hash_token_blocks([1], size)
    with pytest.raises(ValueError, match=f"block_bytes must be at least 1, got {size}"):
        hash_byte_blocks(b"abc", size)


def colliding(root: int) -> tuple[list[int], list[int]]:
    """Two different blocks of 16 tokens with equal hashes, for an attacker who knows the root.

    For 17 to 128 bytes xxh3 multiplies two words, each combined with a constant and the root; the first word is
    chosen so that its factor is zero, whatever the second one is.
    """
    constant = int.from_bytes(bytes.fromhex("b8fe6c3923a44bbe"), "little")
    first = (constant + root) % 2**64
    head, tail = [first % 2**32, first >> 32], list(range(12))
    return [*head, 1, 2, *tail], [*head, 3, 4, *tail]


@given(root=st.integers(0, 2**64 - 1))
def test_who_knows_the_root_constructs_collisions(root: int) -> None:
    ours, theirs = colliding(root)
    assert hash_token_blocks(ours, 16, root) == hash_token_blocks(theirs, 16, root)


@given(seed=st.integers(1, 2**64 - 1), namespace=st.lists(st.text(max_size=5), max_size=3))
def test_who_does_not_know_the_seed_does_not_know_the_root(seed: int, namespace: list[str]) -> None:
    guess, root = root_hash(*namespace), root_hash(*namespace, seed=seed)
    assert guess != root
    ours, theirs = colliding(guess)
    assert hash_token_blocks(ours, 16, root) != hash_token_blocks(theirs, 16, root)


def test_a_seed_separates_namespaces_as_before() -> None:
    roots = {root_hash(*names, seed=seed) for names in [(), ("m",), ("m", "salt")] for seed in (0, 1, 2**64 - 1)}
    assert len(roots) == 9
