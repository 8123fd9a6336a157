"""One turn of a conversation as it is kept for comparison with the next: hashes and samples, not the prompt.

A turn repeats the one before it, and adds to it. Where it does not, the engine's cached prefix ends. Two turns that
part belong together if half of what follows is found again; otherwise the client has begun, edited or summarised
something.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

SAMPLE_BYTES = 2048
"""Bytes kept of the beginning, and around the last parting."""
MAX_BLOCKS = 1024
"""Blocks compared: 1 MiB of text at 1 KiB each. With both samples and the anchors a turn takes 15 KB at most, and 7 KB
for 100 KB of text.
"""
_ANCHORS, _ANCHOR_BYTES = 16, 48
_PROBES = 2
NEAR_BYTES = 8 * 1024
FAR_BYTES = 128 * 1024
"""Bytes by which the rest of a history may have moved: by a change in place, and because its beginning was dropped."""
_MAX_TOOLS = 1024

_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


class TurnText(NamedTuple):
    """A conversation as the client wrote it: the text that its blocks were hashed over."""

    scope: tuple[str, ...]
    """Model and cache salt, prompts of others share no blocks; then the form, of messages and responses."""
    text: memoryview
    hashes: Sequence[int]
    """Chained hash of every full block; the chain begins with the scope and the tools."""
    block_bytes: int
    tools: memoryview
    lead: int = 0
    """Bytes of the text before the first message: system prompt or instructions."""
    not_read: int = 0
    """Bytes of the conversation that the text leaves out."""
    lead_hash: int = 0
    """Hash of scope, tools and lead, of responses only."""
    prompt: Sequence[int] = ()
    """Chained hashes of the whole prompt, of responses only; it begins with those of the stored one it continues."""
    continues: bool = False
    """The engine puts a stored conversation between the lead, which is all of the text, and the new input."""


class KeptTurn(NamedTuple):
    """The part of a turn that is kept."""

    scope: tuple[str, ...]
    hashes: array[int]
    block_bytes: int
    length: int
    """Bytes of its conversation."""
    head: bytes
    window: bytes
    window_at: int
    """Position in bytes at which ``window`` begins."""
    anchors: tuple[tuple[int, bytes], ...]
    """Pieces at regular positions, by which the text is found again after a change."""
    tools: tuple[int, ...]
    """Hash of each tool's definition, in order."""
    prompt_tokens: int
    lead: int = 0
    lead_hash: int = 0
    chain: tuple[int, int] = (0, 0)
    """Number of the whole prompt's blocks that a response continuing it begins with, and the hash of the last."""

    def sample_at(self, position: int) -> tuple[int, bytes]:
        """The sample that covers a position in bytes, and where it begins; empty if none does."""
        for at, sample in ((0, self.head), (self.window_at, self.window)):
            if at <= position < at + len(sample):
                return at, sample
        return 0, b""


class Parting(NamedTuple):
    """The place at which a turn stops repeating the one before it, although it has the rest of the history."""

    position: int
    """First byte that differs; its block's first byte if the earlier bytes were not kept."""
    exact: bool
    was: bytes
    """Kept bytes of the earlier turn around the position; empty if they were not kept."""
    was_at: int
    """Position of the parting within ``was``."""
    found: float
    """Share of the pieces of the earlier turn after the position that the later one has."""
    shift: int
    """Bytes by which the history after the position has moved; negative if some of it is gone."""
    same_tools: bool
    """False: definitions or order of the tools have changed. They come before every message."""
    reordered: bool = False
    """True if only the tools' order has changed."""


