"""Streams of a routing session: which steps are watched, and that each ends."""

from __future__ import annotations

import pytest

from policies.classes import ClassThresholds
from policies.costs.short_step import BesideStream
from policies.ledger import Account
from policies.offload.never import Never
from policies.routing.warm import Warm
from policies.session import RoutingSession
from policies.state import Commitment, FleetState
from policies.types import Role, Transport
from tests.policies.builders import ask_new, decision_for


class Watched:
    """A session of two instances that notes what is learned from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = FleetState()
        for name in ("a", "b"):
            self.state.add_instance(name, Role.KV_BOTH, "h", Transport.NVLINK)
        self.routing = RoutingSession(self.state, Warm(), Never(), ClassThresholds())
        self.learned: list[BesideStream] = []
        monkeypatch.setattr(self.state.costs, "steps", self)

    def observe(self, beside: BesideStream) -> None:
        self.learned.append(beside)

    @property
    def short_step(self) -> None:
        """Asked for by snapshots."""

    def sent(self, number: int, tokens: int, prefill_on: str | None = None) -> Commitment:
        request = ask_new(number, tokens)
        fleet = self.state.snapshot(request, 0.0, self.state.instances)
        return self.state.commit(request, fleet, decision_for(request, "a", prefill_on), 0.0)

    def streams(self, instance: str) -> int:
        return self.state.costs.watch.began(instance, 1e6).instance.streams - 1


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_stream_is_learned_from_when_its_last_token_has_come(watched: Watched) -> None:
    first, second = watched.sent(1, 1_600), watched.sent(2, 320)
    watched.routing.began(first, 1.0)
    watched.routing.began(second, 2.0)
    watched.routing.answered(first, 41, 3.0)
    model = watched.state.costs.prefill
    assert [each[:5] for each in watched.learned] == [(2.0, 40, 60.0, 1, 0)]
    assert watched.learned[0].prefill_s == pytest.approx(model.formula_s(320, 0) - model.fixed_s)
    first.release(3.0)
    first.release(4.0)
    assert watched.streams("a") == 1


def test_an_answer_of_unknown_length_or_that_broke_off_is_none(watched: Watched) -> None:
    unknown, broken = watched.sent(1, 1_600), watched.sent(2, 320)
    watched.routing.began(unknown, 1.0)
    watched.routing.began(broken, 1.0)
    watched.routing.answered(unknown, None, 2.0)
    unknown.release(2.0)
    broken.release()
    watched.routing.answered(broken, 5, 3.0)
    assert watched.learned == []
    assert watched.streams("a") == 0


def test_an_answer_in_one_piece_is_not_watched_and_its_prefill_not_known(watched: Watched) -> None:
    stream, whole = watched.sent(1, 1_600), watched.sent(2, 320)
    watched.routing.began(stream, 1.0)
    watched.routing.began(whole, 2.0, streamed=False)
    watched.routing.answered(whole, 41, 2.0)
    watched.routing.answered(stream, 41, 3.0)
    assert [each.short for each in watched.learned] == [0]
    assert watched.state.ledger.totals()["prefilling"] == 0


def test_a_handed_over_prefill_delays_the_streams_of_p(watched: Watched) -> None:
    on_p = watched.state.snapshot(ask_new(3, 320), 0.0, ["b"])
    streaming = watched.state.commit(ask_new(3, 320), on_p, decision_for(ask_new(3, 320), "b"), 0.0)
    watched.routing.began(streaming, 1.0)
    handed = watched.sent(1, 16_000, prefill_on="b")
    on_d = watched.sent(2, 320)
    watched.routing.began(on_d, 1.0)
    watched.routing.prefilled_on_p(handed, 2.0, 3.0)
    watched.routing.handed_over(handed, 0.1, 3.1)
    watched.routing.began(handed, 3.1)
    watched.routing.answered(streaming, 41, 4.0)
    watched.routing.answered(on_d, 41, 4.0)
    assert [each.long for each in watched.learned] == [1, 0]


def test_a_hand_off_that_fell_back_is_prefilled_on_d(watched: Watched) -> None:
    on_d, fell_back = watched.sent(2, 320), watched.sent(1, 16_000, prefill_on="b")
    watched.routing.began(on_d, 1.0)
    watched.routing.fell_back(fell_back, 2.0)
    watched.routing.began(fell_back, 3.0)
    watched.routing.answered(on_d, 41, 4.0)
    assert [each.long for each in watched.learned] == [1]


def test_where_other_replicas_prefill_too_nothing_is_watched(watched: Watched) -> None:
    watched.state.ledger.remote["a"] = Account()
    stream = watched.sent(1, 1_600)
    watched.routing.began(stream, 1.0)
    watched.routing.answered(stream, 41, 3.0)
    stream.release(3.0)
    assert watched.learned == []


def test_an_engine_that_restarted_has_no_streams_of_before(watched: Watched) -> None:
    lost = watched.sent(1, 1_600)
    watched.routing.began(lost, 1.0)
    watched.state.restarted("a")
    assert watched.streams("a") == 0
    lost.release(2.0)
    assert watched.streams("a") == 1  # the one that the line before began


def test_an_instance_that_has_left_keeps_nothing(watched: Watched) -> None:
    early, late = watched.sent(1, 1_600), watched.sent(2, 320)
    watched.routing.began(early, 1.0)
    watched.state.remove_instance("a")
    watched.routing.began(late, 2.0)
    early.release(3.0)
    late.release(3.0)
    assert watched.streams("a") == 0
