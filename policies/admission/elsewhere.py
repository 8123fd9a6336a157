"""Requests that other replicas hold: their places in the common line, and the room that goes to them first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from policies.admission.base import AdmissionView, Admit, Hold, InstanceUse, SessionView
from policies.admission.room import WHOLE, Part, Parts
from policies.types import RequestView

AGING_S = 30.0
"""A request that waited for this long counts half its tokens in the order of the line."""
YIELD_S = 1.0
"""Longest time for which room is left to a request that another replica could send but does not."""


class HeldElsewhere(NamedTuple):
    """A request held by another replica."""

    replica: str
    number: int
    """Unique among those of its replica."""
    tokens: int
    """Length of its prompt."""
    since_s: float
    """Time since which it has been held, on this process's clock."""
    kept: bool = False
    """Its session is kept (`policies.admission.base.SessionView`)."""
    tenant: str = ""
    model: str | None = None
    """Model that it asks for; None: not known."""


def rank(tokens: int, waited_s: float) -> float:
    """Sort key of the line, lowest first; ``waited_s``: seconds held."""
    return tokens / (1.0 + waited_s / AGING_S)


Ask = Callable[[RequestView, SessionView, AdmissionView], Admit | Hold | None]
"""The rule; None: it failed."""


class LineElsewhere:
    """The first held requests of all other replicas, and since when each could have been sent."""

    def __init__(self) -> None:
        self._line: tuple[HeldElsewhere, ...] = ()
        self._could_be_sent: dict[tuple[str, int], float] = {}

    def __len__(self) -> int:
        return len(self._line)

    def copy(self) -> LineElsewhere:
        """A copy, for looks that must not change when requests could be sent."""
        made = LineElsewhere()
        made._line, made._could_be_sent = self._line, dict(self._could_be_sent)
        return made

    def within(self, part: Part, parts: Parts) -> LineElsewhere:
        """Those for models of a part; with the times since which they could have been sent, not a copy of them."""
        if part is WHOLE:
            return self
        made = LineElsewhere()
        made._line = tuple([held for held in self._line if parts.of(held.model) is part])
        made._could_be_sent = self._could_be_sent
        return made

    def replace(self, line: Iterable[HeldElsewhere]) -> None:
        """Set those that the others hold now."""
        self._line = tuple(line)
        known = {(each.replica, each.number) for each in self._line}
        self._could_be_sent = {key: since_s for key, since_s in self._could_be_sent.items() if key in known}

    def ranked(self, now_s: float) -> list[HeldElsewhere]:
        """Those in the order of the line."""
        return sorted(self._line, key=lambda each: rank(each.tokens, now_s - each.since_s))

    def yields(self, held: HeldElsewhere, now_s: float) -> bool:
        """Leave room to a request that could be sent: true for ``YIELD_S``, in which its replica does or cannot."""
        return now_s - self._could_be_sent.setdefault((held.replica, held.number), now_s) <= YIELD_S

    def waits_again(self, held: HeldElsewhere) -> None:
        """The request cannot be sent now."""
        self._could_be_sent.pop((held.replica, held.number), None)


class RoomElsewhere:
    """One look at the line: the room that others' requests take before own ones."""

    def __init__(self, line: LineElsewhere, ask: Ask, now_s: float) -> None:
        self._line = line
        self._waiting = line.ranked(now_s)
        self._ask = ask
        self._now_s = now_s
        self._taken: list[tuple[HeldElsewhere, frozenset[str]]] = []

    def left(self, tenant: str, own_rank: float, fleet: AdmissionView) -> AdmissionView:
        """The fleet when those of the tenant that go before ``own_rank`` have been sent, as far as the rule sends them.

        Of equal rank the own one goes first, so that two replicas never wait for each other.
        """
        for held, instances in self._taken:
            fleet = _with(fleet, held, instances)
        now_s, later = self._now_s, []
        for held in self._waiting:
            waited_s = now_s - held.since_s
            if held.tenant != tenant or rank(held.tokens, waited_s) >= own_rank:
                later.append(held)
                continue
            session = SessionView(context_tokens=held.tokens if held.kept else 0, waited_s=waited_s, kept=held.kept)
            answer = self._ask(RequestView("", held.tokens), session, fleet)
            if not isinstance(answer, Admit):
                self._line.waits_again(held)
            elif self._line.yields(held, now_s):
                self._taken.append((held, answer.instances))
                fleet = _with(fleet, held, answer.instances)
        self._waiting = later
        return fleet


def _with(fleet: AdmissionView, held: HeldElsewhere, instances: frozenset[str]) -> AdmissionView:
    """The fleet with a request in flight on the one of ``instances`` (empty: all) that has the most room."""
    candidates = [use for use in fleet.by_instance if not instances or use.instance in instances]
    chosen = max(candidates, key=_free_tokens).instance if candidates else ""
    return fleet._replace(
        active_sessions=fleet.active_sessions + 1,
        active_tokens=fleet.active_tokens + held.tokens,
        prefilling=fleet.prefilling + 1,
        by_instance=_counted(fleet.by_instance, chosen, held.tokens),
    )


def _counted(uses: Sequence[InstanceUse], chosen: str, tokens: int) -> tuple[InstanceUse, ...]:
    return tuple(
        use._replace(
            active_sessions=use.active_sessions + 1,
            active_tokens=use.active_tokens + tokens,
            prefilling=use.prefilling + 1,
        )
        if use.instance == chosen
        else use
        for use in uses
    )


def _free_tokens(use: InstanceUse) -> int:
    return use.pool_tokens - use.active_tokens - use.kept_tokens
