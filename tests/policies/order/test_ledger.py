"""The ledger's queue of ordered prefills: who is in it, and which one the engine computes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.ledger import Account, Lease, Ledger, Phase
from policies.types import QueuedPrefill


def acquire(ledger: Ledger, due_s: float | None, seconds: float = 1.0) -> Lease:
    queued = None if due_s is None else QueuedPrefill(due_s, seconds)
    return ledger.acquire("a", 100, 100, 0.0, queued)


def dues(ledger: Ledger) -> list[float]:
    return [each.due_s for each in ledger.account("a").ordered()]


def test_the_first_to_come_is_computed_even_if_it_is_due_last() -> None:
    ledger = Ledger()
    leases = [acquire(ledger, due_s) for due_s in (90.0, 30.0, 20.0, 40.0)]
    assert ledger.account("a").computing is leases[0]
    assert dues(ledger) == [90.0, 30.0, 20.0, 40.0]
    assert [lease.due_s for lease in leases] == [90.0, 30.0, 20.0, 40.0]


@pytest.mark.parametrize("end", [Lease.first_token, Lease.release])
def test_the_one_that_is_due_first_follows(end: object) -> None:
    ledger = Ledger()
    leases = [acquire(ledger, due_s) for due_s in (90.0, 30.0, 20.0, 40.0)]
    assert callable(end)
    end(leases[0])
    assert ledger.account("a").computing is leases[2]
    assert dues(ledger) == [20.0, 30.0, 40.0]
    acquire(ledger, 5.0)
    assert dues(ledger) == [20.0, 30.0, 40.0, 5.0]
    end(leases[2])
    assert dues(ledger) == [5.0, 30.0, 40.0]


def test_one_that_gives_up_waiting_leaves_the_computed_one_alone() -> None:
    ledger = Ledger()
    first, second, third = (acquire(ledger, due_s) for due_s in (90.0, 30.0, 20.0))
    third.release()
    assert (ledger.account("a").computing, dues(ledger)) == (first, [90.0, 30.0])
    second.first_token()
    assert (ledger.account("a").computing, dues(ledger)) == (first, [90.0])


def pairs(ledger: Ledger) -> tuple[float, float]:
    found = ledger.account("a").pairs
    return found.kept, found.broken


def test_a_prefill_that_overtakes_has_kept_the_order() -> None:
    ledger = Ledger()
    first, long, short, last = (acquire(ledger, due_s) for due_s in (90.0, 80.0, 20.0, 95.0))
    first.first_token()  # it was computed when the others came: no engine could have kept it waiting for them
    assert pairs(ledger) == (0, 0)
    short.first_token()
    assert pairs(ledger) == (1, 0)
    long.first_token()
    last.first_token()
    assert pairs(ledger) == (1, 0)


def test_a_prefill_that_was_to_be_overtaken_has_broken_it() -> None:
    ledger = Ledger()
    first, long, short, shorter = (acquire(ledger, due_s) for due_s in (90.0, 80.0, 20.0, 10.0))
    for lease in (first, long, short, shorter):
        lease.first_token()
    assert pairs(ledger) == (0, 3)


def test_prefills_that_end_without_a_first_token_and_equal_due_times_say_nothing() -> None:
    ledger = Ledger()
    first, gone, equal, other = (acquire(ledger, due_s) for due_s in (90.0, 80.0, 20.0, 20.0))
    first.first_token()
    gone.release()
    other.first_token()
    equal.first_token()
    assert pairs(ledger) == (0, 0)


def test_old_pairs_count_less_and_those_before_a_restart_not_at_all() -> None:
    ledger = Ledger()
    acquire(ledger, None)
    found = ledger.account("a").pairs
    for _ in range(300):
        found.add(0, 1)
    assert 100 <= found.broken <= 200
    for _ in range(400):
        found.add(1, 0)
    assert found.kept > 0.8 * found.total
    ledger.forget_recent("a")
    assert pairs(ledger) == (0, 0)


def test_a_lease_that_has_left_the_queue_keeps_no_other_alive() -> None:
    ledger = Ledger()
    for _ in range(3):
        lease = acquire(ledger, 20.0)
        assert lease._behind is None  # the one before has left
        lease.first_token()
    behind = [acquire(ledger, due_s) for due_s in (20.0, 30.0)]
    assert behind[1]._behind is behind[0]
    behind[1].release()
    assert behind[1]._behind is None


def test_the_last_one_leaves_an_empty_queue_and_the_next_one_is_computed() -> None:
    ledger = Ledger()
    acquire(ledger, 90.0).first_token()
    account = ledger.account("a")
    assert (account.queue, account.computing, account.ordered()) == ({}, None, ())
    lease = acquire(ledger, 95.0)
    assert account.computing is lease


def test_a_lease_without_a_place_never_appears() -> None:
    ledger = Ledger()
    plain = acquire(ledger, None)
    plain.add_prefill(50, 3.0)
    assert (plain.due_s, dues(ledger), ledger.account("a").computing) == (None, [], None)
    lease = acquire(ledger, 20.0)
    assert dues(ledger) == [20.0]
    plain.first_token()
    plain.release()
    assert (ledger.account("a").computing, dues(ledger)) == (lease, [20.0])


def test_a_place_outlives_the_first_token_of_its_lease_but_not_in_the_queue() -> None:
    ledger = Ledger()
    lease = acquire(ledger, 20.0)
    lease.first_token()
    lease.add_prefill(50, 3.0)
    lease.first_token()
    lease.release()
    lease.add_prefill(50, 3.0)
    assert (lease.due_s, ledger.account("a").queue, ledger.account("a").computing) == (20.0, {}, None)


def test_prefill_added_later_keeps_the_place_and_sets_the_seconds() -> None:
    ledger = Ledger()
    first, second = acquire(ledger, 90.0), acquire(ledger, 20.0, 0.0)
    second.add_prefill(700, 4.0)
    assert ledger.account("a").ordered() == (QueuedPrefill(90.0, 1.0), QueuedPrefill(20.0, 4.0))
    first.add_prefill(700, 6.0)
    assert ledger.account("a").ordered() == (QueuedPrefill(90.0, 6.0), QueuedPrefill(20.0, 4.0))
    assert ledger.account("a").computing is first


def test_the_work_of_other_replicas_leaves_the_queue_as_it_is() -> None:
    ledger = Ledger()
    acquire(ledger, 90.0)
    acquire(ledger, 20.0)
    ledger.remote["a"] = Account(requests=3, prefilling=2, pending_prefill_tokens=500)
    joint = ledger.joint("a", 0.0)
    assert (joint.requests, joint.prefilling) == (5, 4)
    assert [each.due_s for each in joint.ordered()] == [90.0, 20.0]
    ledger.remote["b"] = Account(requests=3)
    assert ledger.joint("b", 0.0).ordered() == ()


def test_a_new_instance_of_a_removed_one_s_name_has_its_own_queue() -> None:
    ledger = Ledger()
    old, other = acquire(ledger, 90.0), acquire(ledger, 80.0)
    ledger.remove_instance("a")
    assert dues(ledger) == []
    new = acquire(ledger, 50.0)
    old.release()
    other.first_token()
    assert (ledger.account("a").computing, dues(ledger)) == (new, [50.0])
    assert ledger.unused == Account()


def test_a_restart_leaves_the_queue_of_requests_in_flight() -> None:
    ledger = Ledger()
    acquire(ledger, 90.0)
    ledger.forget_recent("a")
    assert dues(ledger) == [90.0]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), st.one_of(st.none(), st.integers(0, 5))),
        st.tuples(st.sampled_from(["first_token", "release", "add_prefill"]), st.integers(0, 30)),
    ),
    max_size=50,
)


@given(steps=STEPS)
def test_the_queue_is_the_ordered_leases_in_prefill(steps: list[tuple[str, int | None]]) -> None:
    ledger, leases, computing = Ledger(), list[Lease](), None
    for step, value in steps:
        if step == "acquire":
            leases.append(acquire(ledger, value))
        elif leases and value is not None:
            lease = leases[value % len(leases)]
            if step == "first_token":
                lease.first_token()
            elif step == "release":
                lease.release()
            else:
                lease.add_prefill(10, float(value))
        account = ledger.account("a")
        waiting = [each for each in leases if each.due_s is not None and each.phase is Phase.PREFILL]
        assert list(account.queue) == waiting
        assert all(account.queue[each].due_s == each.due_s for each in waiting)
        if computing not in waiting:
            assert account.computing in waiting or not waiting
            first_due = min((each.due_s for each in waiting if each.due_s is not None), default=None)
            assert (account.computing.due_s if account.computing else None) == first_due
            computing = account.computing
        assert account.computing is computing
        assert sorted(account.ordered()) == sorted(account.queue.values())
        assert account.ordered()[:1] == (() if computing is None else (account.queue[computing],))
