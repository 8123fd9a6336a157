"""``AdmissionGate``: the line of held requests, its order and its bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission.base import AdmissionReason, AdmissionView, Admit, Hold, SessionView
from policies.admission.elsewhere import AGING_S
from policies.admission.gate import AdmissionGate
from policies.admission.line import Held
from policies.admission.room import Room
from policies.admission.session_cap import SessionCap
from policies.types import RequestView
from tests.policies.admission.sessions import Sessions

POOL = 100_000


@dataclass(frozen=True, slots=True)
class Budget:
    """Sends what fits a number of tokens in flight."""

    tokens: int = 10_000
    keep_s: float = 0.0
    name: ClassVar[str] = "budget"

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        if fleet.active_tokens + request.prompt_tokens <= self.tokens:
            return Admit(AdmissionReason.ROOM)
        return Hold(AdmissionReason.WORKING_SET, fleet.active_tokens + request.prompt_tokens, fleet.pool_tokens)


class Line:
    """A gate with the accounts that a router would keep."""

    def __init__(self, tokens: int = 10_000, max_hold_s: float = 300.0) -> None:
        self.accounts = Sessions(keep_s=0.0)
        self.gate = AdmissionGate(Budget(tokens), self.accounts, max_hold_s)
        self.sent: list[str] = []

    def arrive(self, name: str, tokens: int, now_s: float) -> Held | None:
        request = RequestView(name, tokens, session_id=name)
        answer = self.gate.offer(request, Room(POOL, 2), now_s)
        if isinstance(answer, Held):
            return answer
        self._send(request, now_s)
        return None

    def look(self, now_s: float) -> list[str]:
        """Names of the held requests that are sent now, in order."""
        before = len(self.sent)
        while (held := self.gate.examine(Room(POOL, 2), now_s)) is not None:
            assert held.admitted is not None
            self._send(held.request, now_s)
        return self.sent[before:]

    def end(self, name: str, now_s: float) -> None:
        if self.accounts.view(name, now_s).in_flight:
            self.accounts.end(name, now_s)

    def _send(self, request: RequestView, now_s: float) -> None:
        self.accounts.begin(request.session_id or "", request.prompt_tokens, now_s)
        self.sent.append(request.request_id)


def test_what_fits_is_sent_at_once_and_what_does_not_waits_for_room() -> None:
    line = Line()
    assert line.arrive("a", 6_000, 0.0) is None
    assert line.arrive("b", 6_000, 0.0) is not None
    assert line.look(1.0) == []
    line.end("a", 2.0)
    assert line.look(2.0) == ["b"]
    assert len(line.gate) == 0


def test_the_shortest_goes_first_and_one_that_does_not_fit_blocks_nobody() -> None:
    line = Line()
    line.arrive("a", 10_000, 0.0)
    for name, tokens in (("large", 9_000), ("small", 1_000), ("middle", 5_000)):
        line.arrive(name, tokens, 1.0)
    line.end("a", 2.0)
    assert line.look(2.0) == ["small", "middle"]


def test_waiting_counts_against_length() -> None:
    line = Line()
    line.arrive("a", 10_000, 0.0)
    line.arrive("large", 9_000, 1.0)
    line.arrive("small", 3_000, 1.0 + 2.5 * AGING_S)
    line.end("a", 2.0 + 2.5 * AGING_S)
    assert line.look(2.0 + 2.5 * AGING_S) == ["large"]


def test_nobody_waits_longer_than_the_bound() -> None:
    line = Line(max_hold_s=20.0)
    line.arrive("a", 10_000, 0.0)
    held = line.arrive("b", 5_000, 5.0)
    assert held is not None
    assert line.look(24.9) == []
    assert line.look(25.0) == ["b"]
    assert held.admitted == Admit(AdmissionReason.HELD_LONG_ENOUGH)


def test_a_client_that_left_is_not_sent() -> None:
    line = Line()
    line.arrive("a", 10_000, 0.0)
    held = line.arrive("b", 5_000, 0.0)
    assert held is not None
    line.gate.leave(held)
    line.gate.leave(held)
    line.end("a", 1.0)
    assert line.look(1.0) == []


def test_a_held_request_knows_its_place_and_why_it_waits() -> None:
    line = Line()
    line.arrive("a", 10_000, 0.0)
    first, second = line.arrive("b", 2_000, 0.0), line.arrive("c", 3_000, 0.0)
    assert first is not None
    assert second is not None
    assert (first.hold.behind, second.hold.behind) == (0, 1)
    assert second.hold[:3] == (AdmissionReason.WORKING_SET, 13_000, POOL)
    line.arrive("d", 1_000, 0.0)
    assert [(held, hold.behind) for held, hold in line.gate.reasons(3, Room(POOL, 2), 1.0)][1:] == [
        (first, 1),
        (second, 2),
    ]


def test_the_expected_wait_is_the_tokens_ahead_over_the_flow_of_tokens() -> None:
    line = Line()
    line.arrive("a", 10_000, 0.0)
    waiting = line.arrive("last", 10_000, 0.0)
    assert waiting is not None
    assert waiting.hold.expected_wait_s == 0.0  # unknown
    line.end("a", 10.0)
    for second in range(10, 50):
        name = str(second)
        line.arrive(name, 1_000, float(second))
        line.end(name, second + 0.5)
    line.arrive("filler", 9_500, 50.0)
    ((held, hold),) = line.gate.reasons(1, Room(POOL, 2), 50.0)
    assert held is waiting
    assert hold.expected_wait_s == pytest.approx(10_000 / (49_500 / 50.0), rel=0.01)


def test_another_rule_judges_those_who_wait() -> None:
    line = Line()
    line.arrive("a", 10_000, 0.0)
    line.arrive("b", 5_000, 0.0)
    line.gate.set_rule(SessionCap(sessions=1, keep_s=0.0), 300.0, 1.0)
    assert line.look(1.0) == []
    line.gate.set_rule(Budget(20_000), 300.0, 1.0)
    assert line.look(1.0) == ["b"]


def test_asking_changes_nothing() -> None:
    line = Line()
    line.arrive("a", 10_000, 0.0)
    answer = line.gate.answer(RequestView("b", 5_000), Room(POOL, 2), 0.0)
    assert isinstance(answer, Hold)
    assert len(line.gate) == 0


@given(
    st.lists(st.tuples(st.integers(1, 12_000), st.floats(0.0, 30.0, allow_subnormal=False), st.booleans()), max_size=60)
)
def test_everybody_is_sent_once_and_within_the_bound(arrivals: list[tuple[int, float, bool]]) -> None:
    line = Line(max_hold_s=50.0)
    due: dict[str, float] = {}
    left: set[str] = set()
    now_s = 0.0
    for number, (tokens, passed_s, ends) in enumerate(arrivals):
        now_s += passed_s
        name = str(number)
        due[name] = now_s
        held = line.arrive(name, tokens, now_s)
        if held is not None and number % 7 == 6:
            line.gate.leave(held)
            left.add(name)
        if ends and line.sent:
            line.end(line.sent[len(line.sent) // 2], now_s)
        for sent in line.look(now_s):
            assert now_s - due[sent] <= 50.0 + 30.0  # looked at every 30 s at least
    line.look(now_s + 50.1)
    assert sorted(line.sent) == sorted(set(due) - left)
    assert len(line.gate) == 0
