"""The ledger: what every instance has in flight, by leases.

A lease is taken in the same synchronous step that decides, before any await, so two requests of one event-loop tick see
each other. It is released exactly once, whatever happens in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp2
from typing import NamedTuple


class Phase(StrEnum):
    """Where the work of a lease is."""

    PREFILL = "prefill"
    DECODE = "decode"
    RELEASED = "released"


@dataclass(slots=True)
class Account:
    """What one instance has in flight. `Ledger.recent_tokens` tells what is left of the recent term."""

    requests: int = 0
    prefilling: int = 0
    pending_prefill_tokens: int = 0
    decoding_tokens: int = 0
    promised_tokens: int = 0
    recent_tokens: float = 0.0
    recent_at_s: float = 0.0


class Load(NamedTuple):
    """What the ledger says of one instance (a plain reading, not a live view)."""

    requests: int = 0
    pending_prefill_tokens: int = 0
    decoding_tokens: int = 0
    promised_tokens: int = 0
    recent_tokens: float = 0.0
    prefilling: int = 0
    """Of ``requests``, those whose first token is still to come."""


@dataclass(slots=True, eq=False)
class Lease:
    """One leg of one request, counted on one instance until ``release``."""

    instance: str
    new_tokens: int
    context_tokens: int
    _account: Account = field(repr=False)
    phase: Phase = Phase.PREFILL
    _on_release: Callable[[], None] | None = field(default=None, repr=False)

    def first_token(self) -> None:
        """The prefill is done: its tokens stop pending and its context starts decoding. Later calls do nothing."""
        if self.phase is Phase.PREFILL:
            self.phase = Phase.DECODE
            self._account.prefilling -= 1
            self._account.pending_prefill_tokens -= self.new_tokens
            self._account.decoding_tokens += self.context_tokens

    def add_prefill(self, new_tokens: int) -> None:
        """Count more tokens to prefill here, as when an offload falls back; only before the first token."""
        if self.phase is Phase.PREFILL:
            self.new_tokens += new_tokens
            self._account.pending_prefill_tokens += new_tokens

    def release(self) -> bool:
        """Take the leg out of the count. True the first time; later calls change nothing and return False."""
        if self.phase is Phase.RELEASED:
            return False
        if self.phase is Phase.PREFILL:
            self._account.prefilling -= 1
            self._account.pending_prefill_tokens -= self.new_tokens
        else:
            self._account.decoding_tokens -= self.context_tokens
        self._account.requests -= 1
        self._account.promised_tokens -= self.context_tokens
        self.phase = Phase.RELEASED
        if self._on_release is not None:
            self._on_release()
        return True


class Ledger:
    """In-flight requests, pending prefill tokens and decoding tokens per instance, plus *recently assigned* tokens.

    The recent term decays by half every ``recent_half_life_s`` seconds. With agent pacing nothing is in flight at most
    decisions, so without it every idle instance looks the same and ties decide the placement.
    """

    def __init__(self, recent_half_life_s: float = 30.0) -> None:
        """Raises ValueError for a half-life that is not positive."""
        self.set_half_life(recent_half_life_s)
        self._accounts: dict[str, Account] = {}
        self.unused = Account()
        """The account of an instance never seen: zeros. For readers."""
        self._departed: list[Account] = []
        self.on_release: Callable[[], None] | None = None
        """Called after every release of a lease that is taken from then on: there may be room for others."""

    def set_half_life(self, recent_half_life_s: float) -> None:
        """Decay by another half-life from now on. Raises ValueError unless it is positive."""
        if recent_half_life_s <= 0:
            raise ValueError(f"recent_half_life_s must be positive, got {recent_half_life_s}")
        self._half_life_s = recent_half_life_s

    def acquire(self, instance: str, new_tokens: int, context_tokens: int, now_s: float) -> Lease:
        """Count one leg: ``new_tokens`` to prefill, ``context_tokens`` of KV once decoding."""
        if new_tokens < 0 or context_tokens < 0:
            raise ValueError(f"token counts must not be negative, got {new_tokens} and {context_tokens}")
        account = self._accounts.get(instance)
        if account is None:
            account = self._accounts[instance] = Account(recent_at_s=now_s)
        account.requests += 1
        account.prefilling += 1
        account.pending_prefill_tokens += new_tokens
        account.promised_tokens += context_tokens
        account.recent_tokens = self.recent_tokens(account, now_s) + new_tokens
        account.recent_at_s = now_s
        return Lease(instance, new_tokens, context_tokens, account, _on_release=self.on_release)

    def requests(self, instance: str) -> int:
        """Legs in flight on one instance, P legs included."""
        account = self._accounts.get(instance)
        return account.requests if account else 0

    def account(self, instance: str) -> Account:
        """The live account of one instance, for readers; zeros for one never seen."""
        return self._accounts.get(instance, self.unused)

    @property
    def accounts(self) -> Mapping[str, Account]:
        """The live accounts by instance, for readers; ``unused`` stands for the instances that are not in it."""
        return self._accounts

    def load(self, instance: str, now_s: float) -> Load:
        """Current reading of one instance; zero for one never seen."""
        account = self._accounts.get(instance)
        if account is None:
            return _IDLE
        return Load(
            account.requests,
            account.pending_prefill_tokens,
            account.decoding_tokens,
            account.promised_tokens,
            self.recent_tokens(account, now_s),
            account.prefilling,
        )

    def promised_tokens(self, instance: str) -> int:
        """KV in tokens that the requests in flight on one instance need; needs no time."""
        account = self._accounts.get(instance)
        return account.promised_tokens if account else 0

    def forget_recent(self, instance: str) -> None:
        """Clear the decayed term of an instance that restarted; leases in flight stay counted."""
        account = self._accounts.get(instance)
        if account is None:
            return
        account.recent_tokens = 0.0
        if not account.requests:  # no lease refers to it, and the names of departed instances must not pile up
            del self._accounts[instance]

    def remove_instance(self, instance: str) -> Callable[[], int]:
        """An instance left. Its leases stay in ``totals`` until released; another of its name starts from zero.

        Returns what tells how many of its leases are not released yet.
        """
        self._departed = [account for account in self._departed if account.requests]
        account = self._accounts.pop(instance, None) or Account()
        if account.requests:
            self._departed.append(account)
        return lambda: account.requests

    def totals(self) -> dict[str, int]:
        """Sums over all instances, those that left included; every value is zero when nothing is in flight."""
        accounts = [*self._accounts.values(), *self._departed]
        return {
            "requests": sum(a.requests for a in accounts),
            "prefilling": sum(a.prefilling for a in accounts),
            "pending_prefill_tokens": sum(a.pending_prefill_tokens for a in accounts),
            "decoding_tokens": sum(a.decoding_tokens for a in accounts),
            "promised_tokens": sum(a.promised_tokens for a in accounts),
        }

    def recent_tokens(self, account: Account, now_s: float) -> float:
        """The decayed term of an account."""
        recent = account.recent_tokens
        elapsed_s = now_s - account.recent_at_s
        return recent * exp2(-elapsed_s / self._half_life_s) if recent and elapsed_s > 0.0 else recent


_IDLE = Load()
