"""Which instance holds which prefix blocks, as the engines themselves say in their KV events.

Blocks carry the same chained hashes as in the shadow index (``policies.predict.blocks``), computed here from the token ids in
the event and the parent's entry, so one request is looked up in both with the same ``block_hashes``. The engine's own
hash, whatever it is, only serves to find parents and blocks that go.

An instance is *trusted* while every event since its cache was known to be empty has been applied. The contents of an
instance that is not trusted are dropped: they would be worth nothing before the next time it is known to be empty.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from policies.predict.block_holders import BlockHolders
from policies.predict.blocks import TOKEN_ID_BYTES, hash_byte_blocks, root_hash

EngineHash: TypeAlias = "int | bytes"
"""An engine's own name of a block: opaque here."""

PLAIN_ROOT = root_hash("ids")
"""Start of every chain of a base model's token ids without adapter or cache salt: the blocks KV events can tell."""

_FOREIGN = -1
"""In place of our hash: a block that no plain prompt can match (adapter, cache salt, multimodal)."""


class StoredBlocks(NamedTuple):
    """Blocks that an engine put into its prefix cache, one after the other in one chain."""

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    """The block before the first of ``hashes``; None at the start of a prompt."""
    token_ids: Sequence[int]
    """The tokens of all of them: ``len(hashes) * block_tokens``."""
    block_tokens: int
    plain_blocks: int
    """How many of them, from the first, plain prompts can match; with an adapter none."""


