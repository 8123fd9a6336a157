"""Merging of other replicas' messages, and making of own ones; with the time as an argument, without a store."""

from __future__ import annotations

import msgspec
import pytest

from policies.admission.room import Room
from policies.types import RequestView
from proxy.access.quotas import KeyLimitError
from proxy.request.parse import Endpoint, Prompt
from proxy.sharing.drains import DrainMarks
from proxy.sharing.wire import DrainMark, HeldReport, KeyReport, LoadReport, Message, Pin, WireError, decode, encode
from tests.policies.builders import decision_for
from tests.proxy.request.parsing import parse_request
from tests.proxy.sharing.side import UNIX_S, Side


def loads(replica: str, full: bool = False, run: int = 1, **requests: int) -> Message:
    return Message(replica, run, full, loads={name: LoadReport(count) for name, count in requests.items()})


# Drain marks


@pytest.mark.parametrize("repeated", [True, False])
def test_a_mark_ends_with_the_removal_of_its_instance_unless_that_is_an_earlier_one_repeated(repeated: bool) -> None:
    marks = DrainMarks("x")
    marks.mark("a", draining=True, unix_s=1.0)
    marks.repeating = repeated
    marks.removed("a", 3.0)
    marks.repeating = False
    assert (marks.ended("a"), marks.draining("a")) == (not repeated, True)
    assert marks.merge({"a": DrainMark(True, 2.0, "y")}) == {"a": True}
    assert marks.ended("a") is not repeated, "given before the removal, and heard after it"
    assert marks.merge({"a": DrainMark(True, 4.0, "y")}) == {"a": True}
    assert not marks.ended("a"), "it was drained again, on another replica"


# Merging


def test_changes_add_up_over_replicas_and_a_full_message_replaces_what_its_replica_said() -> None:
    side = Side()
    side.hears(loads("x", a=1, b=2))
    side.hears(loads("y", a=4))
    assert (side.remote("a"), side.remote("b")) == (5, 2)
    side.hears(loads("x", a=3))
    assert (side.remote("a"), side.remote("b")) == (7, 2), "what did not change is not sent"
    side.hears(loads("x", full=True, a=1))
    assert (side.remote("a"), side.remote("b")) == (5, 0)


def test_a_silent_replica_is_forgotten_after_the_ttl_and_only_that_one() -> None:
    side = Side()
    side.hears(loads("x", a=1), now_s=0.0)
    side.hears(loads("y", a=2), now_s=2.0)
    side.others.expire(3.0, ttl_s=3.0)
    assert side.remote("a") == 3
    side.others.expire(3.1, ttl_s=3.0)
    assert side.remote("a") == 2
    assert len(side.others) == 1


def test_a_restarted_replica_has_nothing_of_its_former_process() -> None:
    side = Side()
    side.hears(loads("x", a=5, b=5))
    side.hears(loads("x", run=2, a=1))
    assert (side.remote("a"), side.remote("b")) == (1, 0)
    woken: list[int] = []
    side.others.on_load = lambda: woken.append(side.remote("a"))
    side.hears(Message("x", 2, gone=True))
    assert (side.remote("a"), len(side.others)) == (0, 0)
    assert woken == [0], "requests that wait for room are to be tried again"


def test_instances_of_another_fleet_take_no_memory_in_the_ledger() -> None:
    side = Side()
    side.hears(loads("x", a=1, elsewhere=9))
    assert set(side.state.ledger.remote) == {"a"}


def test_the_age_of_a_found_message_counts_towards_the_ttl() -> None:
    side = Side()
    side.others.find(loads("x", full=True, a=1), age_s=2.5, now_s=10.0, unix_s=UNIX_S)
    side.others.expire(10.4, ttl_s=3.0)
    assert side.remote("a") == 1
    side.others.expire(10.6, ttl_s=3.0)
    assert side.remote("a") == 0


def test_a_breaker_is_doubted_once_per_opening() -> None:
    side = Side()
    side.hears(Message("x", 1, open=("a",)))
    side.hears(Message("x", 1, open=("a",)))
    side.hears(Message("x", 1))
    side.hears(Message("x", 1, open=("a", "b")))
    assert side.doubts == ["a", "a", "b"]


def test_pins_from_before_the_engine_s_start_and_for_unknown_instances_are_ignored() -> None:
    side = Side()
    side.instances["a"].started_unix_s = UNIX_S
    pins = [Pin(b"old", "a", 10, UNIX_S - 1), Pin(b"new", "a", 10, UNIX_S + 1), Pin(b"other", "nowhere", 10, UNIX_S)]
    side.others.take_pins(pins, 5.0, UNIX_S + 2)
    assert [session for session, _, _ in side.state.sessions.pins(5.0)] == ["new"]


