"""The detector of cache killers on messages and responses."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from proxy.fleet.instances import Instances
from proxy.request.parse import Endpoint, Parsed
from proxy.routing.stored_responses import StoredResponses
from proxy.sessions.kept_turn import MAX_BLOCKS, keep
from proxy.sessions.killer_rules import KillerRule
from proxy.sessions.turn_texts import turn_text
from proxy.settings import HealthSettings, InstanceSettings, ResponseSettings
from tests.proxy.sessions.turns import (
    BLOCK_BYTES,
    Watch,
    billing_line,
    claude_code_turn,
    conversation,
    parsed,
    words,
)

TURNS = 20


def message(turns: int, line: str = "A steady line. ", **changes: Any) -> Parsed:
    return parsed(Endpoint.MESSAGES, **{**claude_code_turn(turns, line), **changes})


class Responses:
    """Responses that one engine stores, and requests that continue them."""

    def __init__(self) -> None:
        instances = Instances((InstanceSettings(name="a", url="http://a:1"),), HealthSettings())
        self._engine = instances["a"]
        self._engine.healthy = True
        self._stored = StoredResponses(ResponseSettings(), instances, 1024)

    def request(self, number: int, before: int | None, **body: Any) -> Parsed:
        """Request ``number``, which continues number ``before``."""
        if before is not None:
            body["previous_response_id"] = f"resp_{before}"
        request = self._stored.continued(parsed(Endpoint.RESPONSES, **body), 0.0)
        self._stored.learn(f"resp_{number}", self._engine, request.prompt, 0.0)
        return request


def test_claude_codes_line_is_named_in_every_later_turn_of_messages() -> None:
    watch = Watch()
    assert watch.see(message(1, billing_line(0))) is None
    for number in range(1, TURNS):
        found = watch.see(message(number + 1, billing_line(number)))
        assert found is not None
        assert (found.rule, found.exact, found.message) == (KillerRule.CCH, True, None)
        system = [
            json.dumps(claude_code_turn(1, billing_line(n))["system"], separators=(",", ":")) for n in (0, number)
        ]
        assert abs(found.position_bytes - system[0].index("cch=") - 4) <= 4
        assert found.lost_tokens == found.history_tokens > 300 * number
    assert watch.killers.turns == {KillerRule.CCH: TURNS - 1}


@pytest.mark.parametrize("as_string", [False, True])
def test_a_line_in_a_string_is_named_as_well_as_one_in_a_block(as_string: bool) -> None:
    watch = Watch()
    for number in range(4):
        system: Any = billing_line(number) + words(300, 1)
        if not as_string:
            system = [{"type": "text", "text": system}]
        found = watch.see(message(number + 1, system=system))
        assert (found.rule if found else None) is (KillerRule.CCH if number else None)


def test_cache_marks_that_move_and_messages_in_both_forms_are_no_finding() -> None:
    watch = Watch(min_tokens=0)
    assert [watch.see(message(turns)) for turns in (1, 2, 3, 4, 4, 7)] == [None] * 6
    assert watch.killers.compared == 5


def test_an_engine_that_leaves_the_line_out_loses_nothing() -> None:
    watch = Watch()
    watch.see(message(3, billing_line(1)))
    found = watch.see(message(4, billing_line(2)), cached=100_000)
    assert found is not None
    assert (found.rule, found.lost_tokens) == (KillerRule.CCH, 0)


def test_the_message_of_a_change_is_counted_without_the_system_prompt() -> None:
    watch = Watch()
    for number in range(3):
        body = claude_code_turn(3 + number, "A steady line. ")
        body["messages"][1]["content"] = f"It is 10:0{number}:00. " + body["messages"][1]["content"]
        found = watch.see(parsed(Endpoint.MESSAGES, **body))
    assert found is not None
    assert (found.rule, found.message) == (KillerRule.TIMESTAMP, 1)


def test_other_tools_of_messages_are_found() -> None:
    watch = Watch()
    tools = claude_code_turn(1, "")["tools"]
    watch.see(message(1))
    reordered = watch.see(message(2, tools=tools[::-1]))
    fewer = watch.see(message(3, tools=tools[1:]))
    assert reordered is not None
    assert fewer is not None
    assert (reordered.rule, fewer.rule) == (KillerRule.REORDERED_TOOLS, KillerRule.CHANGED_TOOLS)


def test_requests_of_several_apis_under_one_id_are_not_compared_with_each_other() -> None:
    watch = Watch(min_tokens=0)
    messages = conversation(3)
    watch.turn(messages)
    assert watch.see(parsed(Endpoint.MESSAGES, messages=messages)) is None
    assert watch.see(parsed(Endpoint.RESPONSES, input=messages)) is None
    assert watch.see(parsed(Endpoint.RESPONSES, input=messages[-1]["content"])) is None
    assert watch.killers.compared == 0


def test_images_in_messages_and_responses_are_not_compared() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 20_000}
    request = parsed(Endpoint.MESSAGES, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])
    assert turn_text(request, BLOCK_BYTES) is None
    item = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64," + "A" * 20_000}]}
    assert turn_text(parsed(Endpoint.RESPONSES, input=[item]), BLOCK_BYTES) is None


def test_what_is_kept_of_long_messages_is_bounded() -> None:
    turn = turn_text(message(1, system=words(250_000, 3)), BLOCK_BYTES)
    assert turn is not None
    kept = keep(turn, 1)
    size = kept.hashes.itemsize * len(kept.hashes) + len(kept.head) + len(kept.window)
    size += sum(sys.getsizeof(anchor) for _, anchor in kept.anchors)
    assert len(kept.hashes) == MAX_BLOCKS
    assert size < 15_000
    assert kept.length > 1_400_000


def test_instructions_and_input_of_whole_responses_are_compared() -> None:
    watch = Watch()
    _, *items = conversation(6)
    for number in range(4):
        request = parsed(
            Endpoint.RESPONSES, instructions=billing_line(number) + words(300, 1), input=items[: 3 + number]
        )
        found = watch.see(request)
        assert (found.rule if found else None) is (KillerRule.CCH if number else None)
        assert found is None or found.message is None
    assert watch.see(parsed(Endpoint.RESPONSES, instructions=billing_line(3) + words(300, 1), input=items)) is None
    items[1]["content"] = "Changed. " + items[1]["content"]
    found = watch.see(parsed(Endpoint.RESPONSES, instructions=billing_line(3) + words(300, 1), input=items))
    assert found is not None
    assert (found.rule, found.message) == (KillerRule.OTHER, 1)


def test_a_line_in_the_instructions_is_named_in_every_response_that_continues_one() -> None:
    watch, responses = Watch(), Responses()
    for number in range(TURNS):
        before = number - 1 if number else None
        body = {"instructions": billing_line(number) + words(300, 1), "input": words(200, number)}
        found = watch.see(responses.request(number, before, **body))
        if number == 0:
            assert found is None
            continue
        assert found is not None
        assert (found.rule, found.exact, found.message) == (KillerRule.CCH, True, None)
        # All of the stored conversation, whose length is estimated from that of its turns.
        assert 250 * number < found.history_tokens < 1500 * number
    assert watch.killers.turns == {KillerRule.CCH: TURNS - 1}


def test_a_change_far_into_the_instructions_is_exact_from_the_second_time_on() -> None:
    watch, responses = Watch(), Responses()
    found = [
        watch.see(
            responses.request(
                number,
                number - 1 if number else None,
                instructions=words(900, 1) + f" at 10:0{number}:00 " + words(300, 2),
                input=words(200, number),
            )
        )
        for number in range(4)
    ]
    assert [(each.rule, each.exact) for each in found if each] == [
        (KillerRule.TIMESTAMP, False),
        (KillerRule.TIMESTAMP, True),
        (KillerRule.TIMESTAMP, True),
    ]


def test_responses_that_continue_one_with_the_same_instructions_are_no_finding() -> None:
    watch, responses = Watch(min_tokens=0), Responses()
    body = {"instructions": words(300, 1)}
    watch.see(responses.request(0, None, input=conversation(2)[1:], **body))
    for number in range(1, 5):
        assert watch.see(responses.request(number, number - 1, input=f"and {number}?", **body)) is None
    assert watch.killers.compared == 4
    # The whole conversation as input, since the engine that stored it is gone.
    assert watch.see(responses.request(5, None, input=conversation(4)[1:], **body)) is None


def test_other_tools_of_a_response_that_continues_one_are_found() -> None:
    watch, responses = Watch(), Responses()
    tools = [{"type": "function", "name": f"t{number}"} for number in range(4)]
    body = {"instructions": words(300, 1)}
    watch.see(responses.request(0, None, input=words(300, 2), tools=tools, **body))
    reordered = watch.see(responses.request(1, 0, input=words(300, 3), tools=tools[::-1], **body))
    same = watch.see(responses.request(2, 1, input=words(300, 4), tools=tools[::-1], **body))
    fewer = watch.see(responses.request(3, 2, input=words(300, 5), tools=tools[1:], **body))
    assert reordered is not None
    assert fewer is not None
    assert same is None
    assert (reordered.rule, fewer.rule) == (KillerRule.REORDERED_TOOLS, KillerRule.CHANGED_TOOLS)


def test_a_response_is_compared_with_the_one_it_continues_not_with_the_last_one() -> None:
    watch, responses = Watch(), Responses()
    one, other = words(300, 1), words(300, 2)
    watch.see(responses.request(0, None, instructions=one, input=words(300, 3)))
    watch.see(responses.request(1, None, instructions=other, input=words(300, 4)))
    assert watch.see(responses.request(2, 0, instructions=one, input="next")) is None
    assert watch.see(responses.request(3, 1, instructions=other, input="next")) is None
    assert watch.killers.compared == 2
    found = watch.see(responses.request(4, 2, instructions="Changed. " + one, input="next"))
    assert found is not None
    assert found.rule is KillerRule.OTHER


def test_a_continued_response_is_not_compared_where_the_stored_one_is_not_known() -> None:
    request = parsed(Endpoint.RESPONSES, instructions=words(300, 1), input="next", previous_response_id="resp_1")
    assert turn_text(request, BLOCK_BYTES) is None


def test_a_long_stored_conversation_is_recognised() -> None:
    """Of a stored prompt only the first ``MAX_BLOCKS`` hashes are kept."""
    watch, responses = Watch(), Responses()
    body = {"instructions": words(300, 1)}
    watch.see(responses.request(0, None, input=words(200_000, 2), **body))
    for number in (1, 2):
        assert watch.see(responses.request(number, number - 1, input=words(900, number), **body)) is None
    assert watch.killers.compared == 2
