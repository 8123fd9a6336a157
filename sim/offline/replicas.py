"""News between simulated replicas of the router: each piece of it arrives some time after it happened.

The proxy's replicas report their load and their sessions through a store (`proxy.sharing`), and each follows every
engine's KV events. Here both ways are delays: a report or an event counts on the other replicas once its time has
passed. Reports are of state, not changes, and are merged as `proxy.sharing.others` does.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from policies.ledger import Account, Ledger
from policies.replicas.shared_sessions import SharedSessions
from policies.state import FleetState
from policies.types import Decision, RequestView
from sim.offline.options import SimulatedReplicas


class _Load(NamedTuple):
    due_s: float
    replica: int
    instance: str
    account: Account


class _Pin(NamedTuple):
    due_s: float
    replica: int
    instance: str
    session: str
    prompt_tokens: int
    at_s: float


class _Computed(NamedTuple):
    due_s: float
    replica: int
    instance: str
    hashes: Sequence[int]


class ReplicaNews:
    """Reports between replicas that are still on their way; owns ``ledger.remote`` of every replica.

    Args:
        states: the replicas' states, with the same instances.
        options: the delays.
        seed: of the replicas' turns.
    """

    def __init__(self, states: Sequence[FleetState], options: SimulatedReplicas, seed: int) -> None:
        self._states = states
        self._staleness_s = options.staleness_s
        self._events_s = options.events_s
        self._reports: deque[_Load | _Pin] = deque()
        self._events: deque[_Computed] = deque()
        self._known: list[dict[str, Account]] = [{} for _ in states]
        """By replica: the last account of each instance that the others know."""
        draw = random.Random(f"{seed}/turns")
        for state in states:
            state.share(SharedSessions(), draw.getrandbits(62))

    def routed(self, replica: int, request: RequestView, decision: Decision, now_s: float) -> None:
        """A replica has counted a decision."""
        self.changed(replica, decision, now_s)
        if request.session_id:
            due_s, prompt = now_s + self._staleness_s, request.prompt_tokens
            self._reports.append(_Pin(due_s, replica, decision.decode_on, request.session_id, prompt, now_s))

    def changed(self, replica: int, decision: Decision, now_s: float) -> None:
        """The load that a decision is counted with has changed."""
        ledger, holds = self._states[replica].ledger, self._states[replica].holds
        for instance in (decision.decode_on, decision.prefill_on):
            if instance is not None:
                account = replace(ledger.account(instance))
                account.promised_tokens += holds.tokens(instance, now_s) if holds else 0
                self._reports.append(_Load(now_s + self._staleness_s, replica, instance, account))

    def computed(self, replica: int, instance: str, request: RequestView, now_s: float) -> None:
        """An instance has computed a prompt, so its KV events have the blocks; ``replica`` sent it and knows them."""
        if self._events_s is not None and request.block_hashes:
            self._events.append(_Computed(now_s + self._events_s, replica, instance, request.block_hashes))

    def deliver(self, now_s: float) -> None:
        """Merge what has arrived by now."""
        reports, events = self._reports, self._events
        while reports and reports[0].due_s <= now_s:
            report = reports.popleft()
            if isinstance(report, _Load):
                self._take_load(report)
            else:
                self._take_pin(report)
        while events and events[0].due_s <= now_s:
            event = events.popleft()
            for state in self._others(event.replica):
                state.index.insert(event.instance, event.hashes)

    def _take_load(self, report: _Load) -> None:
        known = self._known[report.replica]
        before = known.get(report.instance) or Account(recent_at_s=report.account.recent_at_s)
        known[report.instance] = report.account
        for state in self._others(report.replica):
            _replace_part(state.ledger, report.instance, before, report.account)

    def _take_pin(self, pin: _Pin) -> None:
        for state in self._others(pin.replica):
            state.pinned_elsewhere(pin.session, pin.instance, pin.prompt_tokens, pin.at_s)

    def _others(self, replica: int) -> list[FleetState]:
        return [state for number, state in enumerate(self._states) if number != replica]


def _replace_part(ledger: Ledger, instance: str, before: Account, now: Account) -> None:
    """Replace one replica's part of the sum that ``ledger.remote`` has of an instance."""
    total = ledger.remote.get(instance)
    if total is None:
        total = ledger.remote[instance] = Account(recent_at_s=now.recent_at_s)
    total.requests += now.requests - before.requests
    total.prefilling += now.prefilling - before.prefilling
    total.pending_prefill_tokens += now.pending_prefill_tokens - before.pending_prefill_tokens
    total.decoding_tokens += now.decoding_tokens - before.decoding_tokens
    total.promised_tokens += now.promised_tokens - before.promised_tokens
    if now.recent_at_s != before.recent_at_s or now.recent_tokens != before.recent_tokens:
        at_s = max(total.recent_at_s, now.recent_at_s)
        added = ledger.recent_tokens(now, at_s) - ledger.recent_tokens(before, at_s)
        total.recent_tokens = max(0.0, ledger.recent_tokens(total, at_s) + added)
        total.recent_at_s = at_s