def test_own_pins_that_are_found_in_the_store_are_no_news() -> None:
    side = Side()
    request = RequestView("r", 32, (1, 2), session_id="s")
    side.state.commit(request, side.state.snapshot(request, 1.0, ["a"]), decision_for(request, "a"), 1.0).release(2.0)
    message = side.own.message(3.0, UNIX_S, full=False)
    assert message is not None
    side.others.take_pins(message.pins, 4.0, UNIX_S + 1)
    assert side.state.accounts.kept_sessions == 1
    side.own.begin()
    again = side.own.message(5.0, UNIX_S, full=True)
    assert again is not None
    assert [pin.session for pin in again.pins] == [b"s"]


def test_session_ids_with_lone_surrogates_survive_the_wire() -> None:
    side, other = Side("one"), Side("two")
    request = RequestView("r", 32, (1, 2), session_id="s\udc80")
    fleet = side.state.snapshot(request, 0.0, ["a"])
    side.state.commit(request, fleet, decision_for(request, "a"), 0.0)
    other.hears(side.own.message(0.0, UNIX_S, full=False))
    assert other.state.sessions.instance_of("s\udc80", 0.0) == "a"


# Sending


def test_only_changes_are_sent_and_nothing_if_there_are_none() -> None:
    side = Side()
    lease = side.state.ledger.acquire("a", 10, 20, 0.0)
    first = side.own.message(0.0, UNIX_S, full=False)
    assert first is not None
    assert first.loads == {"a": LoadReport(1, 1, 10, 0, 20, 10.0, 0.0)}
    assert side.own.message(1.0, UNIX_S, full=False) is None
    lease.release()
    second = side.own.message(2.0, UNIX_S, full=False)
    assert second is not None
    assert second.loads["a"].requests == 0
    full = side.own.message(3.0, UNIX_S, full=True)
    assert full is not None
    assert set(full.loads) == {"a"}


def test_an_account_that_is_dropped_is_sent_as_idle() -> None:
    side = Side()
    side.state.ledger.acquire("a", 10, 20, 0.0).release()
    side.own.message(0.0, UNIX_S, full=False)
    side.state.ledger.forget_recent("a")
    message = side.own.message(1.0, UNIX_S, full=False)
    assert message is not None
    assert message.loads == {"a": LoadReport()}


def test_bytes_that_are_no_message_are_refused_and_unknown_fields_ignored() -> None:
    with pytest.raises(WireError):
        decode(b"\xc1")
    assert decode(msgspec.msgpack.encode({"replica": "x", "run": 1, "later": [1]})) == Message("x", 1)


# Drain marks


def test_the_last_word_about_an_instance_wins_whatever_the_clocks_say() -> None:
    one, two = DrainMarks("one"), DrainMarks("two")
    one.mark("a", draining=True, unix_s=UNIX_S + 100)
    assert two.merge(one.take_changed()) == {"a": True}
    two.mark("a", draining=False, unix_s=UNIX_S)
    assert one.merge(two.take_changed()) == {"a": False}, "this host's clock is behind"
    assert two.merge(one.all()) == {}
    assert not one.draining("a")
    assert one.merge({"a": DrainMark(True, UNIX_S, "three")}) == {}


# Limits of keys


def test_what_another_replica_counts_is_taken_from_this_minute_s_amounts_once() -> None:
    side = Side(max_requests_per_min=60, max_tokens_per_min=6_000)
    now_s = side.began_s
    side.hears(Message("x", 1, keys={"team": KeyReport(0, 10, 1_000)}), now_s)
    side.hears(Message("x", 1, keys={"team": KeyReport(0, 30, 3_000)}), now_s)
    side.hears(Message("x", 1, full=True, keys={"team": KeyReport(0, 30, 3_000)}), now_s)
    use = side.quota.use(now_s)
    assert (round(use.requests_left), round(use.tokens_left, -2)) == (40, 4_000)


def test_a_replica_that_joins_begins_with_the_amounts_that_are_left_elsewhere() -> None:
    side = Side(max_requests_per_min=60)
    found = Message("x", 1, full=True, keys={"team": KeyReport(2, 500, 0, 3.0)})
    side.others.find(found, 0.0, side.began_s, UNIX_S)
    assert round(side.quota.use(side.began_s).requests_left) == 3


def test_a_limit_per_minute_that_others_do_not_have_yet_begins_full() -> None:
    old, new = Side("old", max_concurrent=4), Side("new", max_requests_per_min=60, max_tokens_per_min=6_000)
    found = old.own.message(old.began_s, UNIX_S, full=True)
    assert found is not None
    new.others.find(decode(encode(found)), 0.0, new.began_s, UNIX_S)
    use = new.quota.use(new.began_s)
    assert (use.requests_left, use.tokens_left) == (60, 6_000)


