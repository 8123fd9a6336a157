"""The session table: bounds, expiry, counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.sessions import SessionTable


def test_a_pin_is_found_moved_and_counted() -> None:
    table = SessionTable()
    table.pin("s", "a", 0.0)
    assert (table.instance_of("s", 1.0), table.count("a")) == ("a", 1)
    table.pin("s", "b", 2.0)
    assert (table.instance_of("s", 3.0), table.count("a"), table.count("b"), len(table)) == ("b", 0, 1, 1)
    assert table.instance_of("other", 3.0) is None


def test_the_least_recently_pinned_session_makes_room() -> None:
    table = SessionTable(capacity=2)
    table.pin("old", "a", 0.0)
    table.pin("mid", "a", 1.0)
    table.pin("old", "a", 2.0)
    table.pin("new", "b", 3.0)
    assert [table.instance_of(s, 3.0) for s in ("old", "mid", "new")] == ["a", None, "b"]
    assert (len(table), table.count("a"), table.count("b")) == (2, 1, 1)


def test_an_idle_session_is_forgotten_at_its_time_to_live_and_a_pin_renews_it() -> None:
    table = SessionTable(ttl_s=10.0)
    table.pin("s", "a", 0.0)
    assert table.instance_of("s", 9.5) == "a"
    table.pin("s", "a", 9.5)
    assert table.instance_of("s", 19.25) == "a"
    assert table.instance_of("s", 19.5) is None
    assert (len(table), table.count("a")) == (0, 0)


def test_looking_a_session_up_does_not_renew_it() -> None:
    table = SessionTable(ttl_s=10.0)
    table.pin("s", "a", 0.0)
    table.instance_of("s", 9.0)
    assert table.instance_of("s", 10.0) is None


def test_sessions_of_an_instance_that_left_are_unpinned() -> None:
    table = SessionTable()
    for number in range(5):
        table.pin(f"s{number}", "ab"[number % 2], 0.0)
    assert table.remove_instance("a") == 3
    assert [table.instance_of(f"s{n}", 0.0) for n in range(5)] == [None, "b", None, "b", None]
    assert (table.count("a"), table.count("b")) == (0, 2)
    assert table.remove_instance("a") == 0


@pytest.mark.parametrize(("capacity", "ttl_s"), [(0, 1.0), (1, 0.0), (1, -1.0)])
def test_bounds_that_are_not_positive_are_refused(capacity: int, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="capacity and ttl_s must be positive"):
        SessionTable(capacity, ttl_s)


STEPS = st.lists(
    st.tuples(st.sampled_from(["pin", "look", "remove"]), st.integers(0, 9), st.sampled_from("abc"), st.floats(0, 4)),
    max_size=60,
)


@given(STEPS)
def test_counts_are_those_of_the_live_pins_in_any_order_of_events(steps: list[tuple[str, int, str, float]]) -> None:
    table, now_s = SessionTable(capacity=5, ttl_s=6.0), 0.0
    model: dict[str, tuple[str, float]] = {}
    for step, session, instance, elapsed_s in steps:
        now_s += elapsed_s
        if step == "remove":
            table.remove_instance(instance)
            model = {s: pin for s, pin in model.items() if pin[0] != instance}
            continue
        model = {s: pin for s, pin in model.items() if now_s - pin[1] < 6.0}
        if step == "pin":
            table.pin(f"s{session}", instance, now_s)
            model.pop(f"s{session}", None)
            model[f"s{session}"] = (instance, now_s)
            model = dict(list(model.items())[-5:])
        assert table.instance_of(f"s{session}", now_s) == model.get(f"s{session}", (None,))[0]
        assert len(table) == len(model) <= 5
        for name in "abc":
            assert table.count(name) == sum(pin[0] == name for pin in model.values())


def test_pins_are_copied_with_their_idle_times_while_they_change() -> None:
    table = SessionTable()
    for number in range(4):
        table.pin(f"s{number}", "a", float(number))
    copied = table.pins(10.0)
    assert next(copied) == ("s3", "a", 7.0)
    table.pin("s0", "b", 12.0)
    table.pin("new", "b", 12.0)
    table.remove_instance("a")
    assert list(copied) == [("s0", "b", 0.0)]
