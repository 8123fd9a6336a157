"""Fair shares of tenants in the room that becomes free: deficit round robin over tokens, not requests.

Every waiting tenant has a deficit: tokens that it may still send in this round. The tenants take turns; a tenant's turn
lasts while its deficit is positive, and each request that is sent reduces it by the tokens that it computes, so the
last one of a turn may overdraw it (surplus round robin, Shreedhar and Varghese 1995 charged afterwards, since cached
tokens are known only after routing). When no tenant with a positive deficit has a request that can be sent, the next
round gives each ``weight * QUANTUM_TOKENS``, and never more than that is kept.

Bounds, with ``w`` a tenant's weight, ``m`` its largest request and ``q`` the quantum, for tenants of one priority:

- Share: while two tenants have requests that can be sent, the tokens that they send, each divided by its weight,
  differ by at most ``2 q + m1 / w1 + m2 / w2``, once tokens in flight when the line formed are made up for.
- Delay: before a tenant's next request, another tenant sends at most ``w2 * (d / w1 + 2 q) + m2`` tokens, where ``d``
  is the first one's overdraft: at most its own last request, or its tokens in flight when the line formed. A tenant
  without overdraft waits for at most ``w2 * q + m2`` tokens of each other one.
- Priority: a tenant that others overtake by priority alone gets a turn every ``OVERTAKEN_S``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import floor
from typing import Generic, TypeVar

from policies.types import Tenant

QUANTUM_TOKENS = 8192
"""Tokens that a tenant of weight 1 may send per round: a few chats or part of an agent's prompt, so turns are short."""
LEAST_TOKENS = 256
"""Tokens that every request counts at least: one that computes nothing still takes a place."""
OVERTAKEN_S = 10.0
"""Seconds without a turn after which a tenant goes ahead of higher priorities once; a third of the queue's timeout."""
MAX_TENANTS = 10_000
"""Tenants whose overdraft is remembered although they do not wait. Above it, all such overdrafts are forgotten."""

_DUE = float("-inf")
"""Key of a tenant that is due regardless of priorities."""

Item = TypeVar("Item")


class _Waiting:
    __slots__ = ("requests", "since_s", "tenant")

    def __init__(self, tenant: Tenant, now_s: float) -> None:
        self.tenant = tenant
        self.requests = 0
        self.since_s = now_s
        """When it began to wait, or its last turn."""


class _Account:
    __slots__ = ("deficit", "priority", "rounds", "turn")

    def __init__(self, deficit: float, priority: int, rounds: int, turn: int) -> None:
        self.deficit = deficit
        self.priority = priority
        self.rounds = rounds
        """Rounds of its priority that are part of ``deficit``."""
        self.turn = turn
        """Place in the order of turns; moves to the end when the deficit is used up."""


class _Standing:
    """A waiting tenant at one moment, as its requests are put into an order."""

    __slots__ = ("_deficit", "_due", "_priority", "_share", "_turn")

    def __init__(self, tenant: Tenant, deficit: float, share: float, turn: int, due: bool) -> None:
        self._priority = float(-tenant.priority)
        self._deficit = deficit
        self._share = share
        self._turn = turn
        self._due = due

    def first(self) -> tuple[float, int, int]:
        """Key of its first request: priority, rounds until its turn, place among the turns."""
        deficit = self._deficit
        rounds = 0 if deficit > 0 else floor(-deficit / self._share) + 1
        return (_DUE if self._due else self._priority, rounds, self._turn)

    def take(self, tokens: int) -> tuple[float, int, int]:
        """The same of its next request, which has so many tokens."""
        key = self.first()
        self._deficit -= tokens
        self._due = False
        return key


