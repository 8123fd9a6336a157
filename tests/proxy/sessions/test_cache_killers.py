"""The detector of cache killers: one test per rule, what is no killer, bounds, and redaction."""

from __future__ import annotations

import json
import sys
import uuid
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.request.parse import Endpoint
from proxy.sessions.kept_turn import MAX_BLOCKS, SAMPLE_BYTES, keep
from proxy.sessions.killer_rules import REMEDIES, KillerRule, classes
from proxy.sessions.turn_texts import turn_text
from tests.proxy.request.parsing import parse_request
from tests.proxy.sessions.turns import BLOCK_BYTES, Messages, Watch, billing_line, conversation, parsed_chat, words

TOOLS = [{"type": "function", "function": {"name": f"t{n}", "description": words(20, n)}} for n in range(6)]


CHANGES: dict[KillerRule, list[Any]] = {
    KillerRule.CCH: [billing_line],
    KillerRule.RANDOM_ID: [
        lambda n: f"request {uuid.UUID(int=n * 7**40)} ",
        lambda n: f"trace {n * 7**20:016x}f1 ",
        lambda n: f"call_{'Zb'[n % 2]}x{n}Kq8dT2mW9pL ",
    ],
    KillerRule.TIMESTAMP: [
        lambda n: f"Now: {(datetime(2026, 11, 22, 9, 59) + timedelta(minutes=n)).isoformat()} ",
        lambda n: f"It is {(datetime(2026, 11, 22, 9, 59) + timedelta(minutes=n)):%H:%M:%S}. ",
        lambda n: f"time={1_790_000_000 + 7 * n}.25 ",
        lambda n: f"Today is Nov {n + 8}, 2026. ",
    ],
    KillerRule.COUNTER: [lambda n: f"Turn {n + 8} of many. ", lambda n: f"{18_231 - 977 * n} tokens left. "],
    KillerRule.OTHER: [lambda n: f"Mood: {('calm', 'eager', 'tired')[n % 3]}. "],
}
EACH = [(rule, change) for rule, changes in CHANGES.items() for change in changes]


@pytest.mark.parametrize(("rule", "change"), EACH)
def test_a_change_in_the_system_prompt_is_found_in_every_turn_with_its_rule(rule: KillerRule, change: Any) -> None:
    watch = Watch()
    lead = "You are an agent. "
    assert watch.turn(conversation(1, lead + change(0))) is None
    for number in range(1, 6):
        found = watch.turn(conversation(number + 1, lead + change(number)))
        assert found is not None
        assert (found.rule, found.exact, found.message) == (rule, True, 0)
        before = json.dumps(conversation(number, lead + change(number - 1)))
        now = json.dumps(conversation(number + 1, lead + change(number)))
        first = next(at for at, (was, is_now) in enumerate(zip(before, now, strict=False)) if was != is_now)
        assert found.position_bytes == first
        assert found.lost_tokens == found.history_tokens > 0.9 * len(before) / 4
    assert watch.killers.turns == {rule: 5}


