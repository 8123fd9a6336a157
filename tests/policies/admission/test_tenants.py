"""Tenants in the line of held requests: whose request is sent when room appears."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from policies.admission.accounts import SessionAccounts
from policies.admission.base import AdmissionReason, AdmissionView, Admit, Hold, SessionView
from policies.admission.gate import AdmissionGate
from policies.admission.line import Held
from policies.admission.room import Room
from policies.types import RequestView, Tenant

HOG, POLITE = Tenant("hog"), Tenant("polite")


@dataclass(frozen=True, slots=True)
class Switch:
    """Sends prompts of at most ``tokens``, and nothing of an agent of the kind ``batch``."""

    tokens: int = 0
    keep_s: float = 0.0
    name: ClassVar[str] = "switch"

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        if request.prompt_tokens <= self.tokens and request.agent != "batch":
            return Admit(AdmissionReason.ROOM)
        return Hold(AdmissionReason.WORKING_SET)


class Line:
    """A gate whose requests are counted as the proxy counts them."""

    def __init__(self) -> None:
        self.gate = AdmissionGate(Switch(), SessionAccounts(keep_s=0.0))
        self.arrived = 0

    def arrive(self, tenant: Tenant, tokens: int, now_s: float = 0.0, agent: str | None = None) -> Held:
        self.arrived += 1
        request = RequestView(f"r{self.arrived}", tokens, tenant=tenant, agent=agent)
        held = self.gate.offer(request, Room(100_000, 2), now_s)
        assert isinstance(held, Held)
        return held

    def permit(self, tokens: int = 1_000_000) -> None:
        self.gate.set_rule(Switch(tokens), self.gate.max_hold_s, 0.0)

    def send(self, number: int = 1_000_000, now_s: float = 0.0) -> list[Held]:
        sent: list[Held] = []
        while len(sent) < number and (held := self.gate.examine(Room(100_000, 2), now_s)) is not None:
            sent.append(held)
            request = held.request
            self.gate.shares.sent(request.tenant, request.prompt_tokens, now_s, waited=True)
        return sent


def names(sent: list[Held]) -> list[str]:
    return [held.request.tenant.name for held in sent]


def test_tenants_take_turns_by_tokens_and_each_keeps_its_own_order() -> None:
    line = Line()
    for _ in range(40):
        line.arrive(HOG, 50_000)
    polite = [line.arrive(POLITE, tokens) for tokens in (9_000, 1_000, 5_000)]
    line.permit()
    sent = line.send()
    of_polite = [held for held in sent if held.request.tenant is POLITE]
    assert of_polite == [polite[1], polite[2], polite[0]]
    # Shortest first would have sent all three before the hog, which waits for its turn only.
    assert names(sent[:4]) == ["hog", "polite", "polite", "polite"]
    assert len(sent) == 43
    assert not line.gate.shares.waiting


def test_short_prompts_of_one_tenant_do_not_overtake_all_of_another() -> None:
    line = Line()
    for _ in range(500):
        line.arrive(HOG, 1_000)
    line.arrive(POLITE, 9_000)
    line.permit()
    assert names(line.send()).index("polite") <= 9  # one quantum of the hog's


def test_a_tenant_whose_requests_do_not_fit_blocks_no_other() -> None:
    line = Line()
    line.arrive(HOG, 50_000)
    line.arrive(POLITE, 60_000)
    line.arrive(POLITE, 2_000)
    line.permit(10_000)
    assert names(line.send()) == ["polite"]


def test_a_rule_can_read_the_kind_of_agent() -> None:
    line = Line()
    line.arrive(HOG, 1_000, agent="batch")
    line.arrive(HOG, 2_000, agent="sub-agent")
    line.permit()
    assert [held.request.agent for held in line.send()] == ["sub-agent"]


def test_a_held_request_has_its_place_in_line_and_in_its_tenant() -> None:
    line = Line()
    held = [line.arrive(HOG, 20_000) for _ in range(3)]
    polite = line.arrive(POLITE, 30_000)
    holds = dict(line.gate.reasons(4, Room(100_000, 2), 0.0))
    assert [(holds[each].behind, holds[each].behind_in_tenant) for each in held] == [(0, 0), (2, 1), (3, 2)]
    assert (holds[polite].behind, holds[polite].tenant, holds[polite].behind_in_tenant) == (1, "polite", 0)


def test_who_leaves_waits_no_longer_for_its_tenant() -> None:
    line = Line()
    held = [line.arrive(HOG, 1_000), line.arrive(HOG, 1_000), line.arrive(POLITE, 1_000)]
    for each in (*held, *held):
        line.gate.leave(each)
    assert not line.gate.shares.waiting
    assert not line.gate.shares._accounts


TENANTS = (HOG, POLITE, Tenant("large", 4.0), Tenant("urgent", priority=2))


@given(
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 60_000), st.integers(0, 30)), max_size=25),
    st.tuples(st.sampled_from(TENANTS), st.integers(1, 60_000)),
    st.integers(0, 5),
)
@hypothesis_settings(deadline=None)
def test_an_offered_request_is_given_the_place_that_it_takes(
    arrivals: list[tuple[Tenant, int, int]], last: tuple[Tenant, int], sent_before: int
) -> None:
    line = Line()
    for tenant, tokens, at_s in sorted(arrivals, key=lambda each: each[2]):
        line.arrive(tenant, tokens, float(at_s))
    line.permit()
    line.send(sent_before, 31.0)
    line.gate.set_rule(Switch(), 300.0, 31.0)
    held = line.arrive(*last, 31.0)
    order = line.gate.line(31.0)
    before = order[: order.index(held)]
    assert held.hold.behind == len(before)
    assert held.hold.behind_in_tenant == sum(each.request.tenant is last[0] for each in before)
    assert sorted(each.request.request_id for each in order) == sorted(
        held.request.request_id for held in line.gate._line
    )