class TenantShares:
    """Deficits of the tenants. Synchronous, single writer; O(1) per request, O(tenants) per choice of a turn.

    Accounts exist while any request waits: when a line forms, a tenant's tokens in flight count as sent; when nobody
    waits, all is forgotten. So a tenant brings neither credit nor overdraft from times of plenty.
    """

    def __init__(self, quantum_tokens: float = QUANTUM_TOKENS) -> None:
        self._quantum = quantum_tokens
        self._waiting: dict[str, _Waiting] = {}
        self._accounts: dict[str, _Account] = {}
        self._in_flight: dict[str, int] = {}
        self._rounds: defaultdict[int, int] = defaultdict(int)
        """Rounds per priority: a turn of a higher one must not pay for overdrafts of a lower one."""
        self._turns = 0

    @property
    def contended(self) -> bool:
        """True while requests of several tenants wait."""
        return len(self._waiting) > 1

    def contends(self, tenant: Tenant) -> bool:
        """True if another tenant than this one waits."""
        return self.contended or (bool(self._waiting) and tenant.name not in self._waiting)

    def join(self, tenant: Tenant, now_s: float) -> None:
        """A request of the tenant begins to wait; ``leave`` must follow."""
        waiting = self._waiting.get(tenant.name)
        if waiting is None:
            waiting = self._waiting[tenant.name] = _Waiting(tenant, now_s)
        self._account(tenant)
        waiting.tenant = tenant  # the newest weight and priority
        waiting.requests += 1

    def leave(self, tenant: Tenant) -> None:
        """A request of the tenant waits no longer, for whatever reason."""
        waiting = self._waiting[tenant.name]
        waiting.requests -= 1
        if waiting.requests:
            return
        del self._waiting[tenant.name]
        if not self._waiting:
            self._accounts.clear()
            self._rounds.clear()
            self._turns = 0

    def sent(self, tenant: Tenant, tokens: int, now_s: float, *, waited: bool) -> int:
        """Count a request that is sent; returns the tokens for which ``ended`` must follow.

        Args:
            tokens: prompt tokens that it computes.
            waited: it was in line, so that its tokens count against its tenant's deficit.
        """
        tokens = max(tokens, LEAST_TOKENS)
        if waited and self._waiting:
            self._take_turn(tenant, tokens, now_s)
        name, in_flight = tenant.name, self._in_flight
        in_flight[name] = in_flight.get(name, 0) + tokens
        return tokens

    def ended(self, tenant: Tenant, tokens: int) -> None:
        """End a request counted by ``sent``."""
        name, in_flight = tenant.name, self._in_flight
        left = in_flight[name] - tokens
        if left:
            in_flight[name] = left
        else:
            del in_flight[name]

    def turns(self, now_s: float) -> list[str]:
        """Names of the waiting tenants in the order of their turns. O(tenants * log(tenants))."""
        waiting, accounts, quantum = self._waiting, self._accounts, self._quantum
        top = max((each.tenant.priority for each in waiting.values()), default=0)
        keys: dict[str, tuple[float, int, int]] = {}
        for name, each in waiting.items():  # as ``_Standing.first``, without its cost: once for every request sent
            _, weight, priority = each.tenant
            account, share = accounts[name], weight * quantum
            deficit = account.deficit + share * (self._rounds[account.priority] - account.rounds)
            due = priority < top and now_s - each.since_s >= OVERTAKEN_S
            keys[name] = (_DUE if due else -priority, 0 if deficit > 0 else floor(-deficit / share) + 1, account.turn)
        return sorted(keys, key=keys.__getitem__)

    def interleaved(
        self,
        line: list[Item],
        tenant_of: Callable[[Item], Tenant],
        tokens_of: Callable[[Item], int],
        now_s: float,
        newcomer: Tenant | None = None,
    ) -> list[Item]:
        """A line in the order in which it would be sent if all fitted; each tenant's requests keep their order.

        Every tenant in it waits, except that of a request that has not joined: ``newcomer``. O(n * log(n)).
        """
        waiting = self._waiting
        accounts = self._accounts
        if newcomer is not None and newcomer.name not in waiting:
            waiting = waiting | {newcomer.name: _Waiting(newcomer, now_s)}
            accounts = {newcomer.name: self._newcomer(newcomer)} | accounts
        standings = self._standings(waiting, accounts, now_s)
        places = []
        for number, item in enumerate(line):
            standing = standings[tenant_of(item).name]
            tokens = tokens_of(item)
            places.append((*standing.take(tokens if tokens > LEAST_TOKENS else LEAST_TOKENS), number))
        places.sort()
        return [line[place[3]] for place in places]

    @property
    def waiting(self) -> dict[str, int]:
        """Waiting requests by tenant."""
        return {name: each.requests for name, each in self._waiting.items()}

    @property
    def in_flight_tokens(self) -> Mapping[str, int]:
        """Tokens counted by ``sent`` and not ended, by tenant."""
        return self._in_flight

    @property
    def deficits(self) -> dict[str, float]:
        """Tokens that each waiting tenant may still send in this round; negative: it has overdrawn."""
        return {name: self._deficit(each.tenant, self._accounts[name]) for name, each in self._waiting.items()}

    def _take_turn(self, tenant: Tenant, tokens: int, now_s: float) -> None:
        account = self._account(tenant)
        deficit = self._deficit(tenant, account)
        rounds = 0 if deficit > 0 else floor(-deficit / self._share(tenant)) + 1
        # If others whose requests do not fit are overtaken, these rounds leave them one quantum: no credit piles up.
        self._rounds[tenant.priority] += rounds
        account.deficit = deficit + rounds * self._share(tenant) - tokens
        account.rounds = self._rounds[tenant.priority]
        if account.deficit <= 0:
            account.turn = self._next_turn()
        waiting = self._waiting.get(tenant.name)
        if waiting is not None:
            waiting.since_s = now_s

    def _standings(
        self, waiting: Mapping[str, _Waiting], accounts: Mapping[str, _Account], now_s: float
    ) -> dict[str, _Standing]:
        top = max((each.tenant.priority for each in waiting.values()), default=0)
        standings = {}
        for name, each in waiting.items():
            tenant, account = each.tenant, accounts[name]
            due = tenant.priority < top and now_s - each.since_s >= OVERTAKEN_S
            standings[name] = _Standing(tenant, self._deficit(tenant, account), self._share(tenant), account.turn, due)
        return standings

    def _account(self, tenant: Tenant) -> _Account:
        account = self._accounts.get(tenant.name)
        if account is None or account.priority != tenant.priority:
            if len(self._accounts) >= MAX_TENANTS + len(self._waiting):
                self._accounts = {name: each for name, each in self._accounts.items() if name in self._waiting}
            account = self._accounts[tenant.name] = self._newcomer(tenant)
            self._turns = account.turn
        return account

    def _newcomer(self, tenant: Tenant) -> _Account:
        deficit = self._share(tenant) - self._in_flight.get(tenant.name, 0)
        return _Account(deficit, tenant.priority, self._rounds[tenant.priority], self._turns + 1)

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns

    def _deficit(self, tenant: Tenant, account: _Account) -> float:
        share = self._share(tenant)
        return min(share, account.deficit + share * (self._rounds[account.priority] - account.rounds))

    def _share(self, tenant: Tenant) -> float:
        return tenant.weight * self._quantum


