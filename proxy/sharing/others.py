"""Merges what other replicas report into the local state, and forgets those that have fallen silent."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from policies.admission.elsewhere import HeldElsewhere, LineElsewhere
from policies.admission.homes import Contexts
from policies.ledger import Account
from policies.state import FleetState
from proxy.access.keys import KeyName, Keys
from proxy.access.quotas import KeyUse, UseElsewhere
from proxy.fleet.instances import Instances
from proxy.sharing.drains import DrainMarks
from proxy.sharing.store import ResponseTable
from proxy.sharing.wire import HeldReport, KeyReport, LoadReport, Message, Pin, SharedResponse

log = logging.getLogger("warmroute.sharing")


@dataclass(slots=True, eq=False)
class Other:
    """Another replica, as last heard."""

    replica: str
    run: int
    heard_s: float
    loads: dict[str, Account] = field(default_factory=dict)
    keys: dict[str, KeyReport] = field(default_factory=dict)
    open: frozenset[str] = frozenset()
    contexts: dict[str, Contexts] = field(default_factory=dict)
    lost_shares: dict[str, float] = field(default_factory=dict)
    held: int = 0
    line: tuple[HeldElsewhere, ...] = ()

    def as_dict(self, now_s: float) -> dict[str, Any]:
        """JSON-ready: its age and its load by instance."""
        return {
            "replica": self.replica,
            "age_s": round(now_s - self.heard_s, 3),
            "requests": sum(account.requests for account in self.loads.values()),
            "load": {name: load_row(account) for name, account in sorted(self.loads.items())},
            "held": self.held,
            "open_breakers": sorted(self.open),
            "keys_in_flight": {name: report.in_flight for name, report in sorted(self.keys.items())},
        }


class Others:
    """The other replicas by name. Owns ``ledger.remote``, remote contexts, use of keys and line elsewhere."""

    def __init__(
        self,
        state: FleetState,
        instances: Instances,
        keys: Keys,
        drains: DrainMarks,
        responses: ResponseTable,
        run: int,
        line: LineElsewhere,
    ) -> None:
        """``run``: number of this process, whose own pins it may find in the store."""
        self._run = run
        self._responses = responses
        self._state = state
        self._instances = instances
        self._keys = keys
        self._drains = drains
        self._line = line
        self._known: dict[str, Other] = {}
        self.on_drain: Callable[[str, bool], None] = _ignore_drain
        """Called with an instance that is to drain, or no longer to."""
        self.on_doubt: Callable[[str], None] = _ignore_name
        """Called with an instance whose breaker has opened on another replica."""
        self.on_load: Callable[[], None] = _ignore
        """Called after the load of other replicas changed."""

    def __iter__(self) -> Iterator[Other]:
        return iter(tuple(self._known.values()))

    def __len__(self) -> int:
        return len(self._known)

    def find(self, message: Message, age_s: float, now_s: float, unix_s: float) -> None:
        """Merge a full message that is found in the store when this replica connects, and is ``age_s`` old.

        Limits per minute continue where the other's are, as its earlier use is not known.
        """
        self.take(message, now_s, unix_s)
        other = self._known.get(message.replica)
        if other is not None:
            other.heard_s = now_s - age_s
        for name, report in message.keys.items():
            if (quota := self._keys.quotas().get(KeyName(name))) is not None:
                quota.begin_at(KeyUse(requests_left=report.requests_left, tokens_left=report.tokens_left), now_s)

    def take(self, message: Message, now_s: float, unix_s: float) -> None:
        """Merge a message of another replica; ``now_s`` and ``unix_s``: the moment, monotonic and as Unix time."""
        other = self._known.get(message.replica)
        if other is not None and (message.gone or other.run != message.run):
            self._drop(other, "has shut down" if message.gone else "was restarted")
            other = None
        if message.gone:
            return
        if other is None:
            log.info("replica %s is there", message.replica)
            other = self._known[message.replica] = Other(message.replica, message.run, now_s)
        other.heard_s = now_s
        self._take_loads(other, message.loads, message.full, now_s)
        self._take_keys(other, message.keys, message.full, now_s)
        now = (message.contexts, message.lost_shares, message.held)
        if now != (other.contexts, other.lost_shares, other.held):
            other.contexts, other.lost_shares, other.held = now
            self._sum_contexts()
        if message.line or other.line:
            other.line = tuple(_held(message.replica, report, now_s) for report in message.line)
            self._join_lines()
        self.take_pins(message.pins, now_s, unix_s)
        self.take_responses(message.responses, now_s)
        for name, draining in self._drains.merge(message.drains).items():
            self.on_drain(name, draining)
        opened, other.open = frozenset(message.open) - other.open, frozenset(message.open)
        for name in sorted(opened):
            self.on_doubt(name)
        self.on_load()

    def take_pins(self, pins: Iterable[Pin], now_s: float, unix_s: float) -> None:
        """Merge decisions about sessions, without own ones and those from before the start of the engine's process."""
        for pin in pins:
            instance = self._instances.get(pin.instance)
            if instance is None or pin.unix_s < (instance.started_unix_s or 0.0) or pin.run == self._run:
                continue
            session = pin.session.decode("utf-8", "surrogatepass")
            at_s = now_s - max(0.0, unix_s - pin.unix_s)
            self._state.pinned_elsewhere(session, pin.instance, pin.tokens, at_s)

    def take_responses(self, responses: Iterable[SharedResponse], now_s: float) -> None:
        """Merge stored responses."""
        for each in responses:
            self._responses.learn_elsewhere(each, now_s)

    def expire(self, now_s: float, ttl_s: float) -> None:
        """Forget replicas that have been silent for ``ttl_s``."""
        for other in tuple(self._known.values()):
            if now_s - other.heard_s > ttl_s:
                self._drop(other, f"has not been heard for {ttl_s:g} s")

    def _drop(self, other: Other, why: str) -> None:
        log.info("replica %s %s: its load is forgotten", other.replica, why)
        del self._known[other.replica]
        self._sum_loads(other.loads)
        self._sum_keys(other.keys)
        self._sum_contexts()
        self._join_lines()
        self.on_load()

    def _take_loads(self, other: Other, loads: dict[str, LoadReport], full: bool, now_s: float) -> None:
        changed = {name: _account(report, now_s) for name, report in loads.items()}
        gone = [name for name in other.loads if name not in changed] if full else []
        other.loads.update(changed)
        for name in gone:
            del other.loads[name]
        self._sum_loads((*changed, *gone))

    def _take_keys(self, other: Other, keys: dict[str, KeyReport], full: bool, now_s: float) -> None:
        quotas = self._keys.quotas()
        for name, report in keys.items():
            before, other.keys[name] = other.keys.get(name), report
            quota = quotas.get(KeyName(name))
            if quota is not None and before is not None:
                quota.spent_elsewhere(report.requests - before.requests, report.tokens - before.tokens, now_s)
        gone = [name for name in other.keys if name not in keys] if full else []
        for name in gone:
            del other.keys[name]
        self._sum_keys((*keys, *gone))

    def _sum_loads(self, names: Iterable[str]) -> None:
        ledger = self._state.ledger
        for name in tuple(names):
            parts = [each.loads[name] for each in self._known.values() if name in each.loads]
            if not parts or self._instances.get(name) is None:
                ledger.remote.pop(name, None)
                continue
            now_s = max(part.recent_at_s for part in parts)
            ledger.remote[name] = Account(
                sum(part.requests for part in parts),
                sum(part.prefilling for part in parts),
                sum(part.pending_prefill_tokens for part in parts),
                sum(part.decoding_tokens for part in parts),
                sum(part.promised_tokens for part in parts),
                sum(ledger.recent_tokens(part, now_s) for part in parts),
                now_s,
            )

    def _sum_keys(self, names: Iterable[str]) -> None:
        quotas = self._keys.quotas()
        for name in tuple(names):
            quota = quotas.get(KeyName(name))
            if quota is not None:
                reports = [each.keys[name] for each in self._known.values() if name in each.keys]
                sessions = frozenset(digest for report in reports for digest in report.sessions)
                quota.elsewhere = UseElsewhere(sum(report.in_flight for report in reports), sessions)

    def _sum_contexts(self) -> None:
        others = self._known.values()
        lost = Counter[str]()
        for each in others:
            lost.update(each.lost_shares)
        self._state.accounts.set_remote(
            [each.contexts for each in others],
            lost,
            sum(each.held for each in others),
        )

    def _join_lines(self) -> None:
        self._line.replace(held for each in self._known.values() for held in each.line)


def load_row(account: Account) -> dict[str, Any]:
    """JSON-ready load of one instance."""
    return {
        "requests": account.requests,
        "prefilling": account.prefilling,
        "pending_prefill_tokens": account.pending_prefill_tokens,
        "decoding_tokens": account.decoding_tokens,
    }


def _account(report: LoadReport, now_s: float) -> Account:
    return Account(
        report.requests,
        report.prefilling,
        report.pending_prefill_tokens,
        report.decoding_tokens,
        report.promised_tokens,
        report.recent_tokens,
        now_s - report.recent_age_s,
    )


def _held(replica: str, report: HeldReport, now_s: float) -> HeldElsewhere:
    since_s = now_s - report.waited_s
    return HeldElsewhere(replica, report.number, report.tokens, since_s, report.kept, report.tenant, report.model)


def _ignore() -> None:
    """Default of ``on_load``."""


def _ignore_name(_: str) -> None:
    """Default of ``on_doubt``."""


def _ignore_drain(_: str, __: bool) -> None:
    """Default of ``on_drain``."""
