"""KV that P keeps until D has pulled it: not in any engine's request count, but part of P's used pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Kept:
    """Holds of one instance between two restarts."""

    held_tokens: int = 0
    orphans: list[tuple[float, int]] = field(default_factory=list)
    """(until_s, tokens)"""


class Holds:
    """Tokens held per instance: those of hand-offs in progress, and orphans that will never be pulled.

    An engine frees an orphan after its abort timeout; until then the space is in use.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        """Number of instances with holds since their last restart."""
        return len(self._kept)

    def take(self, instance: str, tokens: int) -> KvHold:
        """Count a hold of ``tokens``; the caller releases or orphans it. Raises ValueError if negative."""
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        kept = self._kept.setdefault(instance, _Kept())
        kept.held_tokens += tokens
        return KvHold(kept, tokens)

    def untracked(self, tokens: int) -> KvHold:
        """A hold on an engine that left the fleet: not counted."""
        return KvHold(_Kept(tokens), tokens)

    def tokens(self, instance: str, now_s: float) -> int:
        """Tokens held on one instance, including orphans that have not expired."""
        kept = self._kept.get(instance)
        if kept is None:
            return 0
        if kept.orphans:
            kept.orphans = [orphan for orphan in kept.orphans if orphan[0] > now_s]
        return kept.held_tokens + sum(tokens for _, tokens in kept.orphans)

    def held_tokens(self, instance: str) -> int:
        """Tokens still to be pulled from an instance, without orphans."""
        kept = self._kept.get(instance)
        return kept.held_tokens if kept is not None else 0

    def held_tokens_reader(self, instance: str) -> Callable[[], int]:
        """Return a function that reads ``held_tokens`` of the current process, even if its name is reused later."""
        kept = self._kept.get(instance, _Kept())
        return lambda: kept.held_tokens

    def forget(self, instance: str) -> None:
        """Drop all holds of an instance that restarted; releasing an old one later has no effect."""
        self._kept.pop(instance, None)

    def total(self) -> int:
        """Tokens of holds that are neither released nor orphaned; 0 when nothing is in flight."""
        return sum(kept.held_tokens for kept in self._kept.values())


class KvHold:
    """One hold, to be released or orphaned once."""

    __slots__ = ("_kept", "_open", "_tokens")

    def __init__(self, kept: _Kept, tokens: int) -> None:
        self._kept = kept
        self._tokens = tokens
        self._open = True

    def release(self) -> None:
        """Release: D has the KV. Later calls do nothing."""
        self._settle(None)

    def orphan(self, until_s: float) -> None:
        """Mark as never to be pulled: P keeps it until ``until_s``. Later calls do nothing."""
        self._settle(until_s)

    def _settle(self, until_s: float | None) -> None:
        if self._open:
            self._open = False
            self._kept.held_tokens -= self._tokens
            if until_s is not None:
                self._kept.orphans.append((until_s, self._tokens))
