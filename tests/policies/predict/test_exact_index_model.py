"""The exact index against a plain model: several instances, any order of events, lookups after each."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from policies.predict.blocks import hash_token_blocks
from policies.predict.exact_index import PLAIN_ROOT, ExactIndex, StoredBlocks

SIZE = 2
NAMES = ["a", "b", "c"]
# Few different tokens, so that prompts share prefixes and blocks are stored repeatedly.
PROMPTS = st.lists(st.sampled_from([(0, 0), (1, 1), (2, 2)]), min_size=1, max_size=6)
Prefix = tuple[tuple[int, int], ...]


def engine_hash(prefix: Prefix) -> bytes:
    return repr(prefix).encode()


class Engine:
    """Blocks that an engine would hold: copies of every prefix block."""

    def __init__(self) -> None:
        self.copies: Counter[Prefix] = Counter()
        self.trusted = False


class ExactIndexMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.index = ExactIndex(SIZE)
        self.engines = {name: Engine() for name in NAMES}
        for name in NAMES:
            self.index.add_instance(name)
            self.index.follow(name)

    @rule(name=st.sampled_from(NAMES), prompt=PROMPTS, cut=st.integers(0, 5), plain=st.booleans())
    def store(self, name: str, prompt: list[tuple[int, int]], cut: int, plain: bool) -> None:
        """Store the missing part of a prompt from some held prefix on, as engines do; salted ones separately."""
        blocks = tuple(prompt) if plain else ((9, 9), *prompt)
        engine = self.engines[name]
        start = 0
        while start < min(cut, len(blocks) - 1) and engine.copies[blocks[: start + 1]]:
            start += 1
        names = [engine_hash(blocks[: end + 1]) for end in range(start, len(blocks))]
        parent = engine_hash(blocks[:start]) if start else None
        tokens = [token for block in blocks[start:] for token in block]
        self.index.store(name, StoredBlocks(names, parent, tokens, SIZE, len(names) if plain else 0))
        if engine.trusted:
            engine.copies.update(blocks[: end + 1] for end in range(start, len(blocks)))

    @rule(name=st.sampled_from(NAMES), prompt=PROMPTS, plain=st.booleans())
    def remove(self, name: str, prompt: list[tuple[int, int]], plain: bool) -> None:
        blocks = tuple(prompt) if plain else ((9, 9), *prompt)
        self.index.remove(name, [engine_hash(blocks)])
        engine = self.engines[name]
        if engine.copies[blocks]:
            engine.copies[blocks] -= 1

    @rule(name=st.sampled_from(NAMES))
    def clear(self, name: str) -> None:
        self.index.clear(name)
        self.engines[name] = Engine()
        self.engines[name].trusted = True

    @rule(name=st.sampled_from(NAMES), how=st.sampled_from(["distrust", "restarted", "leaves"]))
    def lose(self, name: str, how: str) -> None:
        if how == "distrust":
            self.index.distrust(name, "missed_events")
        elif how == "restarted":
            self.index.restarted(name)
        else:
            self.index.remove_instance(name)
            self.index.add_instance(name)
            self.index.follow(name)
        self.engines[name] = Engine()

    @rule(prompt=PROMPTS)
    def look_up(self, prompt: list[tuple[int, int]]) -> None:
        hashes = hash_token_blocks([token for block in prompt for token in block], SIZE, PLAIN_ROOT)
        expected = {}
        for name, engine in self.engines.items():
            depth = 0
            while depth < len(prompt) and engine.copies[tuple(prompt[: depth + 1])]:
                depth += 1
            expected[name] = depth
        assert self.index.match(hashes) == expected

    @invariant()
    def blocks_and_holders_are_those_of_the_model(self) -> None:
        if not hasattr(self, "engines"):
            return
        plain = set()
        for name, engine in self.engines.items():
            held = {prefix for prefix, count in engine.copies.items() if count}
            assert self.index.blocks(name) == len(held)
            assert self.index.trusted(name) == engine.trusted
            plain |= {prefix for prefix in held if prefix[0] != (9, 9)}
        assert self.index.distinct_blocks == len(plain)


TestExactIndexAgainstModel = ExactIndexMachine.TestCase
TestExactIndexAgainstModel.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
