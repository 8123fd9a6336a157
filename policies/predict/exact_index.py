"""Exact prefix index: blocks per instance as the engines report them in their KV events.

Blocks carry the same chained hashes as in the shadow index (``policies.predict.blocks``), computed here from the token
ids in the event and the parent's entry, so one request is looked up in both with the same ``block_hashes``. The
engine's own hash only serves to find parents and removed blocks.

An instance is *trusted* while every event since its cache was known to be empty has been applied. The contents of an
untrusted instance are dropped: they are unusable until the next time its cache is known to be empty.

An instance is *partial*, and trusted as a lower bound, while every event since some later point has been applied: what
it stored before is not known, but every block in the index is held.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from policies.predict.block_holders import BlockHolders
from policies.predict.blocks import TOKEN_ID_BYTES, hash_byte_blocks, root_hash
from policies.predict.engine_hashes import EngineHashes

EngineHash: TypeAlias = "int | bytes"
"""An engine's own identifier of a block: opaque here."""

PLAIN_ROOT = root_hash("ids")
"""``plain_root`` of seed 0."""

_FOREIGN = -1
"""Placeholder for our hash: a block that no prompt can match (adapter, cache salt, multimodal, unknown prefix)."""


def plain_root(seed: int) -> int:
    """Root of the chains of a base model's token ids without adapter or cache salt: all that KV events can match."""
    return root_hash("ids", seed=seed)


class StoredBlocks(NamedTuple):
    """Consecutive blocks of one chain that an engine stored in its prefix cache."""

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    """The block before the first of ``hashes``; None at the start of a prompt."""
    token_ids: Sequence[int]
    """Token ids of all blocks: ``len(hashes) * block_tokens``."""
    block_tokens: int
    plain_blocks: int
    """Number of leading blocks that plain prompts can match; 0 with an adapter."""


