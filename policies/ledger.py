"""In-flight work per instance, counted by leases.

A lease is taken in the same synchronous step as the decision, before any await, so that two requests of one event-loop
tick see each other's load. It is released exactly once, on every path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp2
from typing import NamedTuple

from policies.types import QueuedPrefill


class Phase(StrEnum):
    """Phase of a lease's work."""

    PREFILL = "prefill"
    DECODE = "decode"
    RELEASED = "released"


_MOST_PAIRS = 200.0
"""Pairs from which on the older ones count less: another order of the same engine is noticed soon."""


@dataclass(slots=True)
class DuePairs:
    """Pairs of prefills that waited on one instance together, of which the later one was due first."""

    kept: float = 0.0
    """The one that was due first had its first token first."""
    broken: float = 0.0
    """The one that arrived first had it first, although it was not being computed when the other arrived."""

    @property
    def total(self) -> float:
        """All pairs."""
        return self.kept + self.broken

    def add(self, kept: int, broken: int) -> None:
        """Count pairs."""
        self.kept += kept
        self.broken += broken
        if self.total > _MOST_PAIRS:
            self.kept /= 2
            self.broken /= 2


@dataclass(slots=True)
class Account:
    """In-flight work of one instance. `Ledger.recent_tokens` applies the decay to the recent term."""

    requests: int = 0
    prefilling: int = 0
    pending_prefill_tokens: int = 0
    decoding_tokens: int = 0
    promised_tokens: int = 0
    recent_tokens: float = 0.0
    recent_at_s: float = 0.0
    queue: dict[Lease, QueuedPrefill] = field(default_factory=dict)
    """Own prefills without a first token that an order applies to."""
    computing: Lease | None = None
    """The one of them that the engine computes now: it was due first when the one before it ended."""
    pairs: DuePairs = field(default_factory=DuePairs)
    """Evidence of the order in which the engine computes those that wait together."""

    def ordered(self) -> tuple[QueuedPrefill, ...]:
        """``queue``, the one that is computed first."""
        computing = self.computing
        if computing is None:
            return ()
        return (self.queue[computing], *[each for lease, each in self.queue.items() if lease is not computing])


class Load(NamedTuple):
    """Ledger values of one instance at one moment (a copy, not a live view)."""

    requests: int = 0
    pending_prefill_tokens: int = 0
    decoding_tokens: int = 0
    promised_tokens: int = 0
    recent_tokens: float = 0.0
    prefilling: int = 0
    """Those of ``requests`` without a first token yet."""


@dataclass(slots=True, eq=False)
class Lease:
    """One leg of one request, counted on one instance until ``release``."""

    instance: str
    new_tokens: int
    context_tokens: int
    _account: Account = field(repr=False)
    phase: Phase = Phase.PREFILL
    _on_release: Callable[[], None] | None = field(default=None, repr=False)
    due_s: float | None = None
    """Its place in the order of prefills (`policies.costs.order`); None: that of its arrival."""
    _behind: Lease | None = field(default=None, repr=False)
    """The one that was computed when it was added to the queue; None once it has left it."""

    def first_token(self) -> None:
        """Move the lease from prefill to decode: its tokens stop pending. Later calls do nothing."""
        if self.phase is Phase.PREFILL:
            self.phase = Phase.DECODE
            self._account.prefilling -= 1
            self._account.pending_prefill_tokens -= self.new_tokens
            self._account.decoding_tokens += self.context_tokens
            if self.due_s is not None:
                self._compare(self.due_s)
            self._leave_queue()

    def add_prefill(self, new_tokens: int, seconds: float = 0.0) -> None:
        """Add tokens to prefill here, as when an offload falls back; only before the first token.

        ``seconds``: predicted for all of them. The place in the order stays: the request has waited already.
        """
        if self.phase is Phase.PREFILL:
            self.new_tokens += new_tokens
            self._account.pending_prefill_tokens += new_tokens
            if self.due_s is not None:
                self._account.queue[self] = QueuedPrefill(self.due_s, seconds)

    def release(self) -> bool:
        """Remove the leg from the counts. True the first time; later calls do nothing and return False."""
        if self.phase is Phase.RELEASED:
            return False
        if self.phase is Phase.PREFILL:
            self._account.prefilling -= 1
            self._account.pending_prefill_tokens -= self.new_tokens
            self._leave_queue()
        else:
            self._account.decoding_tokens -= self.context_tokens
        self._account.requests -= 1
        self._account.promised_tokens -= self.context_tokens
        self.phase = Phase.RELEASED
        if self._on_release is not None:
            self._on_release()
        return True

    def _compare(self, due_s: float) -> None:
        """Count the pairs of this prefill, whose first token has come, with those that still wait."""
        kept = broken = 0
        later = False
        for lease, queued in self._account.queue.items():  # in the order in which they were sent
            if lease is self:
                later = True
            elif later:
                broken += queued.due_s < due_s and lease._behind is not self
            else:
                kept += queued.due_s > due_s
        if kept or broken:
            self._account.pairs.add(kept, broken)

    def _leave_queue(self) -> None:
        account = self._account
        self._behind = None
        if account.queue.pop(self, None) is not None and account.computing is self:
            account.computing = min(account.queue, key=account.queue.__getitem__, default=None)


