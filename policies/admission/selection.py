"""The held requests that a rule may send now, found without asking it about the others."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, KeysView
from heapq import heapify, heappop
from math import inf
from typing import Generic, Protocol, TypeVar, runtime_checkable

from policies.admission.base import AdmissionView
from policies.admission.elsewhere import rank
from policies.types import RequestView


@runtime_checkable
class SelectiveRule(Protocol):
    """An admission rule that can bound what it sends. It reads neither the expected wait nor the place in line."""

    def longest_sent(self, fleet: AdmissionView, kept: bool) -> float:
        """Tokens that no prompt exceeds which it sends for a request that has been held and whose session is not in
        flight.

        Infinite where it may send any. Longer prompts are held for certain, shorter ones perhaps.

        Args:
            fleet: the fleet.
            kept: the session is kept.
        """
        ...


Item = TypeVar("Item")
Candidate = tuple[float, int, Item]
"""Rank in the line, number, held request; candidates sort in the order of the line."""


class HeldIndex(Generic[Item]):
    """Held requests by length and by session. O(log n) comparisons per change, in a list of n.

    Numbers are unique and rise with ``since_s``.
    """

    def __init__(self) -> None:
        self._by_tokens: list[tuple[int, int]] = []
        """(prompt tokens, number)"""
        self._by_number: dict[int, tuple[Item, RequestView, float]] = {}
        self._by_session: dict[str, dict[int, None]] = {}

    def add(self, number: int, held: Item, request: RequestView, since_s: float) -> None:
        """A request is held from now on."""
        insort(self._by_tokens, (request.prompt_tokens, number))
        self._by_number[number] = held, request, since_s
        if request.context_id is not None:
            self._by_session.setdefault(request.context_id, {})[number] = None

    def remove(self, number: int) -> None:
        """It is held no longer."""
        _, request, _ = self._by_number.pop(number)
        del self._by_tokens[bisect_left(self._by_tokens, (request.prompt_tokens, number))]
        if request.context_id is not None:
            numbers = self._by_session[request.context_id]
            del numbers[number]
            if not numbers:
                del self._by_session[request.context_id]

    @property
    def sessions(self) -> KeysView[str]:
        """Sessions of the held requests."""
        return self._by_session.keys()

    def candidates(
        self, longest: float, others: Iterable[int], overdue_s: float, now_s: float
    ) -> Iterator[Candidate[Item]]:
        """Requests of at most ``longest`` tokens, ``others`` by number, those held since ``now_s`` or for
        ``overdue_s``, in the order of the line.
        """
        known = self._by_number
        numbers = {number for _, number in self._by_tokens[: bisect_left(self._by_tokens, (longest, inf))]}
        numbers.update(others)
        for number, (_, _, since_s) in known.items():
            if now_s - since_s < overdue_s:
                break
            numbers.add(number)
        for number in reversed(known):
            if known[number][2] < now_s:
                break
            numbers.add(number)
        found = [(self.rank(number, now_s), number, known[number][0]) for number in numbers]
        heapify(found)
        while found:
            yield heappop(found)

    def of_sessions(self, sessions: Iterable[str], longest: float = inf) -> Iterator[int]:
        """Numbers of the requests of these sessions that have at most ``longest`` tokens."""
        for session in sessions:
            for number in self._by_session[session]:
                if self._by_number[number][1].prompt_tokens <= longest:
                    yield number

    def held_before(self, sessions: Iterable[str], rank: tuple[float, int], now_s: float) -> Iterator[str]:
        """Those of the sessions with a request that was held before now and is in line before ``rank``."""
        known = self._by_number
        for session in sessions:
            for number in self._by_session[session]:
                if known[number][2] < now_s and (rank[0] == inf or (self.rank(number, now_s), number) < rank):
                    yield session
                    break

    def rank(self, number: int, now_s: float) -> float:
        """Rank of a request in the line."""
        _, request, since_s = self._by_number[number]
        return rank(request.prompt_tokens, now_s - since_s)