def test_requests_in_flight_of_a_forgotten_replica_count_no_more() -> None:
    side = Side(max_concurrent=2)
    side.hears(Message("x", 1, keys={"team": KeyReport(2)}))
    with pytest.raises(KeyLimitError):
        side.quota.enter(0.0)
    side.others.expire(10.0, 3.0)
    side.quota.enter(0.0)


def test_a_key_without_limits_is_not_sent() -> None:
    message = Side().own.message(0.0, UNIX_S, full=True)
    assert message is not None
    assert message.keys == {}


# Working set


def test_the_working_set_is_the_sum_of_the_others() -> None:
    side = Side()
    side.hears(Message("x", 1, contexts={"a": (1, 100, 2, 200)}, lost_shares={"a": 0.25}, held=2))
    side.hears(
        Message("y", 1, contexts={"a": (2, 200, 0, 0), "b": (1, 100, 4, 400)}, lost_shares={"a": 0.5, "b": 0.1}, held=3)
    )
    remote = side.state.accounts.remote
    assert tuple(remote) == (4, 400, 6, 600, {"a": 0.75, "b": 0.1}, 5)
    assert (remote.lost_share(2), remote.lost_share(1, {"b"}), remote.lost_share(0)) == (0.425, 0.1, 0.0)
    used = side.state.accounts.homes.uses([("a", 1_000, 0), ("b", 1_000, 0), ("c", 1_000, 0)])
    assert [tuple(each)[2:6] for each in used] == [(3, 300, 2, 200), (1, 100, 4, 400), (0, 0, 0, 0)]
    side.hears(Message("y", 1, gone=True))
    assert side.state.accounts.remote == (1, 100, 2, 200, {"a": 0.25}, 2)


def test_a_response_stored_through_one_replica_is_found_through_another() -> None:
    here, there = Side("here"), Side("there")
    instance = here.instances["a"]
    here.responses.learn("resp_1", instance, Prompt([1, 2, 3], 0, 3000), 0.0, chain="resp_0")
    message = here.own.message(0.0, UNIX_S, full=False)
    assert message is not None
    there.hears(message)
    there.instances["a"].healthy = True
    assert there.responses.instance_of("resp_1", "id", 1.0) is there.instances["a"]
    body = b'{"model":"m","input":"more","previous_response_id":"resp_1"}'
    assert there.responses.continued(parse_request(Endpoint.RESPONSES, body, 16, 1024), 1.0).chain == "resp_0"
    again = here.own.message(1.0, UNIX_S, full=False)
    assert again is None or not again.responses


def test_held_requests_are_sent_in_the_order_of_the_line_with_ages_not_times() -> None:
    one, two = Side("one"), Side("two")
    one.sends("first", 10)
    for name, tokens, at_s in (("long", 900, 1.0), ("short", 100, 2.0)):
        one.gate.offer(RequestView(name, tokens, session_id=name), Room(0, 2), at_s)
    message = one.own.message(5.0, UNIX_S, full=True)
    assert message is not None
    assert [(each.tokens, each.waited_s) for each in message.line] == [(100, 3.0), (900, 4.0)]
    two.hears(message, now_s=1_000.0)
    assert [(each.tokens, each.since_s) for each in two.gate.elsewhere.ranked(1_000.0)] == [(100, 997.0), (900, 996.0)]
    assert one.own.message(6.0, UNIX_S, full=False) is None, "that they grow older is no news"
    one.gate.leave(one.gate.line(6.0)[0])
    two.hears(one.own.message(6.0, UNIX_S, full=False), now_s=1_001.0)
    assert [each.tokens for each in two.gate.elsewhere.ranked(1_001.0)] == [900]


def test_a_message_has_the_first_held_requests_only() -> None:
    side = Side()
    side.sends("first", 10)
    for number in range(20):
        side.gate.offer(RequestView(str(number), 1_000 - number), Room(0, 2), 1.0)
    message = side.own.message(2.0, UNIX_S, full=True)
    assert message is not None
    assert (message.held, [each.tokens for each in message.line]) == (20, [981 + number for number in range(8)])


def test_held_requests_of_a_silent_replica_are_forgotten_after_the_ttl() -> None:
    side = Side()
    side.hears(Message("x", 1, held=1, line=(HeldReport(1, 100, 3.0),)), now_s=10.0)
    side.hears(Message("y", 1, held=1, line=(HeldReport(1, 200, 3.0),)), now_s=12.0)
    side.others.expire(13.5, ttl_s=3.0)
    assert [each.replica for each in side.gate.elsewhere.ranked(13.5)] == ["y"]
    side.hears(Message("y", 1, gone=True))
    assert not side.gate.elsewhere
