"""Cached chunks of token ids compared with decoding and hashing the whole list every time."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.predict.blocks import hash_token_blocks
from proxy.errors import RequestError
from proxy.request.parse import Endpoint, Prompt
from proxy.request.token_chunks import CHUNK_BYTES, TokenChunks
from tests.proxy.request.parsing import parse_request

ROOT = 7
SPELLINGS = st.sampled_from([(", ", ": "), (",", ":"), (" ,\n", ":")])


def spelt(ids: list[int], separators: tuple[str, str] = (",", ":")) -> memoryview:
    return memoryview(json.dumps(ids, separators=separators).encode())


def conversation(turns: int, step: int) -> list[list[int]]:
    """Prompts that each extend the previous one."""
    return [[(number * 7919) % 151_000 for number in range(step * turn)] for turn in range(1, turns + 1)]


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 4_000), st.integers(0, 3), st.sampled_from([1, 3, 16, 64]), SPELLINGS), max_size=12
    ),
    capacity=st.sampled_from([1, 2, 1_000]),
)
def test_any_mix_of_prompts_has_the_blocks_of_its_ids(
    prompts: list[tuple[int, int, int, tuple[str, str]]], capacity: int
) -> None:
    chunks = TokenChunks(capacity)
    for count, branch, block_tokens, separators in prompts:
        # Branches agree up to 2,500 ids and differ by one id there.
        ids = [number * 37 % 150_000 for number in range(count)]
        ids[2_500:2_501] = [branch] if count > 2_500 else []
        found = chunks.blocks(spelt(ids, separators), block_tokens, ROOT)
        assert found == (hash_token_blocks(ids, block_tokens, ROOT), count)
        assert len(chunks) <= capacity


def test_a_continued_turn_decodes_only_the_new_part(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def counting(text: bytes) -> list[int]:
        decoded.append(len(text))
        return msgspec.json.decode(text, type=list[int])

    monkeypatch.setattr("proxy.request.token_chunks._decode_ids", counting)
    chunks = TokenChunks()
    for turn, ids in enumerate(conversation(6, 5_000)):
        text = spelt(ids)
        decoded.clear()
        assert chunks.blocks(text, 16, ROOT) == (hash_token_blocks(ids, 16, ROOT), len(ids))
        grown = len(text) - (len(spelt(ids[: 5_000 * turn])) if turn else 0)
        assert sum(decoded) <= grown + 2 * CHUNK_BYTES


def test_namespaces_and_block_sizes_share_nothing() -> None:
    chunks, ids = TokenChunks(), list(range(6_000))
    first = chunks.blocks(spelt(ids), 16, 1)
    assert chunks.blocks(spelt(ids), 16, 2).hashes == hash_token_blocks(ids, 16, 2) != first.hashes
    assert chunks.blocks(spelt(ids), 32, 1).hashes == hash_token_blocks(ids, 32, 1)
    assert chunks.blocks(spelt(ids), 16, 1) == first


def parsed(prompt: str, chunks: TokenChunks) -> Prompt:
    body = b'{"model": "m", "prompt": ' + prompt.encode() + b"}"
    return parse_request(Endpoint.COMPLETIONS, body, 16, 1024, chunks=chunks).prompt


@pytest.mark.parametrize(
    "bad", ["1.5", "true", '"1"', "[1]", "null", "-1", "4294967296", "1e3", "99999999999999999999"]
)
@pytest.mark.parametrize("place", [0, 1_000, 5_999])
def test_one_wrong_item_anywhere_is_refused_also_after_the_right_prompt_was_seen(bad: str, place: int) -> None:
    chunks, items = TokenChunks(), [str(number) for number in range(6_000)]
    assert parsed(f"[{','.join(items)}]", chunks).tokens == 6_000
    items[place] = bad
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            parsed(f"[{','.join(items)}]", chunks)
        assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize("empty", ["[]", "[ ]", "[\n\n]", f"[{' ' * 3 * CHUNK_BYTES}]"])
def test_an_empty_list_is_rejected_in_any_spelling(empty: str) -> None:
    with pytest.raises(RequestError, match="empty list"):
        parsed(empty, TokenChunks())


def test_blanks_longer_than_a_chunk_are_read_over() -> None:
    text = f"[1,{' ' * 3 * CHUNK_BYTES}2{' ' * CHUNK_BYTES},3]"
    assert TokenChunks().blocks(memoryview(text.encode()), 1, ROOT) == (hash_token_blocks([1, 2, 3], 1, ROOT), 3)


def test_several_prompts_and_texts_full_of_commas_are_what_they_are() -> None:
    chunks, ids = TokenChunks(), list(range(5_000))
    batch = parsed(json.dumps([ids, ids[:10]]), chunks)
    assert (batch.tokens, batch.prompts, batch.hashes) == (5_010, 2, parsed(json.dumps(ids), chunks).hashes)
    texts = parsed(json.dumps(["1,2," * 5_000, "3"]), chunks)
    assert (texts.text_bytes, texts.prompts, texts.tokens) == (20_001, 2, 0)
    for empty, length in ((["", "abc"], 3), (["abc", ""], 3), ([""], 0)):
        texts = parsed(json.dumps(empty), chunks)
        assert (texts.text_bytes, texts.prompts) == (length, len(empty))


def test_a_bound_below_one_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        TokenChunks(0)
