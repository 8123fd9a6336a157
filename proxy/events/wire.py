"""Wire format of vLLM's KV events: MessagePack arrays, decoded leniently.

A batch is ``[timestamp, [event, ...], data-parallel rank]``; an event is an array that begins with its kind. Versions
append different trailing fields, which may be missing, null, or unknown here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from policies.predict.exact_index import EngineHash, StoredBlocks

_ON_DEVICE = {None, "GPU", "gpu"}


class MalformedEventError(ValueError):
    """A message is not a batch of KV events."""


class Stored(msgspec.Struct, frozen=True):
    """Blocks that were stored on the device."""

    blocks: StoredBlocks
    group: int = 0
    """KV cache group; more than one means that a block of tokens occupies several blocks of memory."""


class Removed(msgspec.Struct, frozen=True):
    """Blocks that left the device."""

    hashes: list[EngineHash]
    group: int = 0


class Cleared(msgspec.Struct, frozen=True):
    """The prefix cache was emptied."""


class Unreadable(msgspec.Struct, frozen=True):
    """An undecodable event of a readable batch; the other events are valid."""

    why: str


class Elsewhere(msgspec.Struct, frozen=True):
    """An event about a medium other than device memory, or of an unknown kind."""


Event = Stored | Removed | Cleared | Unreadable | Elsewhere


class _BlockStored(msgspec.Struct, array_like=True, gc=False, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    group_idx: Any = None


class _BlockRemoved(msgspec.Struct, array_like=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: Any = None


class _AllBlocksCleared(msgspec.Struct, array_like=True, gc=False, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_batch = msgspec.msgpack.Decoder(_Batch)
_event = msgspec.msgpack.Decoder(_BlockStored | _BlockRemoved | _AllBlocksCleared)
_any_event = msgspec.msgpack.Decoder(list[Any])
_KNOWN = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def read_batch(payload: bytes) -> list[msgspec.Raw]:
    """Events of one message, not decoded yet.

    Raises:
        MalformedEventError: not a batch.
    """
    try:
        return _batch.decode(payload).events
    except msgspec.MsgspecError as error:
        raise MalformedEventError(str(error)) from error


def read_event(raw: msgspec.Raw) -> Event:
    """Decode one event. Never raises: an undecodable event is returned as ``Unreadable``."""
    try:
        event = _event.decode(raw)
    except msgspec.MsgspecError as error:
        return _unknown_or_unreadable(raw, error)
    if isinstance(event, _AllBlocksCleared):
        return Cleared()
    if event.medium not in _ON_DEVICE:
        return Elsewhere()
    group = event.group_idx if isinstance(event.group_idx, int) else 0
    if isinstance(event, _BlockRemoved):
        return Removed(event.block_hashes, group)
    count = len(event.block_hashes)
    if event.block_size < 1 or len(event.token_ids) != count * event.block_size:
        return Unreadable(f"{count} blocks of {event.block_size} tokens with {len(event.token_ids)} token ids")
    adapter = event.lora_id is not None or event.lora_name is not None
    plain = 0 if adapter else _plain_blocks(event.extra_keys, count)
    blocks = StoredBlocks(event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, plain)
    return Stored(blocks, group)


def in_slices(blocks: StoredBlocks, most: int) -> Iterator[StoredBlocks]:
    """Yield the same blocks in pieces of at most ``most``, each the child of the previous one."""
    parent = blocks.parent
    size = blocks.block_tokens
    for start in range(0, len(blocks.hashes), most):
        hashes = blocks.hashes[start : start + most]
        tokens = blocks.token_ids[start * size : (start + most) * size]
        yield StoredBlocks(hashes, parent, tokens, size, blocks.plain_blocks - start)
        parent = hashes[-1]


def _plain_blocks(extra_keys: Any, count: int) -> int:
    """Number of leading blocks without an extra key; a list has one entry per block."""
    if not extra_keys:
        return count
    if not isinstance(extra_keys, list):
        return 0
    return next((number for number, keys in enumerate(extra_keys[:count]) if keys), count)


def _unknown_or_unreadable(raw: msgspec.Raw, error: msgspec.MsgspecError) -> Event:
    try:
        fields = _any_event.decode(raw)
    except msgspec.MsgspecError:
        return Unreadable(str(error))
    known = not fields or not isinstance(fields[0], str) or fields[0] in _KNOWN
    return Unreadable(str(error)) if known else Elsewhere()
