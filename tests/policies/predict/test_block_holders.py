"""Holders of blocks that may be dropped in any order, compared with sets of prefixes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from policies.predict.block_holders import BlockHolders
from policies.predict.blocks import hash_token_blocks

ROOT = 0
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
NAMES = st.sampled_from(["a", "b", "c"])


def chain(ids: list[int]) -> list[int]:
    return hash_token_blocks(ids, 1, ROOT)


def pairs(hashes: list[int], start: int = 0) -> list[tuple[int, int]]:
    return list(zip(hashes, [ROOT, *hashes], strict=False))[start:]


class BlockHoldersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.holders = BlockHolders()
        self.bits = {name: self.holders.new_bit() for name in ("a", "b", "c")}
        self.held: dict[str, set[int]] = {name: set() for name in self.bits}

    @rule(name=NAMES, ids=PROMPTS)
    def add_what_is_missing_behind_the_longest_held_prefix(self, name: str, ids: list[int]) -> None:
        hashes = chain(ids)
        start = next((n for n, block in enumerate(hashes) if block not in self.held[name]), len(hashes))
        self.holders.add(pairs(hashes, start), self.bits[name])
        self.held[name] |= set(hashes)

    @rule(name=NAMES, ids=PROMPTS)
    def discard_any_block(self, name: str, ids: list[int]) -> None:
        block = chain(ids)[-1]
        self.holders.discard(block, self.bits[name])
        self.held[name].discard(block)

    @rule(name=NAMES)
    def clear(self, name: str) -> None:
        self.holders.clear(sorted(self.held[name]), self.bits[name])
        self.held[name].clear()

    @rule(name=NAMES)
    def leave_and_come_back(self, name: str) -> None:
        self.clear(name)
        self.holders.free_bit(self.bits[name])
        self.bits[name] = self.holders.new_bit()

    @rule(ids=PROMPTS)
    def match(self, ids: list[int]) -> None:
        hashes = chain(ids)
        expected = {
            name: next((n for n, block in enumerate(hashes) if block not in held), len(hashes))
            for name, held in self.held.items()
        }
        assert self.holders.match(hashes, self.bits) == expected

    @invariant()
    def nothing_is_kept_beyond_what_is_held_and_its_gaps(self) -> None:
        everything = set().union(*self.held.values())
        assert len(self.holders) == len(everything)
        gaps = self.holders._gaps
        assert set(self.holders._before) == everything | set(gaps)
        assert all(gaps.values())
        assert sorted(self.holders._chains) == [1, 2, 4]
        for name, bit in self.bits.items():
            mine = {block for block, bits in gaps.items() if bits & bit}
            assert not mine & self.held[name]
            assert self.holders._chains[bit].ends <= self.held[name]
            closed = mine | self.held[name]
            assert all(self.holders._before[block] in closed | {ROOT} for block in closed)


TestBlockHoldersAgainstModel = BlockHoldersMachine.TestCase
TestBlockHoldersAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class _CountingHashes(list[int]):
    reads = 0

    def __getitem__(self, key: Any) -> Any:
        self.reads += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("gap", [False, True])
def test_a_match_reads_logarithmically_many_blocks_even_with_gaps_elsewhere(gap: bool) -> None:
    holders = BlockHolders()
    bits = {f"i{n}": holders.new_bit() for n in range(8)}
    blocks, other = chain(list(range(8_000))), chain([9, 9, 9])
    for n, bit in enumerate(bits.values()):
        holders.add(pairs(blocks[: 8_000 - 100 * n]), bit)
        holders.add(pairs(other), bit)
        if gap:
            holders.discard(other[1], bit)
    prompt = _CountingHashes(blocks)
    assert holders.match(prompt, bits) == {f"i{n}": 8_000 - 100 * n for n in range(8)}
    assert prompt.reads <= 1 + 8 * 13
    assert holders.match(other, bits) == dict.fromkeys(bits, 1 if gap else 3)