@dataclass(slots=True)
class ExactCounters:
    """Event counts of one instance since the start."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    foreign: int = 0
    """Blocks of adapters, cache salts or multimodal prompts: kept, but never matched."""
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
    restart_unconfirmed: bool = False
    ours: dict[EngineHash, int] = field(default_factory=dict)
    further_copies: dict[EngineHash, int] = field(default_factory=dict)
    counters: ExactCounters = field(default_factory=ExactCounters)
    awaited: dict[int, set[int]] = field(default_factory=dict)
    """Block -> numbers of the promises that end with it."""
    gone: set[int] = field(default_factory=set)
    """Those of the numbers whose block was held and has been removed."""

    @property
    def trusted(self) -> bool:
        return self.known and not self.suspended


class ExactIndex:
    """Block hashes to holders, fed by KV events.

    An engine that computes one block twice, for two concurrent requests, reports it stored twice and removed once per
    copy; copies are therefore counted and a block is held until its last copy is removed.

    Complexity for b blocks and n instances: ``match`` O(n log b) look-ups (more with gaps:
    `policies.predict.block_holders`); ``store`` O(b) hash calls; ``remove`` O(b). Memory: about 260 bytes per block
    with the 32-byte hashes of current engines, 230 with integers; a further instance with the same block adds only its
    own entries (measured by the command in ``docs/kv-events.md``).
    """

    def __init__(self, block_tokens: int = 16, seed: int = 0) -> None:
        self.block_tokens = block_tokens
        self._root = plain_root(seed)
        self._holders = BlockHolders()
        self._instances: dict[str, _Instance] = {}
        self.partial_instances: frozenset[str] = frozenset()
        """Names of the instances whose contents are a lower bound while trusted."""
        self.engine_hashes = EngineHashes()

    # Instances

    def add_instance(self, instance: str) -> None:
        """Register an instance, untrusted. Idempotent."""
        if instance in self._instances:
            return
        self._instances[instance] = _Instance(self._holders.new_bit())

    def remove_instance(self, instance: str) -> None:
        """Forget an instance and all its blocks; unknown names are ignored."""
        known = self._instances.get(instance)
        if known is not None:
            self._drop(instance)
            self._holders.free_bit(known.bit)
            del self._instances[instance]

    def follow(self, instance: str) -> None:
        """Mark the instance's events as followed by a subscriber."""
        known = self._instances[instance]
        known.followed = True
        known.reason = "waiting_for_events"

    def set_block_tokens(self, block_tokens: int) -> None:
        """Set the block size in tokens; contents with another block size are dropped."""
        if block_tokens == self.block_tokens:
            return
        self.block_tokens = block_tokens
        for instance, known in self._instances.items():
            if known.ours:
                self.distrust(instance, "block_size")

    def set_seed(self, seed: int) -> None:
        """Set the seed of the hashes, before anything is stored."""
        if len(self._holders):
            raise ValueError("the seed cannot change once blocks are stored")
        self._root = plain_root(seed)

    # Trust

    def reset(self, instance: str) -> None:
        """The instance's cache is empty at this point of its events: trusted from here on."""
        known = self._instances[instance]
        self._drop(instance)
        known.known, known.reason = True, ""

    def reset_partial(self, instance: str) -> None:
        """Every event from this point on will be applied, but the cache has unknown contents: trusted as a lower bound.

        Each block's count of copies stays at most the engine's own, since an event changes both alike, except that a
        removal of an unknown copy changes only the engine's.
        """
        self.reset(instance)
        self.partial_instances |= {instance}

    def events_restarted(self, instance: str) -> None:
        """The instance's events restarted at number 0: a new process with an empty cache."""
        self.reset(instance)
        self._instances[instance].restart_unconfirmed = True

    def restarted(self, instance: str) -> None:
        """The health monitor found that the instance restarted. Untrusted until its events restart at number 0.

        If the events have reported the restart first, what they brought since belongs to the new process and is kept.
        """
        known = self._instances[instance]
        if known.restart_unconfirmed:
            known.restart_unconfirmed = False
            return
        if known.followed:
            self._drop(instance)
            known.known, known.reason = False, "waiting_for_events"
            known.epoch += 1

    def distrust(self, instance: str, reason: str) -> None:
        """Drop the contents of an instance: an event was missed or could not be read."""
        known = self._instances[instance]
        self._drop(instance)
        known.counters.distrusted += 1
        known.known, known.reason = False, reason

    def suspend(self, instance: str) -> None:
        """Mark events as missing and being fetched: untrusted, but further events are applied."""
        self._instances[instance].suspended = True

    def resume(self, instance: str) -> None:
        """End ``suspend``: trusted again unless ``distrust`` was called meanwhile."""
        self._instances[instance].suspended = False

    def follows(self, instance: str) -> bool:
        """True if the instance's events are followed, trusted or not; False for unknown names."""
        known = self._instances.get(instance)
        return known is not None and known.followed

    def trusted_instances(self) -> frozenset[str]:
        """Names of the trusted instances."""
        # `trusted` inlined: this runs for every instance of every request.
        return frozenset([name for name, known in self._instances.items() if known.known and not known.suspended])

    def trusted(self, instance: str) -> bool:
        """True if the index holds exactly the blocks that the instance has reported."""
        return self._instances[instance].trusted

    def reason(self, instance: str) -> str:
        """Reason for not being trusted; empty while trusted."""
        known = self._instances[instance]
        return "replaying" if known.suspended else known.reason

    def epoch(self, instance: str) -> int:
        """Number of restarts found by the health monitor: with each, the events' numbers start at 0 again."""
        return self._instances[instance].epoch

    # Events

    def store(self, instance: str, stored: StoredBlocks) -> None:
        """Add stored blocks; ignored while the instance's earlier blocks are not known.

        Raises:
            ValueError: a token id is out of range, or the number of token ids does not match the number of hashes.
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
        parent = self._root if stored.parent is None else known.ours.get(stored.parent)
        if parent is None:
            known.counters.unknown_parent += 1
            if instance not in self.partial_instances:
                self.distrust(instance, "unknown_parent")
                return
            parent = _FOREIGN  # its tokens are not known, so neither is our hash
        plain = 0 if parent == _FOREIGN else max(0, min(stored.plain_blocks, count))
        packed = memoryview(_packed(stored.token_ids[: plain * stored.block_tokens])).cast("B")
        hashes = hash_byte_blocks(packed, stored.block_tokens * TOKEN_ID_BYTES, parent)
        if stored.parent is None and hashes:
            self.engine_hashes.note(instance, hashes[0], stored.hashes[0])
        ours, copies = known.ours, known.further_copies
        new: list[tuple[int, int]] = []
        for number, engine_hash in enumerate(stored.hashes):
            if engine_hash in ours:
                copies[engine_hash] = copies.get(engine_hash, 0) + 1
                if ours[engine_hash] == _FOREIGN:
                    plain = min(plain, number)  # blocks after a foreign block are foreign as well
            elif number < plain:
                ours[engine_hash] = hashes[number]
                new.append((hashes[number], hashes[number - 1] if number else parent))
            else:
                ours[engine_hash] = _FOREIGN
        self._holders.add(new, known.bit)
        known.counters.stored += count
        known.counters.foreign += count - plain

    def remove(self, instance: str, hashes: Sequence[EngineHash]) -> None:
        """Remove one copy of each of these blocks."""
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
        """The engine cleared its cache: events missed before no longer matter."""
        self.reset(instance)
        self._instances[instance].counters.cleared += 1

    # Promises

    def await_block(self, instance: str, block: int, number: int) -> None:
        """Record from now on if ``block`` is reported, for promise ``number``: it may be evicted again soon after."""
        self._instances[instance].awaited.setdefault(block, set()).add(number)

    def forget_promise(self, instance: str, block: int, number: int) -> None:
        """Drop promise ``number``. Unknown ones are ignored."""
        known = self._instances.get(instance)
        if known is None or block not in known.awaited:
            return
        known.awaited[block].discard(number)
        known.gone.discard(number)
        if not known.awaited[block]:
            del known.awaited[block]

    def was_reported(self, instance: str, block: int, number: int) -> bool:
        """True if the last block of promise ``number`` is held, or was reported and removed since."""
        return number in self._instances[instance].gone or self.holds(instance, block)

    # Reading

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Longest held prefix of every instance, in blocks. Only valid for ``trusted`` instances."""
        return self._holders.match(hashes, {instance: known.bit for instance, known in self._instances.items()})

    def holds(self, instance: str, block: int) -> bool:
        """True if the instance holds the block."""
        return self._holders.holds(block, self._instances[instance].bit)

    def blocks(self, instance: str) -> int:
        """Number of distinct blocks of one instance, foreign ones included."""
        return len(self._instances[instance].ours)

    def counters(self, instance: str) -> ExactCounters:
        """Event counts since the start."""
        return self._instances[instance].counters

    @property
    def distinct_blocks(self) -> int:
        """Number of distinct blocks over all instances, without foreign ones."""
        return len(self._holders)

    # Inside

    def _drop(self, instance: str) -> None:
        known = self._instances[instance]
        self.partial_instances -= {instance}
        self.engine_hashes.forget(instance)
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