class Ledger:
    """In-flight requests, pending prefill tokens and decoding tokens per instance, plus *recently assigned* tokens.

    The recent term decays by half every ``recent_half_life_s`` seconds. With agent pacing nothing is in flight at most
    decisions; without this term all idle instances would be equal and ties would decide the placement.

    ``remote`` has the work that other replicas sent there; only ``joint``, ``joint_requests`` and ``promised_tokens``
    include it, since only own leases can be released here.
    """

    def __init__(self, recent_half_life_s: float = 30.0) -> None:
        """Raises ValueError for a half-life that is not positive."""
        self.set_half_life(recent_half_life_s)
        self._accounts: dict[str, Account] = {}
        self.unused = Account()
        """All-zero account for instances without one, for readers."""
        self._departed: list[Account] = []
        self.remote: dict[str, Account] = {}
        """Work of other replicas by instance, kept by its reader; empty where there are none."""
        self.on_acquire: Callable[[], None] | None = None
        """Called after every acquisition."""
        self.on_release: Callable[[], None] | None = None
        """Called after every release of a lease that is acquired after this is set: capacity may have become free."""

    def set_half_life(self, recent_half_life_s: float) -> None:
        """Set the half-life of the recent term, in seconds. Raises ValueError unless positive."""
        if recent_half_life_s <= 0:
            raise ValueError(f"recent_half_life_s must be positive, got {recent_half_life_s}")
        self._half_life_s = recent_half_life_s

    def acquire(
        self,
        instance: str,
        new_tokens: int,
        context_tokens: int,
        now_s: float,
        queued: QueuedPrefill | None = None,
    ) -> Lease:
        """Count one leg: ``new_tokens`` to prefill, ``context_tokens`` of KV once decoding.

        ``queued``: its place in the order of prefills; None: in order of arrival.

        Raises:
            ValueError: a token count is negative.
        """
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
        if self.on_acquire is not None:
            self.on_acquire()
        lease = Lease(instance, new_tokens, context_tokens, account, _on_release=self.on_release)
        if queued is not None:
            lease.due_s = queued.due_s
            lease._behind = account.computing
            account.queue[lease] = queued
            account.computing = account.computing or lease
        return lease

    def requests(self, instance: str) -> int:
        """Legs in flight on one instance, P legs included."""
        account = self._accounts.get(instance)
        return account.requests if account else 0

    def account(self, instance: str) -> Account:
        """Live account of one instance, for readers; zeros for an unknown one."""
        return self._accounts.get(instance, self.unused)

    @property
    def accounts(self) -> Mapping[str, Account]:
        """Live accounts by instance, for readers; instances without an entry have ``unused``."""
        return self._accounts

    def load(self, instance: str, now_s: float) -> Load:
        """Current load of one instance; zeros for an unknown one."""
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
        """KV in tokens that the requests in flight on one instance need, of all replicas; independent of time."""
        own, remote = self._accounts.get(instance), self.remote.get(instance)
        return (own.promised_tokens if own else 0) + (remote.promised_tokens if remote else 0)

    def joint_requests(self, instance: str) -> int:
        """Legs in flight on one instance, of all replicas."""
        remote = self.remote.get(instance)
        return self.requests(instance) + (remote.requests if remote else 0)

    def joint(self, instance: str, now_s: float) -> Account:
        """Work of all replicas on one instance at ``now_s``: a copy, or zeros."""
        own, remote = self._accounts.get(instance), self.remote.get(instance)
        if own is None or remote is None:
            return own or remote or self.unused
        return Account(
            own.requests + remote.requests,
            own.prefilling + remote.prefilling,
            own.pending_prefill_tokens + remote.pending_prefill_tokens,
            own.decoding_tokens + remote.decoding_tokens,
            own.promised_tokens + remote.promised_tokens,
            self.recent_tokens(own, now_s) + self.recent_tokens(remote, now_s),
            now_s,
            own.queue,
            own.computing,
        )

    def forget_recent(self, instance: str) -> None:
        """Clear the recent term of an instance that restarted; leases in flight stay counted."""
        self.remote.pop(instance, None)
        account = self._accounts.get(instance)
        if account is None:
            return
        account.recent_tokens = 0.0
        account.pairs = DuePairs()
        if not account.requests:  # no lease refers to it; names of departed instances must not accumulate
            del self._accounts[instance]

    def remove_instance(self, instance: str) -> Callable[[], int]:
        """Remove an instance. Its leases stay in ``totals`` until released; a new one of its name starts from zero.

        Returns a function that reads the number of its leases that are not yet released.
        """
        self.remote.pop(instance, None)
        self._departed = [account for account in self._departed if account.requests]
        account = self._accounts.pop(instance, None) or Account()
        if account.requests:
            self._departed.append(account)
        return lambda: account.requests

    def totals(self) -> dict[str, int]:
        """Sums over all instances, including removed ones; every value is zero when nothing is in flight."""
        accounts = [*self._accounts.values(), *self._departed]
        return {
            "requests": sum(a.requests for a in accounts),
            "prefilling": sum(a.prefilling for a in accounts),
            "pending_prefill_tokens": sum(a.pending_prefill_tokens for a in accounts),
            "decoding_tokens": sum(a.decoding_tokens for a in accounts),
            "promised_tokens": sum(a.promised_tokens for a in accounts),
        }

    def recent_tokens(self, account: Account, now_s: float) -> float:
        """Recent term of an account in tokens, decayed to ``now_s``."""
        recent = account.recent_tokens
        elapsed_s = now_s - account.recent_at_s
        return recent * exp2(-elapsed_s / self._half_life_s) if recent and elapsed_s > 0.0 else recent


_IDLE = Load()
