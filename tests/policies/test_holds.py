"""Holds under any interleaving: the tokens held are those taken less those settled, each once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from policies.holds import Holds, KvHold

NAMES = ["a", "b"]


class HoldsMachine(RuleBasedStateMachine):
    """Against a model that keeps every hold as a record."""

    taken = Bundle("taken")

    @initialize()
    def start(self) -> None:
        self.holds = Holds()
        self.now_s = 0.0
        self.model: dict[KvHold, dict[str, object]] = {}

    @rule(target=taken, name=st.sampled_from(NAMES), tokens=st.integers(0, 1_000))
    def take(self, name: str, tokens: int) -> KvHold:
        hold = self.holds.take(name, tokens)
        self.model[hold] = {"name": name, "tokens": tokens, "state": "held"}
        return hold

    @rule(hold=taken)
    def release(self, hold: KvHold) -> None:
        hold.release()
        if self.model[hold]["state"] == "held":
            self.model[hold]["state"] = "gone"

    @rule(hold=taken, for_s=st.sampled_from([-1.0, 0.0, 5.0, 50.0]))
    def orphan(self, hold: KvHold, for_s: float) -> None:
        hold.orphan(self.now_s + for_s)
        if self.model[hold]["state"] == "held":
            self.model[hold]["state"] = self.now_s + for_s

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name: str) -> None:
        self.holds.forget(name)
        for kept in self.model.values():
            if kept["name"] == name:
                kept["state"] = "gone"

    @rule(step_s=st.sampled_from([1.0, 5.0, 60.0]))
    def wait(self, step_s: float) -> None:
        self.now_s += step_s

    @invariant()
    def it_is_what_the_model_says(self) -> None:
        for name in NAMES:
            mine = [kept for kept in self.model.values() if kept["name"] == name]
            expected = sum(
                int(str(kept["tokens"]))
                for kept in mine
                if kept["state"] == "held" or (isinstance(kept["state"], float) and kept["state"] > self.now_s)
            )
            assert self.holds.tokens(name, self.now_s) == expected
        held = [int(str(kept["tokens"])) for kept in self.model.values() if kept["state"] == "held"]
        assert self.holds.total() == sum(held)

    def teardown(self) -> None:
        for hold in self.model:
            hold.release()
        assert self.holds.total() == 0


TestHolds = HoldsMachine.TestCase
TestHolds.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_hold_of_an_engine_that_restarted_is_gone_and_leaves_no_orphan_on_the_new_one() -> None:
    holds = Holds()
    before = holds.take("p", 500)
    holds.forget("p")
    after = holds.take("p", 70)
    before.orphan(1_000.0)
    assert holds.tokens("p", 0.0) == 70
    after.release()
    assert (holds.tokens("p", 0.0), holds.total()) == (0, 0)


def test_expired_orphans_are_not_kept() -> None:
    holds = Holds()
    for number in range(100):
        holds.take("p", 1).orphan(float(number))
        assert holds.tokens("p", float(number)) == 0
    assert len(holds._kept["p"].orphans) == 0


def test_an_instance_never_seen_holds_nothing_and_a_negative_hold_is_refused() -> None:
    assert Holds().tokens("x", 0.0) == 0
    with pytest.raises(ValueError, match="must not be negative"):
        Holds().take("x", -1)
