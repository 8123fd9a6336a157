"""The line of held requests: who is sent when room appears, and after how long at the latest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Set
from heapq import nsmallest
from itertools import count
from math import inf

from policies.admission.accounts import SessionAccounts
from policies.admission.base import (
    MAX_HOLD_S,
    AdmissionReason,
    AdmissionRule,
    AdmissionView,
    Admit,
    Hold,
    SessionView,
)
from policies.admission.elsewhere import LineElsewhere, RoomElsewhere, rank
from policies.admission.guard import GuardedRule
from policies.admission.homes import Contexts, sums_of
from policies.admission.line import (
    FIRST,
    NOBODY,
    Flows,
    Held,
    HeldCounts,
    LinePlace,
    Places,
    in_parts,
    rank_of,
    tenant_of,
    tokens_of,
)
from policies.admission.never_hold import NeverHold
from policies.admission.room import ONE_PART, WHOLE, Part, Parts, Room
from policies.admission.selection import HeldIndex
from policies.fairness import TenantShares
from policies.types import RequestView

LOOK_S = 1.0
"""Seconds between two looks at the line, apart from those that an event causes; a hold exceeds its bound by no more."""
_FAILED = Admit(AdmissionReason.RULE_FAILED)
OfferObserver = Callable[[RequestView, SessionView, AdmissionView, Admit | Hold], None]
_NEW = Hold(AdmissionReason.LINE_FULL)
"""Stand-in for the answer to a request that is not held yet."""


class AdmissionGate:
    """Decides with a rule and keeps the line. Synchronous; the caller sends what ``examine`` returns.

    Order: fewest tokens first, since short ones take little room and their sessions are served sooner on average; a
    request that has waited ``w`` seconds counts ``tokens / (1 + w / AGING_S)``. Requests of several tenants take turns
    (`policies.fairness`), each tenant's in this order. One that does not fit does not block the others. After
    ``max_hold_s`` it is sent regardless, so no request waits longer.

    Each part of a fleet (``Room.parts``) is judged by its own pools, contexts, losses and held requests: those for
    other models neither hold a request nor make room for it.

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
        self._held = HeldCounts()
        self._numbers = count(1)
        self.elsewhere = LineElsewhere()
        """Requests held by other replicas, set by who hears of them."""
        self._parts = ONE_PART
        self._flows = Flows()
        self.guard = GuardedRule(rule)
        self.on_offer: OfferObserver | None = None
        """Called with the answer to every new request and the views that it was given on; None: by nobody."""
        self.set_rule(rule, max_hold_s, 0.0)

    def set_rule(self, rule: AdmissionRule, max_hold_s: float, now_s: float) -> None:
        """Another rule and bound; held requests stay in line and are judged by it at the next look."""
        self.guard.set_rule(rule)
        self.never_holds = isinstance(rule, NeverHold)
        self.max_hold_s = max_hold_s
        self.accounts.defer(self.never_holds)
        self.accounts.set_keep(rule.keep_s, now_s)

    @property
    def rule(self) -> AdmissionRule:
        """Its rule."""
        return self.guard.rule

    def __len__(self) -> int:
        return len(self._line)

    def _for(self, request: RequestView, room: Room) -> Room:
        """The room in the part of the fleet that serves a request's model; ``room``: that of the whole fleet."""
        self._divide(room.parts)
        return room.within(room.parts.of(request.model))

    def _divide(self, parts: Parts) -> None:
        if parts is not self._parts:
            self._held.divide(parts)
            self._flows.divide(self._parts, parts, self._held.by_model)
            self._parts = parts

    def offer(self, request: RequestView, room: Room, now_s: float) -> Admit | Held:
        """A new request: send it now, or hold it. ``room``: that of the whole fleet."""
        room = self._for(request, room)
        waiting = self._held.by_part[room.part]
        place = self._place_of(request, room.part, now_s) if self._explains or not self._selects else FIRST
        others = self._others(self.elsewhere, room.part, now_s)
        answer = self._ask(request, 0.0, place, waiting, room, now_s, others, self.on_offer)
        if isinstance(answer, Admit):
            self._passed(answer, request, room.part, now_s)
            return answer
        if not waiting:
            self._flows.begin(room.part, now_s)
        held = Held(request, now_s, answer)
        held.number = next(self._numbers)
        self._line[held] = None
        self._held.add(held, room.part)
        self._index.add(held.number, held, request, now_s)
        self.shares.join(request.tenant, now_s)
        return held

    def held_beside(self, request: RequestView) -> int:
        """Requests held, by any replica, in the part of the fleet that serves this one's model."""
        part = self._parts.of(request.model)
        return self._held.by_part[part] + self._held_elsewhere(part)

    def answer(self, request: RequestView, room: Room, now_s: float) -> Admit | Hold:
        """The answer that ``offer`` would give; no request and no session is changed."""
        room = self._for(request, room)
        place, waiting = self._place_of(request, room.part, now_s), self._held.by_part[room.part]
        others = self._others(self.elsewhere.copy(), room.part, now_s)
        return self._ask(request, 0.0, place, waiting, room, now_s, others)

    def observe_offer(self, request: RequestView, room: Room, now_s: float) -> None:
        """Report a new request to ``on_offer`` that was sent without asking the rule; no session is changed."""
        if self.on_offer is not None:
            self.accounts.expire(now_s)
            session = self.accounts.view(request.context_id, now_s)
            room = self._for(request, room)
            fleet = self._fleet_view(self._held.by_part[room.part], 0.0, room, now_s)
            self.on_offer(request, session, fleet, self.sent_at_once)

    def by_part(self, room: Room, now_s: float) -> list[tuple[Part, AdmissionView]]:
        """Each part of the fleet as its requests see it; empty: the fleet is one.

        ``held`` is without other replicas' requests, of which only the first are known.
        """
        self._divide(room.parts)
        views = [(part, self._fleet_view(0, 0.0, room.within(part), now_s)) for part in self._parts.each]
        return [(part, view._replace(held=self._held.by_part[part])) for part, view in views]

    def line(self, now_s: float) -> list[Held]:
        """Held requests in the order in which they are looked at."""
        return self._in_turns(sorted(self._line, key=lambda each: rank_of(each, now_s)), now_s)

    def first(self, count: int, now_s: float) -> list[tuple[Held, bool]]:
        """The ``count`` held requests of lowest rank in each part, and whether the session of each is kept."""
        lines = in_parts(self._line, self._parts).values()
        first = [held for line in lines for held in nsmallest(count, line, key=lambda each: rank_of(each, now_s))]
        return [(held, self.accounts.view(held.request.context_id, now_s).kept) for held in first]

    def leave(self, held: Held) -> None:
        """The client of a held request has left."""
        if held in self._line:
            del self._line[held]
            part = self._parts.of(held.request.model)
            self._held.remove(held, part)
            if part not in self._held.by_part:
                self._flows.end(part)
            self._index.remove(held.number)
            self.shares.leave(held.request.tenant)

    def examine(self, room: Room, now_s: float, stuck: Collection[Held] = NOBODY) -> Held | None:
        """The next request that may be sent, taken out of the line; the caller sends it and asks again.

        Args:
            room: that of the whole fleet.
            now_s: the time.
            stuck: requests that could not be sent now, for another reason than the rule's.
        """
        self._divide(room.parts)
        if self._selects and not stuck:
            return self._examine_selected(room, now_s)
        look = _Look(self, self.elsewhere, room, now_s)
        for held in self._line if self.never_holds else self.line(now_s):
            waited_s = now_s - held.since_s
            place = look.place(held)
            if held in stuck:
                continue
            if waited_s >= self.max_hold_s:
                answer: Admit | Hold = Admit(AdmissionReason.HELD_LONG_ENOUGH)
            else:
                answer = look.ask(held, place)
            if isinstance(answer, Admit):
                self._passed(answer, held.request, self._parts.of(held.request.model), now_s)
                self.leave(held)
                held.admitted = answer
                return held
        return None

    @property
    def _selects(self) -> bool:
        """True if requests that are held for certain are passed over; never where tenants or replicas take turns."""
        alone = self.accounts.shared is None and not self.elsewhere
        return self.guard.selective is not None and alone and not self.shares.contended

    def _examine_selected(self, room: Room, now_s: float) -> Held | None:
        """As ``examine``, among the requests that the rule may send."""
        index, accounts = self._index, self.accounts
        accounts.expire(now_s)
        kept = accounts.kept_of(index.sessions)
        sent, last = None, (-inf, 0)
        look = _Look(self, None, room, now_s)
        for ranked, number, held in self._candidates(kept, look, now_s):
            last, waited_s = (ranked, number), now_s - held.since_s
            answer: Admit | Hold = Admit(AdmissionReason.HELD_LONG_ENOUGH)
            if waited_s < self.max_hold_s:
                answer = look.ask(held, FIRST)
            if isinstance(answer, Admit):
                sent, held.admitted = held, answer
                self._passed(answer, held.request, self._parts.of(held.request.model), now_s)
                break
        for session in index.held_before(kept, last if sent else (inf, 0), now_s):
            accounts.still_held(session, now_s)
        if sent is not None:
            self.leave(sent)
        return sent

    def _candidates(self, kept: Set[str], look: _Look, now_s: float) -> Iterator[tuple[float, int, Held]]:
        """Requests that the rule may send, in the order of the line, each once."""
        index, accounts, last = self._index, self.accounts, (-inf, 0)
        in_flight = list(index.of_sessions(accounts.in_flight_of(index.sessions)))
        contexts: Contexts | None = None
        # Again after a context was found evicted: there is more room for those behind.
        while contexts != accounts.contexts():
            contexts = accounts.contexts()
            views = look.fleets()
            others = (*in_flight, *index.of_sessions(kept, self.guard.longest_sent(views, kept=True)))
            for each in index.candidates(self.guard.longest_sent(views, kept=False), others, self.max_hold_s, now_s):
                if each[:2] <= last:
                    continue
                last = each[:2]
                yield each
                if accounts.contexts() != contexts:
                    break

    def reasons(self, count: int, room: Room, now_s: float) -> list[tuple[Held, Hold]]:
        """The first ``count`` of the line, each with the reason for which it is still held; none is changed.

        The reason of its offer for one that would be sent at the next look.
        """
        self._divide(room.parts)
        found: list[tuple[Held, Hold]] = []
        look = _Look(self, self.elsewhere.copy(), room, now_s)
        for held in self.line(now_s)[:count]:
            session = self.accounts.view(held.request.context_id, now_s, now_s - held.since_s)
            answer = look.ask(held, look.place(held), session)
            found.append((held, answer if isinstance(answer, Hold) else held.hold))
        return found

    def _in_turns(self, ranked: list[Held], now_s: float) -> list[Held]:
        """The line with the tenants of each part in turns; parts keep the places that their requests have by rank."""
        if not self.shares.contended:
            return ranked
        lines = in_parts(ranked, self._parts).items()
        turns = {part: iter(self.shares.interleaved(line, tenant_of, tokens_of, now_s)) for part, line in lines}
        return [next(turns[self._parts.of(held.request.model)]) for held in ranked]

    def _place_of(self, request: RequestView, part: Part, now_s: float) -> LinePlace:
        """The place that a new request would have among those of the part."""
        if not self._line:
            return FIRST
        line = [held for held in self._line if self._parts.of(held.request.model) is part]
        if not self.shares.contends(request.tenant):
            tokens = [held.request.prompt_tokens for held in line if rank_of(held, now_s) <= request.prompt_tokens]
            return LinePlace(len(tokens), sum(tokens), len(tokens))
        newcomer = Held(request, now_s, _NEW)
        # Behind those of its own rank, as they have waited.
        ranked = sorted((*line, newcomer), key=lambda each: rank_of(each, now_s))
        ordered = self.shares.interleaved(ranked, tenant_of, tokens_of, now_s, request.tenant)
        before = [held.request for held in ordered[: ordered.index(newcomer)]]
        own = sum(1 for each in before if each.tenant.name == request.tenant.name)
        return LinePlace(len(before), sum(each.prompt_tokens for each in before), own)

    def _ask(
        self,
        request: RequestView,
        waited_s: float,
        place: LinePlace,
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
        expected_s = self._flows.wait_s(room.part, place.tokens + request.prompt_tokens, now_s)
        fleet = self._fleet_view(held, expected_s, room, now_s)
        if others is not None:
            fleet = others.left(request.tenant.name, rank(request.prompt_tokens, waited_s), fleet)
        if session is None:
            session = accounts.view_of(request, now_s, waited_s)
        answer = self.guard.answer(request, session, fleet)
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

    def _others(self, line: LineElsewhere, part: Part, now_s: float) -> RoomElsewhere | None:
        """The room of a part that other replicas' requests take in one look at the line; None if they hold none."""
        return RoomElsewhere(line.within(part, self._parts), self.guard.answer, now_s) if line else None

    def _fleet_view(self, held: int, expected_s: float, room: Room, now_s: float) -> AdmissionView:
        accounts, part = self.accounts, room.part
        remote, uses, gaps = accounts.remote, accounts.homes.uses(room.each), accounts.gaps
        contexts = remote.beside(accounts.contexts()) if part is WHOLE else sums_of(uses)
        return AdmissionView(
            room.pool_tokens,
            *contexts,
            accounts.losses.share(room.instances, now_s, part) + remote.lost_share(room.instances, part),
            gaps.return_share,
            room.instances,
            room.prefilling,
            held + self._held_elsewhere(part),
            expected_s,
            self.max_hold_s,
            uses,
            gaps.mean_s,
            accounts.prefill,
        )

    def _held_elsewhere(self, part: Part) -> int:
        return self.accounts.remote.held if part is WHOLE else len(self.elsewhere.within(part, self._parts))

    def _passed(self, answer: Admit, request: RequestView, part: Part, now_s: float) -> None:
        if answer.reason is not AdmissionReason.RESIDENT:
            self._flows.add(part, request.prompt_tokens, now_s)


class _Look:
    """One look at the line, with the room and the places in each part of the fleet."""

    def __init__(self, gate: AdmissionGate, elsewhere: LineElsewhere | None, room: Room, now_s: float) -> None:
        """``elsewhere``: requests that other replicas hold; None: not to be asked about."""
        self._gate = gate
        self._elsewhere = elsewhere
        self._room = room
        self._now_s = now_s
        self._places = Places()
        self._parts: dict[Part, tuple[Room, RoomElsewhere | None]] = {}

    def place(self, held: Held) -> LinePlace:
        """The place of the next request of the line."""
        return self._places.next(held.request, self._room.parts.of(held.request.model))

    def ask(self, held: Held, place: LinePlace, session: SessionView | None = None) -> Admit | Hold:
        """The rule's answer for a held request."""
        gate, now_s = self._gate, self._now_s
        room, others = self._of(self._room.parts.of(held.request.model))
        waiting = gate._held.by_part[room.part] - 1
        waited_s = now_s - held.since_s
        return gate._ask(held.request, waited_s, place, waiting, room, now_s, others, session=session)

    def fleets(self) -> list[AdmissionView]:
        """The fleet, or those of its parts for which requests are held."""
        gate = self._gate
        rooms = [self._of(part)[0] for part in gate._held.by_part]
        return [gate._fleet_view(gate._held.by_part[room.part] - 1, 0.0, room, self._now_s) for room in rooms]

    def _of(self, part: Part) -> tuple[Room, RoomElsewhere | None]:
        found = self._parts.get(part)
        if found is None:
            gate, line = self._gate, self._elsewhere
            others = gate._others(line, part, self._now_s) if line is not None else None
            found = self._parts[part] = self._room.within(part), others
        return found