@pytest.mark.parametrize("rule", [KillerRule.CCH, KillerRule.TIMESTAMP])
def test_a_change_deep_in_the_history_is_named_at_once_and_exact_from_the_second_time_on(rule: KillerRule) -> None:
    """Of the middle of a prompt only hashes are kept, until it has changed."""
    watch = Watch()

    def turn(number: int) -> Messages:
        messages = conversation(4 + number)
        messages[3]["content"] += CHANGES[rule][0](number) + words(200, 5)
        return messages

    assert watch.turn(turn(0)) is None
    first, second, third = (watch.turn(turn(number)) for number in (1, 2, 3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert not first.exact
    assert second.exact
    assert third.exact
    assert {each.rule for each in (first, second, third)} == {rule}
    assert first.position_bytes <= second.position_bytes < first.position_bytes + BLOCK_BYTES
    assert second.message == 3
    assert 0 < second.history_tokens < 0.8 * len(json.dumps(turn(1))) / 4


def test_tools_in_another_order_are_found() -> None:
    watch = Watch()
    watch.turn(conversation(1), tools=TOOLS)
    assert watch.turn(conversation(2), tools=TOOLS) is None
    found = watch.turn(conversation(3), tools=TOOLS[::-1])
    assert found is not None
    assert (found.rule, found.position_bytes) == (KillerRule.REORDERED_TOOLS, 0)
    assert watch.turn(conversation(4), tools=TOOLS[::-1]) is None


@pytest.mark.parametrize("tools", [TOOLS[:-1], [*TOOLS, TOOLS[0]], None, "not a list"])
def test_other_tools_are_found(tools: Any) -> None:
    watch = Watch()
    watch.turn(conversation(1), tools=TOOLS)
    found = watch.turn(conversation(2), **({} if tools is None else {"tools": tools}))
    assert found is not None
    assert found.rule is KillerRule.CHANGED_TOOLS


def test_a_sliding_window_over_the_history_is_found() -> None:
    watch = Watch()
    messages = conversation(8)
    watch.turn(messages)
    longer = conversation(9)
    found = watch.turn([longer[0], *longer[3:]])
    assert found is not None
    assert found.rule is KillerRule.DROPPED_HISTORY


def test_turns_that_extend_each_other_are_no_finding() -> None:
    watch = Watch(min_tokens=0)
    assert [watch.turn(conversation(turns)) for turns in (1, 2, 3, 3, 4)] == [None] * 5
    assert watch.killers.compared == 4


def test_other_prompts_of_the_session_are_no_finding_and_do_not_displace_it() -> None:
    """Titles, summaries and sub-agents under the same id: other system prompts, other content."""
    watch = Watch(min_tokens=0)
    for turns in range(1, 6):
        assert watch.turn(conversation(turns)) is None
        assert watch.turn(conversation(1, "Write a title. ", seed=100 + turns)) is None
        assert watch.turn(conversation(turns, seed=7), model="other") is None
    found = watch.turn(conversation(6, "Changed. "))
    assert found is not None
    assert found.rule is KillerRule.OTHER


def test_a_history_that_was_edited_or_summarised_is_no_finding() -> None:
    watch = Watch(min_tokens=0)
    messages = conversation(6)
    watch.turn(messages)
    edited = [*messages[:4], {"role": "user", "content": words(300, 99)}]
    assert watch.turn(edited) is None
    summary = [messages[0], {"role": "user", "content": words(900, 98)}]
    assert watch.turn(summary) is None


def test_sessions_are_not_compared_with_each_other_nor_requests_without_one() -> None:
    watch = Watch(min_tokens=0)
    watch.turn(conversation(1, "a"), session="one")
    assert watch.turn(conversation(2, "b"), session="two") is None
    assert watch.turn(conversation(2, "b"), session=None) is None
    assert watch.killers.compared == 0


def test_tokens_that_the_engine_had_cached_are_not_lost() -> None:
    """vLLM itself leaves Claude Code's line out of /v1/messages."""
    watch = Watch()
    watch.turn(conversation(3, billing_line(1)))
    found = watch.turn(conversation(4, billing_line(2)), cached=100_000)
    assert found is not None
    assert (found.lost_tokens, found.history_tokens > 1000) == (0, True)


def test_changes_that_affect_few_tokens_are_not_reported() -> None:
    watch = Watch(min_tokens=10_000)
    watch.turn(conversation(1, billing_line(1)))
    assert watch.turn(conversation(2, billing_line(2))) is None


def test_text_is_redacted_unless_configured() -> None:
    system = "Be kind, Anna. " + billing_line(0)
    hidden, shown = Watch(), Watch(show_text=True)
    for watch in (hidden, shown):
        watch.turn(conversation(1, system))
    changed = conversation(2, system.replace("cch=0", "cch=7"))
    redacted, plain = hidden.turn(changed), shown.turn(changed)
    assert redacted is not None
    assert plain is not None
    assert plain.before.endswith("cch=")
    assert (plain.was[:7], plain.now[:7]) == ("00000;\\", "70000;\\")
    assert (redacted.was[:7], redacted.now[:7]) == ("99999;\\", "99999;\\")
    assert redacted.before == classes(plain.before)
    assert set(redacted.before + redacted.was + redacted.now) & set("bcdefghijklmopqrstuvwxyz12345678") <= {"n"}


def test_classes_keep_punctuation_and_escapes() -> None:
    assert classes('Ab1 é-"x\\n\\u00e9\\"9') == 'Aa9 a-"a\\na\\"9'


def test_remembered_conversations_are_bounded() -> None:
    watch = Watch(conversations=5)
    for number in range(20):
        watch.turn(conversation(1, seed=number), session=f"s{number % 10}")
    assert len(watch.killers) == 5
    for number in range(20):
        watch.turn(conversation(1, seed=1000 + number), session="one")
    assert len(watch.killers) <= 5
    watch.killers.apply(watch.killers._settings.model_copy(update={"enabled": False}))
    assert len(watch.killers) == 0
    assert watch.turn(conversation(1, seed=1), session="one") is None
    assert len(watch.killers) == 0


def test_what_is_kept_of_a_turn_is_bounded_and_findings_are_too() -> None:
    long = parsed_chat(conversation(1, words(250_000, 3)))
    turn = turn_text(long, BLOCK_BYTES)
    assert turn is not None
    kept = keep(turn, 1)
    assert len(kept.hashes) == MAX_BLOCKS
    size = kept.hashes.itemsize * len(kept.hashes) + len(kept.head) + len(kept.window)
    size += sum(sys.getsizeof(anchor) for _, anchor in kept.anchors)
    assert len(kept.head) == len(kept.window) == SAMPLE_BYTES
    assert size < 15_000
    watch = Watch(kept=3)
    for number in range(8):
        watch.turn(conversation(1 + number, billing_line(number)))
    listed = watch.killers.as_dict(100)
    assert [each["request_id"] for each in listed["found"]] == ["r8", "r7", "r6"]
    assert listed["rules"]["cch"]["turns"] == 7


def test_findings_are_listed_newest_first_by_session_and_rule() -> None:
    watch = Watch()
    for number in range(3):
        watch.turn(conversation(1 + number, billing_line(number)), session="a")
        watch.turn(conversation(1 + number, f"Turn {number} "), session="b")
    listed = watch.killers.as_dict(100)
    assert [each["session_id"] for each in listed["found"]] == ["b", "a", "b", "a"]
    assert [each["rule"] for each in watch.killers.as_dict(100, "a")["found"]] == ["cch", "cch"]
    assert [each["session_id"] for each in watch.killers.as_dict(1, rule="cch")["found"]] == ["a"]
    assert listed["rules"]["cch"]["remedy"] == REMEDIES[KillerRule.CCH]
    assert json.dumps(listed)


def test_an_explanation_changes_nothing() -> None:
    watch = Watch()
    watch.turn(conversation(2, billing_line(1)))
    next_turn = parsed_chat(conversation(3, billing_line(2)))
    for _ in range(2):
        explained = watch.killers.explain(next_turn, "s")
        assert explained is not None
        assert explained["rule"] == "cch"
    assert watch.killers.explain(next_turn, "unknown") is None
    assert watch.killers.explain(next_turn, None) is None
    assert watch.killers.explain(parsed_chat(conversation(3, billing_line(1))), "s") is None
    assert watch.killers.compared == 0


def test_every_rule_has_a_remedy() -> None:
    assert set(REMEDIES) == set(KillerRule)


def test_completions_and_media_are_not_compared() -> None:
    body = json.dumps({"model": "m", "prompt": "x" * 9000}).encode()
    completion = parse_request(Endpoint.COMPLETIONS, body, 16, BLOCK_BYTES)
    assert turn_text(completion, BLOCK_BYTES) is None
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 20_000}}
    assert turn_text(parsed_chat([{"role": "user", "content": [image]}]), BLOCK_BYTES) is None


@given(st.lists(st.text(max_size=3000), min_size=2, max_size=6))
def test_no_text_breaks_the_detector(texts: list[str]) -> None:
    watch = Watch(min_tokens=0)
    for text in texts:
        found = watch.turn([{"role": "system", "content": "y" * 1500 + text}, {"role": "user", "content": "x" * 3000}])
        assert found is None or 0 <= found.position_bytes <= 9 * len(text) + 5000