@dataclass(slots=True)
class ExactCounters:
    """What happened to one instance's part of the index since the start."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    foreign: int = 0
    """Blocks of adapters, cache salts or multimodal prompts: kept, but matched by nothing."""
    unknown_parent: int = 0
    unknown_removed: int = 0
    distrusted: int = 0


@dataclass(slots=True)
class _Instance:
    bit: int
    followed: bool = False
    known: bool = False
    suspended: bool = False
    reason: str = "no_events"
    epoch: int = 0
    anew_unconfirmed: bool = False
    ours: dict[EngineHash, int] = field(default_factory=dict)
    further_copies: dict[EngineHash, int] = field(default_factory=dict)
    counters: ExactCounters = field(default_factory=ExactCounters)
    awaited: dict[int, set[int]] = field(default_factory=dict)
    """Block -> numbers of the promises that end with it."""
    gone: set[int] = field(default_factory=set)
    """Of those numbers, the ones whose block was held and is not any more."""

    @property
    def trusted(self) -> bool:
        return self.known and not self.suspended


class ExactIndex:
    """Block hashes to holders, fed by KV events.

    An engine that computes one block twice, for two requests side by side, reports it stored twice and removed once
    per copy; so copies are counted and a block is held until its last copy goes.

    Complexity for b blocks and n instances: ``match`` O(n log b) look-ups (`policies.predict.block_holders` says when more);
    ``store`` O(b) hash calls; ``remove`` O(b). Memory: about 260 bytes per block with the 32-byte hashes of current
    engines, 230 with integers; a further instance that holds the same block adds the part that is its own
    (``docs/kv-events.md`` has the command).
    """

    def __init__(self, block_tokens: int = 16) -> None:
        self.block_tokens = block_tokens
        self._holders = BlockHolders()
        self._instances: dict[str, _Instance] = {}

    # Instances

    def add_instance(self, instance: str) -> None:
        """Make an instance known, not trusted; a known one stays as it is."""
        if instance in self._instances:
            return
        self._instances[instance] = _Instance(self._holders.new_bit())

    def remove_instance(self, instance: str) -> None:
        """Forget an instance and all its blocks; unknown names are ignored."""
        known = self._instances.get(instance)
        if known is not None:
            self._drop(known)
            self._holders.free_bit(known.bit)
            del self._instances[instance]

    def follow(self, instance: str) -> None:
        """Somebody listens to this instance's events now."""
        known = self._instances[instance]
        known.followed = True
        known.reason = "waiting_for_events"

    def set_block_tokens(self, block_tokens: int) -> None:
        """Take over another block size; blocks of the old one mean nothing any more."""
        if block_tokens == self.block_tokens:
            return
        self.block_tokens = block_tokens
        for instance, known in self._instances.items():
            if known.ours:
                self.distrust(instance, "block_size")

    # Trust

    def reset(self, instance: str) -> None:
        """The instance's cache is empty at this point of its events: trusted from here on."""
        known = self._instances[instance]
        self._drop(known)
        known.known, known.reason = True, ""

    def began_anew(self, instance: str) -> None:
        """The instance's events started again from nothing: another process, with an empty cache."""
        self.reset(instance)
        self._instances[instance].anew_unconfirmed = True

    def restarted(self, instance: str) -> None:
        """The instance was seen to have restarted. Not trusted until its events begin again from nothing.

        Where the events told so first, what they have brought since is the new process's and stays.
        """
        known = self._instances[instance]
        if known.anew_unconfirmed:
            known.anew_unconfirmed = False
            return
        if known.followed:
            self._drop(known)
            known.known, known.reason = False, "waiting_for_events"
            known.epoch += 1

    def distrust(self, instance: str, reason: str) -> None:
        """Something was missed or not understood: the contents can no longer be known."""
        known = self._instances[instance]
        self._drop(known)
        known.counters.distrusted += 1
        known.known, known.reason = False, reason

    def suspend(self, instance: str) -> None:
        """Events are missing and are being fetched: not trusted, but what comes is entered."""
        self._instances[instance].suspended = True

    def resume(self, instance: str) -> None:
        """The fetching is over; trusted again unless it was in vain."""
        self._instances[instance].suspended = False

    def follows(self, instance: str) -> bool:
        """Whether somebody listens to the instance's events, trusted or not; False for unknown names."""
        known = self._instances.get(instance)
        return known is not None and known.followed

    def trusted_instances(self) -> frozenset[str]:
        """Names of the instances whose prefix caches are known."""
        # `trusted` written out: this runs for every instance of every request.
        return frozenset([name for name, known in self._instances.items() if known.known and not known.suspended])

    def trusted(self, instance: str) -> bool:
        """Whether the index holds exactly what the instance has reported."""
        return self._instances[instance].trusted

    def reason(self, instance: str) -> str:
        """Why the instance is not trusted; empty while it is."""
        known = self._instances[instance]
        return "replaying" if known.suspended else known.reason

    def epoch(self, instance: str) -> int:
        """Grows by one with every restart that somebody else noticed: the events' numbers start anew."""
        return self._instances[instance].epoch

    # Events

    def store(self, instance: str, stored: StoredBlocks) -> None:
        """Enter blocks. An instance whose earlier blocks are not known takes none.

        Raises:
            ValueError: a token id is out of range, or hashes and token ids do not fit each other.
        """
        known = self._instances[instance]
        if not known.known:
            return
        if stored.block_tokens != self.block_tokens:
            self.distrust(instance, "block_size")
            return
        count = len(stored.hashes)
        if len(stored.token_ids) != count * stored.block_tokens:
            raise ValueError(f"{count} blocks of {stored.block_tokens} tokens with {len(stored.token_ids)} token ids")
        parent = PLAIN_ROOT if stored.parent is None else known.ours.get(stored.parent)
        if parent is None:
            known.counters.unknown_parent += 1
            self.distrust(instance, "unknown_parent")
            return
        plain = 0 if parent == _FOREIGN else max(0, min(stored.plain_blocks, count))
        packed = memoryview(_packed(stored.token_ids[: plain * stored.block_tokens])).cast("B")
        hashes = hash_byte_blocks(packed, stored.block_tokens * TOKEN_ID_BYTES, parent)
        ours, copies = known.ours, known.further_copies
        new: list[tuple[int, int]] = []
        for number, engine_hash in enumerate(stored.hashes):
            if engine_hash in ours:
                copies[engine_hash] = copies.get(engine_hash, 0) + 1
                if ours[engine_hash] == _FOREIGN:
                    plain = min(plain, number)  # what comes after it is no more plain than it is
            elif number < plain:
                ours[engine_hash] = hashes[number]
                new.append((hashes[number], hashes[number - 1] if number else parent))
            else:
                ours[engine_hash] = _FOREIGN
        self._holders.add(new, known.bit)
        known.counters.stored += count
        known.counters.foreign += count - plain

    def remove(self, instance: str, hashes: Sequence[EngineHash]) -> None:
        """One copy of each of these blocks has left the cache."""
        known = self._instances[instance]
        if not known.known:
            return
        copies = known.further_copies
        for engine_hash in hashes:
            further = copies.get(engine_hash, 0)
            if further > 1:
                copies[engine_hash] = further - 1
            elif further:
                del copies[engine_hash]
            else:
                block = known.ours.pop(engine_hash, None)
                if block is None:
                    known.counters.unknown_removed += 1
                elif block != _FOREIGN:
                    self._holders.discard(block, known.bit)
                    if block in known.awaited:
                        known.gone |= known.awaited[block]
        known.counters.removed += len(hashes)

    def clear(self, instance: str) -> None:
        """The engine emptied its cache: whatever was missed before does not matter any more."""
        self.reset(instance)
        self._instances[instance].counters.cleared += 1

    # Promises

    def await_block(self, instance: str, block: int, number: int) -> None:
        """Remember whether ``block`` was told of from now on, for promise ``number``: it may be evicted again soon."""
        self._instances[instance].awaited.setdefault(block, set()).add(number)

    def forget_promise(self, instance: str, block: int, number: int) -> None:
        """Nobody asks about promise ``number`` any more. Unknown ones are ignored."""
        known = self._instances.get(instance)
        if known is None or block not in known.awaited:
            return
        known.awaited[block].discard(number)
        known.gone.discard(number)
        if not known.awaited[block]:
            del known.awaited[block]

    def told_of(self, instance: str, block: int, number: int) -> bool:
        """Whether the block that promise ``number`` ends with is held, or was and is gone again."""
        return number in self._instances[instance].gone or self.holds(instance, block)

    # Reading

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Longest held prefix of every instance, in blocks. Whether to believe it, ``trusted`` says."""
        return self._holders.match(hashes, {instance: known.bit for instance, known in self._instances.items()})

    def holds(self, instance: str, block: int) -> bool:
        """Whether the instance holds one block."""
        return self._holders.holds(block, self._instances[instance].bit)

    def blocks(self, instance: str) -> int:
        """Distinct blocks of one instance, foreign ones included."""
        return len(self._instances[instance].ours)

    def counters(self, instance: str) -> ExactCounters:
        """What happened since the start."""
        return self._instances[instance].counters

    @property
    def distinct_blocks(self) -> int:
        """Distinct blocks over all instances, foreign ones not counted."""
        return len(self._holders)

    # Inside

    def _drop(self, known: _Instance) -> None:
        self._holders.clear((block for block in known.ours.values() if block != _FOREIGN), known.bit)
        known.ours = {}
        known.further_copies = {}
        for numbers in known.awaited.values():
            known.gone |= numbers


def _packed(token_ids: Sequence[int]) -> array[int]:
    try:
        return array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from error