def keep(
    turn: TurnText,
    prompt_tokens: int,
    window_at: int = SAMPLE_BYTES,
    tools: tuple[int, ...] | None = None,
    earlier_bytes: int = 0,
) -> KeptTurn:
    """The part of a turn that is kept.

    Args:
        turn: the turn.
        prompt_tokens: tokens of its prompt.
        window_at: begin of the window.
        tools: hashes of its tools, if known.
        earlier_bytes: bytes of the stored conversation that it continues.
    """
    text = turn.text
    last = min(len(text), MAX_BLOCKS * turn.block_bytes) - _ANCHOR_BYTES
    step = max(1, last // (_ANCHORS - 1))
    return KeptTurn(
        turn.scope,
        array("Q", turn.hashes[:MAX_BLOCKS]),
        turn.block_bytes,
        len(text) + turn.not_read + earlier_bytes,
        bytes(text[:SAMPLE_BYTES]),
        bytes(text[window_at : window_at + SAMPLE_BYTES]),
        window_at,
        tuple([(at, bytes(text[at : at + _ANCHOR_BYTES])) for at in range(0, last + 1, step)]),
        tools_of(turn.tools) if tools is None else tools,
        prompt_tokens,
        turn.lead,
        turn.lead_hash,
        _chain_end(turn.prompt),
    )


def _chain_end(prompt: Sequence[int]) -> tuple[int, int]:
    count = min(len(prompt), MAX_BLOCKS)  # as many as are kept of a stored response
    return (count, prompt[count - 1]) if count else (0, 0)


def tools_of(raw: memoryview) -> tuple[int, ...]:
    """Hash of each definition in a JSON list of tools; of anything else, one hash of the whole."""
    if not len(raw):
        return ()
    try:
        tools = _decode_items(raw)
    except (msgspec.DecodeError, RecursionError):
        tools = []
    if not 0 < len(tools) <= _MAX_TOOLS:
        return (xxh3_64_intdigest(raw),)
    return tuple([xxh3_64_intdigest(tool) for tool in tools])


def common_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading blocks that two chains share. O(log n), since equal hashes mean equal prefixes."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def extends(kept: KeptTurn, turn: TurnText) -> bool:
    """True if the turn repeats all full blocks of the kept one; a kept turn without any is not recognised."""
    count = len(kept.hashes)
    return (
        0 < count <= len(turn.hashes) and kept.scope == turn.scope and turn.hashes[count - 1] == kept.hashes[count - 1]
    )


def precedes(kept: KeptTurn, turn: TurnText) -> bool:
    """True if a response continues the stored prompt of the kept turn, or a later one of that conversation."""
    count, last = kept.chain
    return 0 < count <= len(turn.prompt) and turn.prompt[count - 1] == last and kept.scope[:2] == turn.scope[:2]


def lead_parting(kept: KeptTurn, turn: TurnText) -> Parting | None:
    """Compare instructions and tools of a response with those of the one that it continues; None if they are equal.

    The engine puts them before the stored conversation, all of which the later prompt repeats.
    """
    if kept.lead_hash == turn.lead_hash:
        return None
    tools = tools_of(turn.tools)
    if tools != kept.tools:
        return Parting(0, True, b"", 0, 1.0, 0, False, sorted(tools) == sorted(kept.tools))
    begin = common_blocks(kept.hashes, turn.hashes) * kept.block_bytes
    position, exact = _first_difference(kept, examined(turn), begin)
    at, sample = kept.sample_at(position) if exact else (0, b"")
    return Parting(position, exact, sample, position - at if sample else 0, 1.0, 0, True)


def parting(
    kept: KeptTurn, turn: TurnText, text: bytes, tools: tuple[int, ...], reach: int = NEAR_BYTES
) -> Parting | None:
    """Compare a turn with the kept one; None if it does not continue that one's conversation.

    Args:
        kept: the earlier turn, which this one does not extend.
        turn: the later one.
        text: the examined part of its text.
        tools: hashes of its tools.
        reach: bytes by which the rest of the history may have moved.
    """
    if kept.scope != turn.scope or 2 * len(text) < len(kept.hashes) * kept.block_bytes:
        return None
    same_tools = tools == kept.tools
    if same_tools:
        begin = common_blocks(kept.hashes, turn.hashes) * kept.block_bytes
        position, exact = _first_difference(kept, text, begin)
    else:
        begin = position = 0
        exact = True
    sought = [anchor for anchor in kept.anchors if anchor[0] >= position]
    shifts = _shifts(sought, text, reach)
    if not shifts:
        return None
    at, sample = kept.sample_at(position) if exact and same_tools else (0, b"")
    reordered = not same_tools and sorted(tools) == sorted(kept.tools)
    share = len(shifts) / len(sought)
    shift = median_low(shifts)
    return Parting(position, exact, sample, position - at if sample else 0, share, shift, same_tools, reordered)


def examined(turn: TurnText) -> bytes:
    """The part of a turn's text that is compared."""
    return bytes(turn.text[: MAX_BLOCKS * turn.block_bytes])


def _shifts(anchors: list[tuple[int, bytes]], text: bytes, reach: int) -> list[int]:
    """Distances by which the anchors found have moved; empty unless at least half of them are found."""
    # The end of a history is what a continued one surely has. A search that fails takes up to 5 us per KB.
    probes = [now - at for at, anchor in anchors[-_PROBES:] if (now := _find(text, anchor, at, reach)) >= 0]
    if not probes:
        return []
    shifts: list[int] = []
    missing, shift = 0, probes[-1]
    for at, anchor in anchors:
        near = max(0, at + shift)
        now = near if text.startswith(anchor, near) else _find(text, anchor, at, reach)
        if now >= 0:
            shift = now - at
            shifts.append(shift)
        else:
            missing += 1
            if 2 * missing > len(anchors):
                return []
    return shifts


def _find(text: bytes, anchor: bytes, at: int, reach: int) -> int:
    return text.find(anchor, max(0, at - reach), at + reach)


def _first_difference(kept: KeptTurn, text: bytes, begin: int) -> tuple[int, bool]:
    """Position of the first byte that differs in the block at ``begin``, and True if it is known."""
    end = begin + kept.block_bytes
    position = begin
    while position < end:
        at, sample = kept.sample_at(position)
        if not sample:
            return begin, False
        until = min(end, at + len(sample))
        was, now = sample[position - at : until - at], text[position:until]
        if was != now:
            return position + _common_bytes(was, now), True
        position = until
    return begin, False


def _common_bytes(one: bytes, other: bytes) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
