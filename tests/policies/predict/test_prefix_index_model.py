"""The prefix index compared with a simple, slow model, over any order of operations."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.predict.blocks import hash_token_blocks
from policies.predict.prefix_index import Insertion, PrefixIndex
from policies.predict.prefix_tree import _Node

NAMES = st.sampled_from(["a", "b", "c", "d"])
PROMPTS = st.lists(st.integers(0, 2), max_size=9).map(lambda ids: hash_token_blocks(ids, 1))

ENGINE_BLOCK_TOKENS = 16.0


class _ModelInstance:
    """Blocks in a plain list, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: list[int] = []
        self.touched_by: dict[int, int] = {}
        self.weights: dict[int, float] = {}

    @property
    def weight(self) -> float:
        return sum(self.weights[block] for block in self.blocks)

    def insert(self, hashes: list[int], serial: int, weight: float) -> list[int]:
        new = [block for block in hashes if block not in self.blocks]
        self.touched_by |= dict.fromkeys(hashes, serial)
        self.weights |= dict.fromkeys(hashes, weight)
        kept = [block for block in self.blocks if block not in hashes]
        self.blocks = kept + hashes[::-1]
        self.evict()
        return new

    def evict(self) -> None:
        while self.weight > self.capacity:
            del self.blocks[0]

    def longest(self, hashes: list[int]) -> int:
        return next((depth for depth, block in enumerate(hashes) if block not in self.blocks), len(hashes))


class PrefixIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(capacity_blocks=12)
        self.model: dict[str, _ModelInstance] = {}
        self.insertions: list[Insertion] = []

    @rule(name=NAMES, capacity=st.none() | st.integers(1, 12))
    def add_or_resize(self, name: str, capacity: int | None) -> None:
        self.index.add_instance(name, capacity, ENGINE_BLOCK_TOKENS)
        bound = 12 if capacity is None else capacity
        model = self.model.setdefault(name, _ModelInstance(bound))
        model.capacity = bound
        model.evict()

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.index.remove_instance(name)
        self.model.pop(name, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), hashes=PROMPTS, weight=st.sampled_from([1.0, 1.0, 0.25, 2.5, 16.0]))
    def insert(self, data: st.DataObject, hashes: list[int], weight: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        insertion = self.index.insert(name, hashes, ENGINE_BLOCK_TOKENS * weight)
        self.insertions.append(insertion)
        assert hashes[insertion.held :] == self.model[name].insert(hashes, insertion.serial, weight)

    @precondition(lambda self: self.insertions)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        insertion = data.draw(st.sampled_from(self.insertions))
        self.index.retract(insertion)
        model = self.model.get(insertion.instance)
        if model:
            new = insertion.hashes[insertion.held :]
            mine = {block for block in new if model.touched_by.get(block) == insertion.serial}
            model.blocks = [block for block in model.blocks if block not in mine]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.index.clear_instance(name)
        self.model[name].blocks = []
        self.model[name].touched_by = {}

    @rule(hashes=PROMPTS)
    def match(self, hashes: list[int]) -> None:
        expected = {name: instance.longest(hashes) for name, instance in self.model.items()}
        assert self.index.match(hashes) == expected
        assert {name: self.index.match_one(name, hashes) for name in self.model} == expected

    @rule(hashes=PROMPTS)
    def a_tail_never_outlives_its_head(self, hashes: list[int]) -> None:
        for name, instance in self.model.items():
            held = [block in instance.blocks for block in hashes]
            assert held == sorted(held, reverse=True)
            assert self.index.match_one(name, hashes) == sum(held)

    @invariant()
    def bounds_hold_and_the_blocks_are_those_of_the_model(self) -> None:
        for name, instance in self.model.items():
            assert self.index.blocks(name) == round(instance.weight)
            assert instance.weight <= self.index.capacity(name) == instance.capacity
        distinct = {block for instance in self.model.values() for block in instance.blocks}
        assert self.index.distinct_blocks == len(distinct)

    @invariant()
    def the_trees_hold_what_they_count_in_the_order_of_use(self) -> None:
        for name, instance in self.model.items():
            tree = self.index._trees[name]
            assert [block for node in tree._by_use for block in reversed(node.blocks)] == instance.blocks
            assert (tree.blocks, tree.weight) == (len(instance.blocks), instance.weight)
            assert len(tree._by_use) == _nodes_below(tree._root)


def _nodes_below(node: _Node) -> int:
    for first, child in node.children.items():
        assert child.parent is node
        assert child.blocks[0] == first
        assert child.serial <= node.serial or node.parent is None
    return sum(1 + _nodes_below(child) for child in node.children.values())


TestPrefixIndexAgainstModel = PrefixIndexMachine.TestCase
TestPrefixIndexAgainstModel.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
