"""Tokenizer with a cache of text pieces: for a growing prompt only the new end is tokenized.

A text is cut into pieces at places where no tokenizer joins left and right side; each piece is tokenized by itself and
cached. Such cuts are before a special token (text is split at those before anything else), and between a line feed and
a letter, where pre-tokenizers always split. The line feed must follow a visible character: the split of a longer run of
white space depends on what follows it. The valid cuts are determined by trials on the tokenizer when it is loaded;
without any, texts are tokenized as a whole.
"""

from __future__ import annotations

import random
import re
import string
import threading
from array import array
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE_CHARS = 2048
"""Pieces end at the first cut after this many characters."""

_ENTRY_BYTES = 250
_TRIALS = 300


class TokenizerError(ValueError):
    """The tokenizer cannot be used; the message gives the reason."""


class Encoder:
    """One ``tokenizer.json``. Thread-safe.

    The library releases the interpreter's lock in ``encode_batch_fast``, but not in ``encode``: that would stop the
    event loop for as long as it takes to tokenize a text without cuts.
    """

    def __init__(self, tokenizer: Tokenizer, cache_bytes: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._before, self._after = self._special_ends()
        self._specials = [token for token in self._separate_tokens() if self._splits_before(token)]
        self._cuts_lines = self._splits_lines()
        pattern = "|".join(re.escape(token) for token in sorted(self._specials, key=len, reverse=True))
        lines = r"(?<=[!-~]\n)(?=[A-Za-z])" if self._cuts_lines else ""
        joined = "|".join(part for part in (pattern, lines) if part)
        self._cut = re.compile(joined) if joined else None
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[tuple[bool, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.cached_bytes = 0
        self.hits = 0
        self.misses = 0

    @classmethod
    def load(cls, path: Path, cache_bytes: int) -> Encoder:
        """Load a ``tokenizer.json``, given its path or folder.

        Raises:
            TokenizerError: there is none, or it cannot be read.
            ModuleNotFoundError: the package tokenizers (extra ``tokenizer``) is not installed.
        """
        from tokenizers import Tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise TokenizerError(f"no tokenizer.json at {file}")
        try:
            return cls(Tokenizer.from_file(str(file)), cache_bytes)
        except Exception as error:  # the library raises bare exceptions for unreadable files
            raise TokenizerError(f"{file} cannot be read: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Token ids of ``text``, identical to tokenizing the whole text at once."""
        if self._before is None or self._after is None:
            return self._whole(text, add_special_tokens=add_special_tokens)
        ids = array("I", self._before if add_special_tokens else [])
        start = 0
        for stop in self._stops(text):
            ids.extend(self._piece(text[start:stop], first=not start))
            start = stop
        if start < len(text):
            ids.extend(self._whole(text[start:], add_special_tokens=False))
        if add_special_tokens:
            ids.extend(self._after)
        return ids

    def _stops(self, text: str) -> list[int]:
        """Ends of the pieces that are the same in every text with this beginning."""
        if self._cut is None:
            return []
        stops, start = [], 0
        while found := self._cut.search(text, start + PIECE_CHARS):
            start = found.start()
            stops.append(start)
        return stops

    def _piece(self, text: str, *, first: bool) -> array[int]:
        key = (first, text)
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                self.hits += 1
                return known
            self.misses += 1
        ids = self._whole(text, add_special_tokens=False)
        size = _size(text, ids)
        with self._lock:
            if size <= self._cache_bytes and key not in self._cache:
                self._cache[key] = ids
                self.cached_bytes += size
                while self.cached_bytes > self._cache_bytes:
                    (_, old), old_ids = self._cache.popitem(last=False)
                    self.cached_bytes -= _size(old, old_ids)
        return ids

    def _whole(self, text: str, *, add_special_tokens: bool) -> array[int]:
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("I", encoding.ids)

    # Properties of this tokenizer

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _special_ends(self) -> tuple[list[int] | None, list[int] | None]:
        """Tokens that ``add_special_tokens`` adds before and after; (None, None) if it does anything else."""
        ends: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for text in ("x", "some words\nand more", "é 1"):
            plain = self._plain(text)
            full = list(self._tokenizer.encode(text, add_special_tokens=True).ids)
            for start in range(len(full) - len(plain) + 1):
                if full[start : start + len(plain)] == plain:
                    ends.add((tuple(full[:start]), tuple(full[start + len(plain) :])))
                    break
            else:
                return None, None
        if len(ends) != 1:
            return None, None
        before, after = ends.pop()
        return list(before), list(after)

    def _separate_tokens(self) -> list[str]:
        """Special tokens whose recognition does not depend on their surroundings."""
        added: list[Any] = list(self._tokenizer.get_added_tokens_decoder().values())
        contents = [token.content for token in added if token.content]
        return [
            token.content
            for token in added
            if token.content
            and not (token.lstrip or token.single_word)
            and not token.content[0].isalnum()
            and not any(_entangled(token.content, other) for other in contents)
        ]

    def _splits_before(self, token: str) -> bool:
        texts = ["a", "a b ", "line\n", " ", "é", "1 2", token, "x" + token]
        return all(
            self._plain(left + token + right) == self._plain(left) + self._plain(token + right)
            for left in texts
            for right in ("", " b", "\nc", "1", token)
        )

    def _splits_lines(self) -> bool:
        """True if text is always split between a line feed and a letter, by trials on random texts."""
        if any(
            re.search(r"\n[A-Za-z]", token.content) for token in self._tokenizer.get_added_tokens_decoder().values()
        ):
            return False
        draw = random.Random(0)
        alphabet = string.ascii_letters + string.digits + string.punctuation + "     \n\n\n\t\réü中文\u0301"
        for _ in range(_TRIALS):
            left = (
                "".join(draw.choices(alphabet, k=draw.randrange(30))) + draw.choice(string.ascii_letters + "1.)") + "\n"
            )
            right = draw.choice(string.ascii_letters) + "".join(draw.choices(alphabet, k=draw.randrange(30)))
            if self._plain(left + right) != self._plain(left) + self._plain(right):
                return False
        return True


def _entangled(token: str, other: str) -> bool:
    """True if an occurrence of ``other`` could consume a part of ``token`` that begins after it."""
    if token != other and token in other:
        return True
    return any(other.endswith(token[:length]) for length in range(1, min(len(token), len(other))))


def _size(text: str, ids: array[int]) -> int:
    # A string takes 1, 2 or 4 bytes per character; the size must not be underestimated.
    return len(text) * (1 if text.isascii() else 4) + len(ids) * ids.itemsize + _ENTRY_BYTES
