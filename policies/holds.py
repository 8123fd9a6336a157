"""KV that P keeps for a D that has yet to pull it: not in any engine's request count, yet it fills P's pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Kept:
    """What one life of one instance holds."""

    held_tokens: int = 0
    orphans: list[tuple[float, int]] = field(default_factory=list)
    """(until_s, tokens)"""


class Holds:
    """Tokens held per instance: those of hand-offs under way, and orphans that nobody will pull any more.

    An engine frees an orphan after its abort timeout; until then the room is taken.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        """Instances that something was held on since they last restarted."""
        return len(self._kept)

    def take(self, instance: str, tokens: int) -> Hold:
        """Count a hold that somebody will release or orphan."""
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        kept = self._kept.setdefault(instance, _Kept())
        kept.held_tokens += tokens
        return Hold(kept, tokens)

    def untracked(self, tokens: int) -> Hold:
        """A hold on an engine that left the fleet: counted nowhere."""
        return Hold(_Kept(tokens), tokens)

    def tokens(self, instance: str, now_s: float) -> int:
        """Tokens held on one instance, orphans included while they last."""
        kept = self._kept.get(instance)
        if kept is None:
            return 0
        if kept.orphans:
            kept.orphans = [orphan for orphan in kept.orphans if orphan[0] > now_s]
        return kept.held_tokens + sum(tokens for _, tokens in kept.orphans)

    def held_tokens(self, instance: str) -> int:
        """Tokens that somebody is still to pull from an instance: orphans do not count."""
        kept = self._kept.get(instance)
        return kept.held_tokens if kept is not None else 0

    def held_by(self, instance: str) -> Callable[[], int]:
        """What tells the same of the present life of an instance, also when another has its name."""
        kept = self._kept.get(instance, _Kept())
        return lambda: kept.held_tokens

    def forget(self, instance: str) -> None:
        """The instance restarted: all it held is gone, and an old hold that ends later leaves nothing behind."""
        self._kept.pop(instance, None)

    def total(self) -> int:
        """Tokens of holds that are neither released nor orphaned; 0 when nothing is in flight."""
        return sum(kept.held_tokens for kept in self._kept.values())


class Hold:
    """One hold; released or orphaned once."""

    __slots__ = ("_kept", "_open", "_tokens")

    def __init__(self, kept: _Kept, tokens: int) -> None:
        self._kept = kept
        self._tokens = tokens
        self._open = True

    def release(self) -> None:
        """D has the KV. Later calls do nothing."""
        self._settle(None)

    def orphan(self, until_s: float) -> None:
        """Nobody will pull it: P keeps it until then. Later calls do nothing."""
        self._settle(until_s)

    def _settle(self, until_s: float | None) -> None:
        if self._open:
            self._open = False
            self._kept.held_tokens -= self._tokens
            if until_s is not None:
                self._kept.orphans.append((until_s, self._tokens))
