"""Events of an engine's prefix cache, in the order in which they happened."""

from __future__ import annotations

from typing import NamedTuple


class BlocksStored(NamedTuple):
    """Blocks of one request that prefix lookups can find from now on."""

    keys: tuple[int, ...]
    parent: int | None
    """Key of the block before them; None at the start of a prompt."""
    tokens: bytes
    """Their token bytes (``sim.core.content``)."""


class BlockRemoved(NamedTuple):
    """One cached block that was reused for something else."""

    key: int


class CacheCleared(NamedTuple):
    """The whole prefix cache was forgotten."""


KvEvent = BlocksStored | BlockRemoved | CacheCleared
