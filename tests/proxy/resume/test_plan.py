"""Resume plans and cuts: permitted requests, positions, and the continuing request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.request.parse import Endpoint
from proxy.resume.continuation import Cut, StreamSoFar
from proxy.resume.plan import ResumeResult, body_to_send, choose_cut, continuation_body, plan_resume, resume_enabled
from proxy.resume.splice import Splice
from proxy.settings import ResumeSettings, ResumeWhen
from tests.proxy.resume.rig import CHAT, GREEDY, IDS, MANY, MODEL_TOKENS, USAGE, Life, event, parsed, planned


def test_what_is_continued_is_the_prompt_and_the_tokens_so_far() -> None:
    extra = {"min_tokens": 20, "top_k": 5, "logit_bias": {"97": 1}, "truncate_prompt_tokens": 99, "n": 1}
    life = Life(GREEDY | USAGE | extra)
    life.begin(6)
    cut = life.continue_on(2)
    body = json.loads(life.bodies[1])
    tokens = life.whole["text"].encode()
    assert 0 < cut.ids <= 6
    assert body == {
        **{"model": "stub", "stream": True, "temperature": 0, "stream_options": {"include_usage": True}},
        **{"return_token_ids": True, "top_k": 5, "logit_bias": {"97": 1}},
        **{"prompt": [*b"hello", *tokens[: cut.ids]], "max_tokens": 30 - cut.ids, "min_tokens": 20 - cut.ids},
    }


def test_a_chat_is_continued_as_a_completion_of_its_prompts_ids() -> None:
    chat = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    life = Life(chat | USAGE | {"chat_template_kwargs": {"x": 1}})
    life.begin(5)
    cut = choose_cut(life.plan, life.so_far, life.client, MANY, MODEL_TOKENS)
    assert isinstance(cut, Cut)
    endpoint, raw = continuation_body(life.plan, life.so_far, cut, life.sent, MODEL_TOKENS)
    body = json.loads(raw)
    prompt = "<user>hi 水<assistant>".encode()
    assert endpoint is Endpoint.COMPLETIONS
    assert cut.ids
    assert body["prompt"][: len(prompt)] == list(prompt)
    assert len(body["prompt"]) == len(prompt) + cut.ids
    # A completion without a limit would stop at 16 tokens, and vLLM requires the limit to fit.
    assert body["max_tokens"] == MODEL_TOKENS - len(prompt) - cut.ids
    assert not {"messages", "chat_template_kwargs"} & set(body)


@pytest.mark.parametrize(
    "change",
    [
        {"stop": ["x"]},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -1},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a*"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"bad_words": ["no"]},
        {"repetition_detection": {"max_pattern_size": 3}},
        {"something_new": 3},
    ],
)
def test_what_depends_on_all_that_was_generated_is_repeated(change: dict[str, Any]) -> None:
    for base in (GREEDY, CHAT):
        plan = planned(base | change)
        assert (plan.may_continue, plan.may_repeat) == (False, True)
        life = Life(base | change)
        life.begin(8)
        assert life.continue_on(2) == Cut(0, 0)
        assert life.bodies[1] == life.sent


@pytest.mark.parametrize(
    "change",
    [
        {"stop": None},
        {"stop": []},
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"n": 1, "best_of": 1},
        {"tools": [], "tool_choice": "none"},
        {"logprobs": None},
        {"echo": False, "suffix": None},
        {"repetition_penalty": 1.3},
        {"ignore_eos": True, "stop_token_ids": [3]},
        {"temperature": 1e-6},
        {"seed": 5},
    ],
)
def test_what_does_not_is_continued(change: dict[str, Any]) -> None:
    plan = planned(GREEDY | change)
    assert (plan.may_continue, plan.may_repeat) == (True, True)


def test_numbers_and_flags_written_as_strings_count_like_others() -> None:
    plan = planned(GREEDY | {"temperature": "0", "max_tokens": "9", "min_tokens": "3", "return_token_ids": "true"})
    assert (plan.may_repeat, plan.max_tokens, plan.min_tokens, plan.returns_ids) == (True, 9, 3, True)
    assert planned(GREEDY | {"temperature": 1, "seed": "5"}).may_repeat
    for endless in ("inf", "nan"):
        assert planned(GREEDY | {"min_tokens": endless}).min_tokens == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"temperature": 0.5}, ResumeResult.SAMPLED),
        ({"temperature": None}, ResumeResult.SAMPLED),
        ({"n": 2}, ResumeResult.SHAPE),
        ({"best_of": 3}, ResumeResult.SHAPE),
        ({"echo": True}, ResumeResult.SHAPE),
        ({"suffix": "end"}, ResumeResult.SHAPE),
        ({"use_beam_search": True}, ResumeResult.SHAPE),
        ({"prompt": ["a", "b"]}, ResumeResult.SHAPE),
        ({"prompt": [[1, 2], [3]]}, ResumeResult.SHAPE),
        ({"logprobs": 0}, ResumeResult.LOGPROBS),
        ({"logprobs": True}, ResumeResult.LOGPROBS),
        ({"prompt_logprobs": 0}, ResumeResult.LOGPROBS),
    ],
)
def test_what_cannot_be_resumed_is_refused_with_its_reason(change: dict[str, Any], why: ResumeResult) -> None:
    assert plan_resume(parsed(GREEDY | change), sampled=False) is why


def test_a_missing_temperature_is_not_greedy() -> None:
    body = {name: value for name, value in GREEDY.items() if name != "temperature"}
    assert plan_resume(parsed(body), sampled=False) is ResumeResult.SAMPLED


def test_sampled_answers_are_continued_only_where_allowed_and_nothing_need_come_again() -> None:
    drawn = GREEDY | {"temperature": 0.9}
    plan = planned(drawn, sampled=True)
    assert (plan.may_continue, plan.may_repeat) == (True, False)
    assert plan_resume(parsed(drawn | {"stop": "x"}), sampled=True) is ResumeResult.SAMPLED
    seeded = planned(drawn | {"seed": 1}, sampled=True)
    assert (seeded.may_continue, seeded.may_repeat) == (False, True)

    so_far = StreamSoFar(keep_ids=False)
    so_far.feed(event(text="a", ids=[97], prompt=[1, 2]))
    assert choose_cut(plan, so_far, b"{}", MANY, None) == Cut(1, 1)
    so_far.feed(event(text="", ids=[195]))
    assert choose_cut(plan, so_far, b"{}", MANY, None) == Cut(1, 1)
    so_far.feed(event(text="éa", ids=[169, 97]))
    assert choose_cut(plan, so_far, b"{}", MANY, None) is ResumeResult.NO_CLEAN_POSITION
    # The next engine may sample others in place of those that were not shown.
    so_far.feed(event(text="b", ids=[98]))
    so_far.feed(event(text="", ids=[195]))
    cut = choose_cut(plan, so_far, b"{}", MANY, None)
    assert cut == Cut(5, 3)
    Splice(so_far, cut, keep_ids=False)
    assert so_far.ids == [97, 195, 169, 97, 98]


def test_a_position_is_clean_after_one_token_with_text() -> None:
    so_far = StreamSoFar(keep_ids=False)
    for said, ids, clean in (
        ("a", [97], Cut(1, 1)),
        ("", [240], Cut(1, 1)),
        ("", [159], Cut(1, 1)),
        ("bc", [98, 99, 195], Cut(1, 1)),
        ("é", [169], Cut(7, 3)),
    ):
        so_far.feed(event(said, ids))
        assert so_far.clean == clean


def test_an_answer_of_which_some_ids_are_not_known_is_repeated() -> None:
    so_far = StreamSoFar(keep_ids=False)
    plan = planned(GREEDY)
    so_far.feed(event("a", [97], prompt=[1, 2]))
    assert choose_cut(plan, so_far, b"", MANY, None) == Cut(1, 1)
    so_far.feed(event("b", []))
    so_far.feed(event("c", [99]))
    assert choose_cut(plan, so_far, b"", MANY, None) == Cut(0, 0)


def test_more_than_may_be_repeated_is_not() -> None:
    life = Life(GREEDY | {"stop": "nowhere"})
    life.begin(10)
    for limit, cut in ((9, ResumeResult.TOO_LONG_TO_REPEAT), (10, Cut(0, 0))):
        assert choose_cut(life.plan, life.so_far, life.client, limit, MODEL_TOKENS) == cut
    several = Life(GREEDY, per_event=5)
    several.begin(4)
    assert several.so_far.clean == Cut(0, 0)
    assert choose_cut(several.plan, several.so_far, b"", 19, None) is ResumeResult.TOO_LONG_TO_REPEAT


def test_an_answer_without_output_may_always_be_repeated() -> None:
    for body in (GREEDY, CHAT):
        life = Life(body)
        life.begin(1 if body is CHAT else 0)
        drawn = life.plan._replace(may_repeat=False, may_continue=False)
        assert choose_cut(drawn, life.so_far, life.client, 0, None) == Cut(0, 0)


def test_a_chat_is_not_continued_where_a_completion_would_differ() -> None:
    thinking = Life(CHAT, thinks=5)
    thinking.begin(9)
    assert thinking.continue_on(2) == Cut(0, 0)

    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    for parts, continued in (
        ([{"type": "text", "text": "hi"}], True),
        ([{"type": "text", "text": "hi"}, image], False),
    ):
        life = Life(CHAT)
        life.begin(9)
        client = json.dumps(CHAT | {"messages": [{"role": "user", "content": parts}]}).encode()
        cut = choose_cut(life.plan, life.so_far, client, MANY, MODEL_TOKENS)
        assert isinstance(cut, Cut)
        assert bool(cut.ids) is continued

    unlimited = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    life = Life(unlimited, max_model_len=200)
    life.begin(9)
    # The permitted length of a completion is not known: only a chat has a default.
    assert choose_cut(life.plan, life.so_far, life.client, MANY, None) == Cut(0, 0)

    calling = Life(CHAT | {"tools": [{}]}, tool_after=6)
    calling.begin(9)
    assert choose_cut(calling.plan, calling.so_far, calling.client, MANY, None) is ResumeResult.TOOL_CALL


@pytest.mark.parametrize("asked", [{}, {"return_token_ids": False}, {"return_token_ids": None}, IDS])
def test_what_resuming_asks_for_is_added_to_the_request(asked: dict[str, Any]) -> None:
    body = GREEDY | asked
    plan = planned(body)
    sent = body_to_send(json.dumps(body).encode() + b"\n", plan, with_usage=True)
    assert json.loads(sent) == body | IDS | USAGE
    assert plan.returns_ids is (asked == IDS)


@pytest.mark.parametrize(
    ("when", "header", "expected"),
    [
        (ResumeWhen.NEVER, b"1", False),
        (ResumeWhen.ON_REQUEST, None, False),
        (ResumeWhen.ON_REQUEST, b"0", False),
        (ResumeWhen.ON_REQUEST, b" 1", True),
        (ResumeWhen.ON_REQUEST, b"True", True),
        (ResumeWhen.ALWAYS, None, True),
        (ResumeWhen.ALWAYS, b"1", True),
        (ResumeWhen.ALWAYS, b"0", False),
        (ResumeWhen.ALWAYS, b"false", False),
        (ResumeWhen.ALWAYS, b"maybe", False),
    ],
)
def test_who_is_resumed(when: ResumeWhen, header: bytes | None, expected: bool) -> None:
    headers = {} if header is None else {b"x-warmroute-resume": header}
    assert resume_enabled(ResumeSettings(enabled=when), headers) is expected


def test_requests_for_one_attempt_are_not_resumed_unless_requested() -> None:
    settings = ResumeSettings(enabled=ResumeWhen.ALWAYS)
    once = {b"x-warmroute-no-retry": b"1"}
    assert not resume_enabled(settings, once)
    assert resume_enabled(settings, {b"x-warmroute-no-retry": b"0"})
    assert resume_enabled(settings, once | {b"x-warmroute-resume": b"1"})
