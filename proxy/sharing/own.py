"""State of this replica that others are to know, compared with what they were last sent."""

from __future__ import annotations

from typing import NamedTuple

from policies.admission.gate import AdmissionGate
from policies.admission.homes import Contexts
from policies.admission.line import Held
from policies.replicas.shared_sessions import SharedSessions
from policies.state import FleetState
from proxy.access.keys import Keys
from proxy.access.quotas import Quota
from proxy.fleet.breaker import BreakerState
from proxy.fleet.instances import Instances
from proxy.sharing.drains import DrainMarks
from proxy.sharing.store import ResponseTable
from proxy.sharing.wire import HeldReport, KeyReport, LoadReport, Message, Pin, SharedResponse

_PINS = 200
"""Most pins of one message: a receiver merges them in one turn of its event loop, in about a millisecond."""

_RESPONSES = 50
"""Most stored responses of one message, 8 KiB each at most."""
_FIRST_HELD = 8
"""Held requests of one message: as many can be sent in their order before the next message."""

_Load = tuple[int, int, int, int, int, float, float]
_IDLE = LoadReport()


class _HeldRow(NamedTuple):
    number: int
    tokens: int
    since_s: float
    kept: bool
    tenant: str
    model: str | None

    @classmethod
    def of(cls, held: Held, *, kept: bool) -> _HeldRow:
        """``kept``: its session is."""
        request = held.request
        return cls(held.number, request.prompt_tokens, held.since_s, kept, request.tenant.name, request.model)


class _Small(NamedTuple):
    """Parts that every message has."""

    open: tuple[str, ...]
    contexts: dict[str, Contexts]
    lost_shares: dict[str, float]
    held: int
    line: tuple[_HeldRow, ...]


class OwnState:
    """Makes the messages of one replica. Reads the state, and owns what was last sent of it."""

    def __init__(
        self,
        replica: str,
        run: int,
        state: FleetState,
        shared: SharedSessions,
        instances: Instances,
        keys: Keys,
        drains: DrainMarks,
        gate: AdmissionGate,
        responses: ResponseTable,
    ) -> None:
        """``gate``: has the requests that the admission rule holds."""
        self._replica = replica
        self._run = run
        self._state = state
        self._shared = shared
        self._instances = instances
        self._keys = keys
        self._drains = drains
        self._gate = gate
        self._responses = responses
        self._loads: dict[str, _Load] = {}
        self._quotas: dict[str, tuple[Quota, int]] = {}
        self._small = _Small((), {}, {}, 0, ())

    def begin(self) -> None:
        """Announce all sessions again, to a store that may have lost them; a full message must follow."""
        self._shared.announce_all()

    def message(self, now_s: float, unix_s: float, *, full: bool) -> Message | None:
        """Changes since the last message, or with ``full`` everything; None if nothing changed.

        Args:
            now_s: monotonic time.
            unix_s: the same moment as Unix time.
        """
        loads, keys = self._changed_loads(now_s, full), self._changed_keys(now_s, full)
        drains = self._drains.take_changed()
        if full:
            drains = self._drains.all()
        small, before = self._read_small(now_s), self._small
        self._small = small
        pins = tuple(
            Pin(
                session.encode("utf-8", "surrogatepass"),
                context.instance,
                context.tokens,
                unix_s - max(0.0, now_s - context.at_s),
                self._run,
            )
            for session, context in self._shared.take_changes(_PINS)
        )
        responses = tuple(SharedResponse(*each) for each in self._responses.take_learned(_RESPONSES))
        if not (full or loads or keys or drains or pins or responses or small != before):
            return None
        return Message(
            self._replica,
            self._run,
            full,
            loads=loads,
            keys=keys,
            drains=drains,
            open=small.open,
            contexts=small.contexts,
            lost_shares=small.lost_shares,
            held=small.held,
            line=tuple(
                HeldReport(row.number, row.tokens, max(0.0, now_s - row.since_s), row.kept, row.tenant, row.model)
                for row in small.line
            ),
            pins=pins,
            responses=responses,
        )

    def farewell(self) -> Message:
        """The last message."""
        return Message(self._replica, self._run, gone=True)

    def _changed_loads(self, now_s: float, full: bool) -> dict[str, LoadReport]:
        holds = self._state.holds if self._state.holds else None
        now: dict[str, _Load] = {}
        for name, account in self._state.ledger.accounts.items():
            now[name] = (
                account.requests,
                account.prefilling,
                account.pending_prefill_tokens,
                account.decoding_tokens,
                account.promised_tokens + (0 if holds is None else holds.tokens(name, now_s)),
                account.recent_tokens,
                account.recent_at_s,
            )
        before, self._loads = self._loads, now
        changed = {} if full else {name: _IDLE for name in before if name not in now}
        for name, load in now.items():
            if full or before.get(name) != load:
                changed[name] = LoadReport(*load[:6], recent_age_s=max(0.0, now_s - load[6]))
        return changed

    def _changed_keys(self, now_s: float, full: bool) -> dict[str, KeyReport]:
        changed = {}
        for name, quota in self._keys.quotas().items():
            if not quota.limited or (not full and self._quotas.get(name) == (quota, quota.changes)):
                continue
            self._quotas[name] = (quota, quota.changes)
            use = quota.use(now_s)
            changed[str(name)] = KeyReport(*use[:5], sessions=tuple(use.sessions))
        return changed

    def _read_small(self, now_s: float) -> _Small:
        accounts = self._state.accounts
        accounts.expire(now_s)
        return _Small(
            tuple(each.name for each in self._instances if each.breaker.state is BreakerState.OPEN),
            accounts.homes.contexts(),
            # They decay all the time, which alone is no news.
            {name: share for name, lost in accounts.losses.shares(now_s).items() if (share := round(lost, 2))},
            len(self._gate),
            tuple(
                _HeldRow.of(held, kept=kept)
                for held, kept in (self._gate.first(_FIRST_HELD, now_s) if self._gate else ())
            ),
        )
