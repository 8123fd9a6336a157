"""Session ids that get lost: proof by conversations that go on without the id that they had."""

from __future__ import annotations

from proxy.meters.session_headers import SessionHeaders


def prompt(session: int, turn: int) -> list[int]:
    """Blocks of a turn: two of the system prompt, then the session's own."""
    return [1, 2, *range(1_000 * session, 1_000 * session + 3 * turn)]


def run(headers: SessionHeaders, sessions: range, turns: range, *, named: bool) -> None:
    for turn in turns:
        for session in sessions:
            held = 0 if session == sessions[0] and turn == 1 else 2 + 3 * (turn - 1)
            headers.add(named, prompt(session, turn), held)


def test_conversations_that_go_on_without_their_id_are_proof() -> None:
    headers = SessionHeaders()
    run(headers, range(1, 6), range(1, 3), named=True)
    assert not headers.lost(5)
    run(headers, range(1, 6), range(3, 5), named=False)
    assert (headers.unnamed, headers.continued) == (10, 10)
    assert headers.lost(5)
    headers.add(True, prompt(1, 5), 14)
    assert not headers.lost(1)


def test_other_requests_without_an_id_are_none_although_they_share_a_system_prompt() -> None:
    headers = SessionHeaders()
    run(headers, range(1, 6), range(1, 3), named=True)
    for number in range(100):
        headers.add(False, [1, 2, 50_000 + number], 2)
    assert (headers.unnamed, headers.continued) == (100, 0)
    assert not headers.lost(5)


def test_few_requests_are_no_proof() -> None:
    headers = SessionHeaders()
    run(headers, range(1, 3), range(1, 3), named=True)
    run(headers, range(1, 3), range(3, 4), named=False)
    assert not headers.lost(5)


def test_clients_that_never_sent_an_id_lost_none() -> None:
    headers = SessionHeaders()
    run(headers, range(1, 6), range(1, 6), named=False)
    assert not headers.lost(5)


def test_memory_is_bounded() -> None:
    headers = SessionHeaders(capacity=10)
    for session in range(1, 100):
        headers.add(True, prompt(session, 1), 2)
    assert len(headers._ends) == 10
