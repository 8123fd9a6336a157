"""The line of held requests: who is sent when room appears, and after how long at the latest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Set
from heapq import nsmallest
from itertools import count
from math import inf, isnan
from typing import NamedTuple

from policies.admission.accounts import SessionAccounts
from policies.admission.base import (
    MAX_HOLD_S,
    AdmissionReason,
    AdmissionRule,
    AdmissionView,
    Admit,
    Hold,
    SessionView,
    checked_answer,
)
from policies.admission.elsewhere import LineElsewhere, RoomElsewhere, rank
from policies.admission.flow import AdmittedFlow
from policies.admission.homes import Contexts
from policies.admission.never_hold import NeverHold
from policies.admission.selection import HeldIndex, SelectiveRule
from policies.fairness import TenantShares
from policies.types import PolicyFailedError, PolicyFailure, PolicyPart, RequestView, Tenant

LOOK_S = 1.0
"""Seconds between two looks at the line, apart from those that an event causes; a hold exceeds its bound by no more."""
_FAILED = Admit(AdmissionReason.RULE_FAILED)


class Room(NamedTuple):
    """The instances that can be chosen, as a whole."""

    pool_tokens: int
    """Their KV pools; 0: unknown."""
    instances: int
    prefilling: int = 0
    """Requests in flight on them without a first token yet."""
    each: tuple[tuple[str, int, int], ...] = ()
    """Name, KV pool (0: unknown) and ``prefilling`` of each."""


class Held:
    """A held request."""

    __slots__ = ("admitted", "hold", "number", "request", "since_s")

    def __init__(self, request: RequestView, since_s: float, hold: Hold) -> None:
        self.request = request
        self.since_s = since_s
        self.hold = hold
        """Reason for its wait, as of the offer; ``AdmissionGate.reasons`` has that of now."""
        self.admitted: Admit | None = None
        """Set when it may be sent."""
        self.number = 0
        """Unique among those of its gate."""


NOBODY = frozenset[Held]()
OfferObserver = Callable[[RequestView, SessionView, AdmissionView, Admit | Hold], None]


class _Place(NamedTuple):
    """Requests before one in line."""

    ahead: int = 0
    tokens: int = 0
    """Their prompt tokens."""
    of_tenant: int = 0
    """Those of its own tenant."""


_FIRST = _Place()
_NEW = Hold(AdmissionReason.LINE_FULL)
"""Stand-in for the answer to a request that is not held yet."""


class AdmissionGate:
    """Decides with a rule and keeps the line. Synchronous; the caller sends what ``examine`` returns.

    Order: fewest tokens first, since short ones take little room and their sessions are served sooner on average; a
    request that has waited ``w`` seconds counts ``tokens / (1 + w / AGING_S)``. Requests of several tenants take turns
    (`policies.fairness`), each tenant's in this order. One that does not fit does not block the others. After
    ``max_hold_s`` it is sent regardless, so no request waits longer.

    Where other replicas hold requests too (``elsewhere``), those of the same tenant that go before one of these get
    the room that there is first (`policies.admission.elsewhere`): each replica sends its own part of one line.
    """

    def __init__(
        self, rule: AdmissionRule, accounts: SessionAccounts, max_hold_s: float = MAX_HOLD_S, *, explains: bool = True
    ) -> None:
        """``explains``: the answer to an offer has its place in line and expected wait, which takes O(held)."""
        self.accounts = accounts
        self._explains = explains
        self._index: HeldIndex[Held] = HeldIndex()
        self.shares = TenantShares()
        """Turns of the tenants; the caller counts there what it sends."""
        self.sent_at_once = Admit(AdmissionReason.NEVER_HOLDS)
        self._line: dict[Held, None] = {}
        self._numbers = count(1)
        self.elsewhere = LineElsewhere()
        """Requests held by other replicas, set by who hears of them."""
        self._flow = AdmittedFlow()
        self.on_failure: Callable[[PolicyFailure], None] | None = None
        """Called when the rule fails, after which the request is sent at once; None: its failure is raised."""
        self.on_offer: OfferObserver | None = None
        """Called with the answer to every new request and the views that it was given on; None: by nobody."""
        self.set_rule(rule, max_hold_s, 0.0)

    def set_rule(self, rule: AdmissionRule, max_hold_s: float, now_s: float) -> None:
        """Another rule and bound; held requests stay in line and are judged by it at the next look."""
        self.rule = rule
        self._selective = rule if isinstance(rule, SelectiveRule) else None
        self.never_holds = isinstance(rule, NeverHold)
        self.max_hold_s = max_hold_s
        self.accounts.defer(self.never_holds)
        self.accounts.set_keep(rule.keep_s, now_s)

    def __len__(self) -> int:
        return len(self._line)

    def offer(self, request: RequestView, room: Room, now_s: float) -> Admit | Held:
        """A new request: send it now, or hold it."""
        place = self._place_of(request, now_s) if self._explains or not self._selects else _FIRST
        answer = self._ask(request, 0.0, place, len(self._line), room, now_s, self._others(now_s), self.on_offer)
        if isinstance(answer, Admit):
            self._passed(answer, request, now_s)
            return answer
        if not self._line:
            self._flow.begin(now_s)
        held = Held(request, now_s, answer)
        held.number = next(self._numbers)
        self._line[held] = None
        self._index.add(held.number, held, request, now_s)
        self.shares.join(request.tenant, now_s)
        return held

    def answer(self, request: RequestView, room: Room, now_s: float) -> Admit | Hold:
        """The answer that ``offer`` would give; nothing is changed."""
        place = self._place_of(request, now_s)
        others = RoomElsewhere(self.elsewhere.copy(), self._judged, now_s) if self.elsewhere else None
        return self._ask(request, 0.0, place, len(self._line), room, now_s, others)

    def observe_offer(self, request: RequestView, room: Room, now_s: float) -> None:
        """Report a new request to ``on_offer`` that was sent without asking the rule; no session is changed."""
        if self.on_offer is not None:
            self.accounts.expire(now_s)
            session = self.accounts.view(request.session_id, now_s)
            self.on_offer(request, session, self._fleet_view(len(self._line), 0.0, room, now_s), self.sent_at_once)

    def line(self, now_s: float) -> list[Held]:
        """Held requests in the order in which they are looked at."""
        return self._in_turns(sorted(self._line, key=lambda each: _rank(each, now_s)), now_s)

    def first(self, count: int, now_s: float) -> list[tuple[Held, bool]]:
        """The ``count`` held requests of lowest rank, and whether the session of each is kept."""
        first = nsmallest(count, self._line, key=lambda each: _rank(each, now_s))
        return [(held, self.accounts.view(held.request.session_id, now_s).kept) for held in first]

    def leave(self, held: Held) -> None:
        """The client of a held request has left."""
        if held in self._line:
            del self._line[held]
            self._index.remove(held.number)
            self.shares.leave(held.request.tenant)

    def examine(self, room: Room, now_s: float, stuck: Collection[Held] = NOBODY) -> Held | None:
        """The next request that may be sent, taken out of the line; the caller sends it and asks again.

        ``stuck``: requests that could not be sent now, for another reason than the rule's.
        """
        if self._selects and not stuck:
            return self._examine_selected(room, now_s)
        ahead, ahead_tokens = 0, 0
        by_tenant: dict[str, int] = {}
        others = self._others(now_s)
        for held in self._line if self.never_holds else self.line(now_s):
            waited_s = now_s - held.since_s
            name = held.request.tenant.name
            place = _Place(ahead, ahead_tokens, by_tenant.get(name, 0))
            ahead, ahead_tokens = ahead + 1, ahead_tokens + held.request.prompt_tokens
            by_tenant[name] = place.of_tenant + 1
            if held in stuck:
                continue
            if waited_s >= self.max_hold_s:
                answer: Admit | Hold = Admit(AdmissionReason.HELD_LONG_ENOUGH)
            else:
                answer = self._ask(held.request, waited_s, place, len(self._line) - 1, room, now_s, others)
            if isinstance(answer, Admit):
                self._passed(answer, held.request, now_s)
                self.leave(held)
                held.admitted = answer
                return held
        return None

    @property
    def _selects(self) -> bool:
        """True if requests that are held for certain are passed over; never where tenants or replicas take turns."""
        alone = self.accounts.shared is None and not self.elsewhere
        return self._selective is not None and alone and not self.shares.contended

    def _examine_selected(self, room: Room, now_s: float) -> Held | None:
        """As ``examine``, among the requests that the rule may send."""
        index, accounts = self._index, self.accounts
        accounts.expire(now_s)
        kept = accounts.kept_of(index.sessions)
        sent, last = None, (-inf, 0)
        for rank_of, number, held in self._candidates(kept, room, now_s):
            last, waited_s = (rank_of, number), now_s - held.since_s
            answer: Admit | Hold = Admit(AdmissionReason.HELD_LONG_ENOUGH)
            if waited_s < self.max_hold_s:
                answer = self._ask(held.request, waited_s, _FIRST, len(self._line) - 1, room, now_s)
            if isinstance(answer, Admit):
                sent, held.admitted = held, answer
                self._passed(answer, held.request, now_s)
                break
        for session in index.held_before(kept, last if sent else (inf, 0), now_s):
            accounts.still_held(session, now_s)
        if sent is not None:
            self.leave(sent)
        return sent

    def _candidates(self, kept: Set[str], room: Room, now_s: float) -> Iterator[tuple[float, int, Held]]:
        """Requests that the rule may send, in the order of the line, each once."""
        index, accounts, last = self._index, self.accounts, (-inf, 0)
        in_flight = list(index.of_sessions(accounts.in_flight_of(index.sessions)))
        contexts: Contexts | None = None
        # Again after a context was found evicted: there is more room for those behind.
        while contexts != accounts.contexts():
            contexts = accounts.contexts()
            fleet = self._fleet_view(len(self._line) - 1, 0.0, room, now_s)
            others = (*in_flight, *index.of_sessions(kept, self._longest_sent(fleet, kept=True)))
            for each in index.candidates(self._longest_sent(fleet, kept=False), others, self.max_hold_s, now_s):
                if each[:2] <= last:
                    continue
                last = each[:2]
                yield each
                if accounts.contexts() != contexts:
                    break

    def _longest_sent(self, fleet: AdmissionView, *, kept: bool) -> float:
        """The rule's bound; none if it failed, so that it is asked about every request."""
        assert self._selective is not None
        try:
            longest = float(self._selective.longest_sent(fleet, kept))
        except Exception as error:
            failure = self._failure(error)
            if self.on_failure is None:
                raise PolicyFailedError(failure, None) from error
            self.on_failure(failure)
            return inf
        return inf if isnan(longest) else longest

    def reasons(self, count: int, room: Room, now_s: float) -> list[tuple[Held, Hold]]:
        """The first ``count`` of the line, each with the reason for which it is still held; changes nothing.

        The reason of its offer for one that would be sent at the next look.
        """
        found: list[tuple[Held, Hold]] = []
        place = _FIRST
        others = RoomElsewhere(self.elsewhere.copy(), self._judged, now_s) if self.elsewhere else None
        by_tenant: dict[str, int] = {}
        for held in self.line(now_s)[:count]:
            request, waited_s = held.request, now_s - held.since_s
            place = place._replace(of_tenant=by_tenant.get(request.tenant.name, 0))
            session = self.accounts.view(request.session_id, now_s, waited_s)
            answer = self._ask(request, waited_s, place, len(self._line) - 1, room, now_s, others, session=session)
            found.append((held, answer if isinstance(answer, Hold) else held.hold))
            by_tenant[request.tenant.name] = place.of_tenant + 1
            place = _Place(place.ahead + 1, place.tokens + request.prompt_tokens)
        return found

    def _in_turns(self, ranked: list[Held], now_s: float) -> list[Held]:
        if not self.shares.contended:
            return ranked
        return self.shares.interleaved(ranked, _tenant_of, _tokens_of, now_s)

    def _place_of(self, request: RequestView, now_s: float) -> _Place:
        """Place that a new request would have."""
        if not self._line:
            return _FIRST
        if not self.shares.contends(request.tenant):
            tokens = [held.request.prompt_tokens for held in self._line if _rank(held, now_s) <= request.prompt_tokens]
            return _Place(len(tokens), sum(tokens), len(tokens))
        newcomer = Held(request, now_s, _NEW)
        # Behind those of its own rank, as they have waited.
        ranked = sorted((*self._line, newcomer), key=lambda each: _rank(each, now_s))
        ordered = self.shares.interleaved(ranked, _tenant_of, _tokens_of, now_s, request.tenant)
        before = [held.request for held in ordered[: ordered.index(newcomer)]]
        own = sum(1 for each in before if each.tenant.name == request.tenant.name)
        return _Place(len(before), sum(each.prompt_tokens for each in before), own)

    def _ask(
        self,
        request: RequestView,
        waited_s: float,
        place: _Place,
        held: int,
        room: Room,
        now_s: float,
        others: RoomElsewhere | None = None,
        observer: OfferObserver | None = None,
        session: SessionView | None = None,
    ) -> Admit | Hold:
        """The rule's answer. ``session``: the request's, if the question is not to change it."""
        accounts = self.accounts
        accounts.expire(now_s)
        expected_s = self._flow.wait_s(place.tokens + request.prompt_tokens, now_s) if self._line else 0.0
        fleet = self._fleet_view(held, expected_s, room, now_s)
        if others is not None:
            fleet = others.left(request.tenant.name, rank(request.prompt_tokens, waited_s), fleet)
        if session is None:
            session = accounts.view_of(request, now_s, waited_s)
        answer = self._judged(request, session, fleet)
        if answer is None:
            return _FAILED
        if observer is not None:
            observer(request, session, fleet, answer)
        if isinstance(answer, Admit):
            return answer
        return answer._replace(
            expected_wait_s=expected_s,
            behind=place.ahead,
            tenant=request.tenant.name,
            behind_in_tenant=place.of_tenant,
        )

    def _others(self, now_s: float) -> RoomElsewhere | None:
        """The room that other replicas' requests take in one look at the line; None if they hold none."""
        return RoomElsewhere(self.elsewhere, self._judged, now_s) if self.elsewhere else None

    def _judged(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold | None:
        """The rule's answer; None if it failed."""
        try:
            return checked_answer(self.rule.name, self.rule.admit(request, session, fleet))
        except Exception as error:
            failure = self._failure(error)
            if self.on_failure is None:
                raise PolicyFailedError(failure, request.request_id) from error
            self.on_failure(failure)
            return None

    def _failure(self, error: Exception) -> PolicyFailure:
        return PolicyFailure.of(PolicyPart.ADMISSION, self.rule.name, error)

    def _fleet_view(self, held: int, expected_s: float, room: Room, now_s: float) -> AdmissionView:
        accounts = self.accounts
        remote = accounts.remote
        active_sessions, active_tokens, kept_sessions, kept_tokens = accounts.contexts()
        return AdmissionView(
            room.pool_tokens,
            active_sessions + remote.active_sessions,
            active_tokens + remote.active_tokens,
            kept_sessions + remote.kept_sessions,
            kept_tokens + remote.kept_tokens,
            accounts.lost_share(room.instances, now_s) + remote.lost_share,
            accounts.return_share,
            room.instances,
            room.prefilling,
            held + remote.held,
            expected_s,
            self.max_hold_s,
            accounts.homes.uses(room.each),
        )

    def _passed(self, answer: Admit, request: RequestView, now_s: float) -> None:
        if self._line and answer.reason is not AdmissionReason.RESIDENT:
            self._flow.add(request.prompt_tokens, now_s)


def _rank(held: Held, now_s: float) -> float:
    return rank(held.request.prompt_tokens, now_s - held.since_s)


def _tenant_of(held: Held) -> Tenant:
    return held.request.tenant


def _tokens_of(held: Held) -> int:
    return held.request.prompt_tokens
