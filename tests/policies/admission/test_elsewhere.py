"""The common line: requests that other replicas hold get the room that is theirs first."""

from __future__ import annotations

from policies.admission.base import AdmissionReason, AdmissionView, Admit, Hold, InstanceUse, SessionView
from policies.admission.elsewhere import AGING_S, YIELD_S, HeldElsewhere, LineElsewhere, RoomElsewhere, rank
from policies.admission.room import Room
from policies.types import RequestView
from tests.policies.admission.test_gate import POOL, Line


def held(number: int, tokens: int, since_s: float = 0.0, **more: str) -> HeldElsewhere:
    return HeldElsewhere("other", number, tokens, since_s, **more)  # type: ignore[arg-type]


def test_a_shorter_request_elsewhere_gets_the_room_first() -> None:
    line = Line()
    line.arrive("a", 10_000, 0.0)
    line.arrive("long", 8_000, 0.0)
    line.gate.elsewhere.replace([held(1, 3_000)])
    line.end("a", 1.0)
    assert line.look(1.0) == []
    line.gate.elsewhere.replace([])
    assert line.look(1.1) == ["long"]


def test_with_room_for_both_nobody_waits() -> None:
    line = Line()
    line.arrive("a", 10_000, 0.0)
    line.arrive("long", 6_000, 0.0)
    line.gate.elsewhere.replace([held(1, 3_000)])
    line.end("a", 1.0)
    assert line.look(1.0) == ["long"]


def test_one_elsewhere_that_does_not_fit_blocks_nobody() -> None:
    line = Line()
    line.arrive("a", 10_000, 0.0)
    since_s = -9 * AGING_S  # counts a tenth of its tokens
    line.arrive("short", 2_000, 0.0)
    line.gate.elsewhere.replace([held(1, 12_000, since_s)])
    line.end("a", 1.0)
    assert line.look(1.0) == ["short"]


def test_own_requests_that_go_before_are_not_held_up() -> None:
    line = Line()
    line.arrive("a", 10_000, 0.0)
    line.arrive("short", 2_000, 0.0)
    line.gate.elsewhere.replace([held(1, 9_000)])
    line.end("a", 1.0)
    assert line.look(1.0) == ["short"]


def test_of_equal_requests_the_own_one_goes_so_that_two_replicas_never_wait_for_each_other() -> None:
    line = Line()
    line.arrive("a", 10_000, 0.0)
    line.arrive("own", 9_000, 0.5)
    line.gate.elsewhere.replace([held(1, 9_000, 0.5)])
    line.end("a", 1.0)
    assert line.look(1.0) == ["own"]


def test_room_is_left_for_a_bounded_time_to_a_request_that_its_replica_does_not_send() -> None:
    line = Line()
    line.arrive("a", 10_000, 0.0)
    line.arrive("long", 8_000, 0.0)
    line.gate.elsewhere.replace([held(1, 3_000)])
    line.end("a", 1.0)
    assert line.look(1.0) == []
    line.gate.elsewhere.replace([held(1, 3_000)])  # heard of again
    assert line.look(1.0 + YIELD_S) == []
    assert line.look(1.01 + YIELD_S) == ["long"]


def test_the_time_begins_again_after_the_room_was_gone() -> None:
    line = LineElsewhere()
    line.replace([held(1, 100)])
    assert line.yields(held(1, 100), 0.0)
    line.waits_again(held(1, 100))
    assert line.yields(held(1, 100), YIELD_S + 1.0)
    assert not line.yields(held(1, 100), 2 * YIELD_S + 1.1)


def test_nobody_waits_for_others_longer_than_the_bound() -> None:
    line = Line(max_hold_s=0.5)
    line.arrive("a", 10_000, 0.0)
    line.arrive("long", 8_000, 0.0)
    line.gate.elsewhere.replace([held(1, 3_000)])
    assert line.look(0.5) == ["long"]


def test_a_new_request_does_not_pass_a_held_one_elsewhere() -> None:
    line = Line()
    line.gate.elsewhere.replace([held(1, 6_000)])
    assert line.arrive("larger", 7_000, 1.0) is not None
    assert line.arrive("fits beside it", 4_000, 1.0) is None


def test_an_answer_to_a_question_does_not_begin_the_time() -> None:
    line = Line()
    line.gate.elsewhere.replace([held(1, 6_000)])
    answer = line.gate.answer(RequestView("asked", 7_000), Room(POOL, 2), 1.0)
    assert isinstance(answer, Hold)
    assert line.gate.elsewhere.yields(held(1, 6_000), 1.0 + 2 * YIELD_S)


def test_tenants_do_not_hold_each_other_up() -> None:
    line = Line()
    line.arrive("a", 10_000, 0.0)
    line.arrive("long", 8_000, 0.0)
    line.gate.elsewhere.replace([held(1, 3_000, tenant="team")])
    line.end("a", 1.0)
    assert line.look(1.0) == ["long"]


def test_room_is_taken_on_the_instance_with_most_of_it_among_those_of_the_answer() -> None:
    uses = (InstanceUse("full", 100, 1, 90), InstanceUse("half", 100, 1, 50), InstanceUse("empty", 100))
    fleet = AdmissionView(300, 2, 140, by_instance=uses)

    def ask(request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit:
        return Admit(AdmissionReason.ROOM, frozenset({"full", "half"}))

    line = LineElsewhere()
    line.replace([held(1, 30)])
    looked = RoomElsewhere(line, ask, 0.0)
    left = looked.left("", rank(40, 0.0), fleet)
    assert (left.active_sessions, left.active_tokens, left.prefilling) == (3, 170, 1)
    assert [use.active_tokens for use in left.by_instance] == [90, 80, 0]
    assert looked.left("", rank(50, 0.0), fleet) == left, "it is counted once for every own request"