class FairQueue(Generic[Item]):
    """Waiting requests: within a tenant in the order of their arrival, tenants in turns."""

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._tenants: dict[Item, Tenant] = {}
        self._lines: dict[str, dict[Item, None]] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, item: Item) -> bool:
        return item in self._tenants

    def __iter__(self) -> Iterator[Item]:
        """Items in the order of their arrival."""
        return iter(self._tenants)

    def append(self, item: Item, tenant: Tenant, now_s: float) -> None:
        """Add an item, which must be new."""
        self._tenants[item] = tenant
        self._lines.setdefault(tenant.name, {})[item] = None
        self._shares.join(tenant, now_s)

    def remove(self, item: Item) -> None:
        """Remove an item, which must be in the queue."""
        tenant = self._tenants.pop(item)
        line = self._lines[tenant.name]
        del line[item]
        if not line:
            del self._lines[tenant.name]
        self._shares.leave(tenant)

    def last_of_largest(self, tenant: Tenant) -> Item | None:
        """Last item of the tenant with most items per weight; None if no one has more than ``tenant`` and one item."""
        lines = [(len(line) / self._tenants[next(iter(line))].weight, name) for name, line in self._lines.items()]
        own = len(self._lines.get(tenant.name, ())) + 1
        size, name = max(lines, default=(0.0, ""))
        return next(reversed(self._lines[name])) if name != tenant.name and size > own / tenant.weight else None

    def next(self, now_s: float, stuck: Callable[[Item], bool]) -> Item | None:
        """The item whose turn it is, except those that are ``stuck``; None if all are. Changes nothing."""
        lines: Iterable[dict[Item, None]] = self._lines.values()
        if len(self._lines) > 1:
            lines = [self._lines[name] for name in self._shares.turns(now_s) if name in self._lines]
        return next((item for line in lines for item in line if not stuck(item)), None)
