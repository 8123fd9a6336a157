"""Conversations without an id, recognised by their prompts: a turn begins with the whole prompt of the turn before."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

import numpy as np
from xxhash import xxh3_64_intdigest

from proxy.sessions.kept_turn import TurnText

PREFIX_SOURCE = "prefix"
_CLOSING, _COMMA = ord("}"), ord(",")
_MAX_OBJECTS = 256
_SEARCHED_BYTES = 256 * 1024
"""Objects and bytes looked at in one prompt, from its end: the messages of one turn, and the objects in them."""
_WINDOW_BYTES = 16 * 1024
_BLANK = b" \t\r\n"


class PrefixChains:
    """Ends of the last prompts of conversations -> their ids, least recently used first out: 350 bytes each.

    A conversation is known by the hash of its last whole prompt, not of a common beginning: a shared system prompt
    makes no two conversations one. The first of two continuations of a prompt keeps the id, the other gets a new one.

    Complexity of ``session_of``: O(n) in the bytes added since the last turn, 256 KiB at most: 0.2 ms for those.
    """

    def __init__(self, capacity: int) -> None:
        """At most ``capacity`` conversations; 0: none."""
        self._capacity = capacity
        self._ids: OrderedDict[int, str] = OrderedDict()
        # Sessions of an earlier process may be restored from a snapshot.
        self._process = secrets.token_hex(4)
        self._begun = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def enabled(self) -> bool:
        """False if the capacity is 0."""
        return self._capacity > 0

    def set_capacity(self, capacity: int) -> None:
        """Another bound, effective from the next conversation on; 0 forgets all."""
        self._capacity = capacity
        if not capacity:
            self._ids.clear()

    def session_of(self, turn: TurnText) -> str | None:
        """Id of the conversation that a prompt continues, or of a new one; None for prompts of less than one block."""
        keys = _keys(turn)
        own = next(keys, None)
        if own is None or not self._capacity:
            return None
        known = self._ids.get(own)
        if known is not None:  # the same prompt again
            self._ids.move_to_end(own)
            return known
        for key in keys:
            known = self._ids.pop(key, None)
            if known is not None:
                break
        else:
            self._begun += 1
            known = f"{PREFIX_SOURCE}-{self._process}-{self._begun}"
        self._ids[own] = known
        while len(self._ids) > self._capacity:
            self._ids.popitem(last=False)
        return known

    def known(self, turn: TurnText) -> str | None:
        """Id of the conversation that a prompt continues, if it is known; nothing is changed."""
        return next((self._ids[key] for key in _keys(turn) if key in self._ids), None)


def _keys(turn: TurnText) -> Iterator[int]:
    """Hash of the whole text, then of the text up to the end of each object in it, longest first."""
    text, end, block = turn.text, len(turn.text), turn.block_bytes
    while end and text[end - 1] in _BLANK:  # between the last message and the closing bracket
        end -= 1
    for at in islice(_ends(text, end, max(block, end - _SEARCHED_BYTES)), _MAX_OBJECTS):
        blocks = min(at // block, len(turn.hashes))
        if blocks:
            yield xxh3_64_intdigest(text[blocks * block : at], turn.hashes[blocks - 1])


def _ends(text: memoryview, end: int, first: int) -> Iterator[int]:
    """Ends of the whole text and of the objects in it that another value follows, from the end back to ``first``."""
    if end >= first:
        yield end
    while end > first:
        begin = max(first, end - _WINDOW_BYTES)
        chars = np.frombuffer(text[begin : end + 1], np.uint8)
        closed = np.flatnonzero((chars[:-1] == _CLOSING) & (chars[1:] == _COMMA))
        yield from (closed[::-1] + (begin + 1)).tolist()
        end = begin
