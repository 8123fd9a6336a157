"""Tokenization in the proxy: the ids of the whole text at once, and the text of the model's template."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from proxy.tokens import encoder as encoder_module
from proxy.tokens.encoder import Encoder, TokenizerError
from proxy.tokens.template import ChatTemplate, NotRenderableError

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.path }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking is defined %}<think>{% endif %}{% endif %}"
)


def corpus() -> list[str]:
    draw = random.Random(3)
    words = ["".join(draw.choices("abcdefgh", k=draw.randrange(1, 6))) for _ in range(200)]
    return [" ".join(draw.choices(words, k=20)) + "\nand 12 lines, it's so\n\n" for _ in range(200)]


def train(pre: Any = None, decoder: Any = None) -> Tokenizer:
    """A small BPE; by default byte-level with GPT-2's splitting."""
    tokenizer = Tokenizer(models.BPE(unk_token=None if pre is None else "<unk>"))
    tokenizer.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder or decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if pre is None else []
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIALS if pre is None else ["<unk>", *SPECIALS], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


BYTE_LEVEL = train()
METASPACE = train(pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace())


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", copy.token_to_id("<|endoftext|>"))]
    )
    return copy


def whole(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=special).ids)


PIECES = st.one_of(
    st.sampled_from(
        [*SPECIALS, "\n", "\n\n", " ", "  \n a", "'ll", "<|im_", "start|>", "\r\nB", "é", "e\u0301", "123"]
    ),
    st.sampled_from([".\nand so on", ".\n\nand", "x\nyz"]),
    st.text(alphabet="ab cd\n\tEé1'<|>中", max_size=12),
    st.text(max_size=6),
)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE, with_bos(BYTE_LEVEL)], ids=["bytes", "metaspace", "bos"])
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(PIECES, max_size=40), special=st.booleans())
def test_a_growing_text_is_tokenized_as_if_it_were_whole(
    tokenizer: Tokenizer, pieces: list[str], special: bool
) -> None:
    kept, encoder_module.PIECE_CHARS = encoder_module.PIECE_CHARS, 5
    try:
        encoder, text = Encoder(tokenizer, 20_000), ""
        for piece in ["", *pieces]:
            text += piece
            plain = text.encode("utf-8", "replace").decode()
            assert list(encoder.encode(plain, add_special_tokens=special)) == whole(tokenizer, plain, special)
    finally:
        encoder_module.PIECE_CHARS = kept


class LockingCalls:
    """A tokenizer whose ``encode`` is refused once ``locked``: it holds the interpreter's lock."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.locked = False

    def __getattr__(self, name: str) -> Any:
        assert name != "encode" or not self.locked
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE, with_bos(BYTE_LEVEL)])
@pytest.mark.parametrize("special", [False, True])
def test_a_text_without_cuts_is_tokenized_by_the_call_that_does_not_hold_the_interpreter(
    tokenizer: Tokenizer, special: bool
) -> None:
    locking = LockingCalls(tokenizer)
    encoder, text = Encoder(cast(Tokenizer, locking), 0), " ".join(corpus()).replace("\n", " ")
    locking.locked = True
    assert list(encoder.encode(text, add_special_tokens=special)) == whole(tokenizer, text, special)


def test_of_a_growing_conversation_only_the_end_is_tokenized() -> None:
    encoder = Encoder(BYTE_LEVEL, 10_000_000)
    turn = "<|im_start|>user\n" + "".join(corpus()[:20]) + "<|im_end|>\n"
    encoder.encode(turn * 20, add_special_tokens=False)
    before = encoder.misses
    assert list(encoder.encode(turn * 21, add_special_tokens=False)) == whole(BYTE_LEVEL, turn * 21, False)
    assert encoder.misses - before <= 2
    assert encoder.hits > 0


def test_the_memory_for_pieces_is_bounded() -> None:
    encoder = Encoder(BYTE_LEVEL, 30_000)
    for number in range(50):
        encoder.encode(f"end.\nline {number} " * 2_000, add_special_tokens=False)
        assert 0 < encoder.cached_bytes <= 30_000
    assert Encoder(BYTE_LEVEL, 0).encode("\na" * 9_000, add_special_tokens=False)


def test_where_a_tokenizer_joins_over_lines_no_cut_is_made_there() -> None:
    assert Encoder(BYTE_LEVEL, 0)._cuts_lines
    assert not Encoder(METASPACE, 0)._cuts_lines


@pytest.mark.parametrize(
    ("added", "safe"),
    [
        (AddedToken("<a>", special=True), True),
        (AddedToken("<|im_start|>system", special=True), True),  # then <|im_start|> itself is not
        (AddedToken("<w>", single_word=True), False),
        (AddedToken("<l>", lstrip=True), False),
        (AddedToken("word"), False),
        (AddedToken("<<"), False),
    ],
)
def test_only_special_tokens_that_stand_for_themselves_are_cuts(added: AddedToken, safe: bool) -> None:
    tokenizer = Tokenizer.from_str(BYTE_LEVEL.to_str())
    tokenizer.add_tokens([added])
    specials = Encoder(tokenizer, 0)._specials
    assert (added.content in specials) == safe
    assert ("<|im_start|>" in specials) == (added.content not in {"<|im_start|>system", "<<"})


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Encoder.load(tmp_path, 0)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Encoder.load(tmp_path, 0)


def render(body: dict[str, Any], source: str = TEMPLATE) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(body)


def test_messages_become_the_templates_text() -> None:
    user = {"role": "user", "content": "hi"}
    assert render({"messages": [user]}) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render({"messages": [user], "add_generation_prompt": False}) == "<|im_start|>user\nhi<|im_end|>\n"
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert render({"messages": [parts], "add_generation_prompt": False}) == "<|im_start|>user\na\nb<|im_end|>\n"
    assert render({"messages": [{"role": "assistant", "content": None}]}).startswith(
        "<|im_start|>assistant\n<|im_end|>"
    )
    assert render({"messages": [user], "chat_template_kwargs": {"thinking": 1, "unknown": 2}}).endswith("<think>")
    assert render({"messages": [user]}, "{{ bos_token }}{{ messages[0].content }}") == "<s>hi"


def test_a_template_that_loops_over_content_gets_parts() -> None:
    source = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert render({"messages": [{"role": "user", "content": "hi"}]}, source) == "[hi]"
    by_name = "{% set c = messages[0]['content'] %}{% for part in c %}[{{ part.text }}]{% endfor %}"
    assert render({"messages": [{"role": "user", "content": "hi"}]}, by_name) == "[hi]"


def test_tools_and_tool_calls_are_written_as_the_engine_writes_them() -> None:
    tool = {"function": {"parameters": {"b": 1, "a": 2}, "name": "read"}}
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "/x"}'}}
    text = render(
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool]},
    )
    written = {"type": "function", "function": {"name": "read", "description": None, "parameters": {"b": 1, "a": 2}}}
    assert text.startswith(f"<|im_start|>tools\n{json.dumps(written)}".replace("tools\n{", "tools\n[{"))
    assert "<|im_start|>assistant\n/x<|im_end|>" in text


def test_a_message_to_continue_is_left_open() -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert render(body).endswith("<|im_start|>assistant\nWell, ")
    trimming = "{% for m in messages %}{{ m.role }}:{{ m.content | trim }};{% endfor %}"
    assert render(body, trimming) == "user:hi;assistant:Well,"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"content": "x"}]},
        {"messages": ["x"]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"},
        {"messages": [{"role": "user", "content": "x"}], "documents": [{}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": ["x"]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tools": []}},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        {"messages": [{"role": "user", "content": "refuse"}]},
        {"messages": [{"role": "user", "content": ""}], "continue_final_message": True},
    ],
)
def test_what_cannot_be_reproduced_is_not_rendered(body: dict[str, Any]) -> None:
    source = "{% if messages[0].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    with pytest.raises(NotRenderableError):
        render(body, source)


def test_a_template_cannot_reach_outside() -> None:
    with pytest.raises(NotRenderableError):
        render({"messages": [{"role": "user", "content": "x"}]}, "{{ messages.__class__.__mro__[1].__subclasses__() }}")


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path, "auto") is None
    body = {"messages": [{"role": "user", "content": "x"}]}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "config{{ eos_token }}", "eos_token": {"content": "<e>"}}))
    loaded = ChatTemplate.load(tmp_path, "auto")
    assert loaded is not None
    assert loaded.render(body) == "config<e>"
    (tmp_path / "chat_template.jinja").write_text("file{{ eos_token }}")
    loaded = ChatTemplate.load(tmp_path / "tokenizer.json", "auto")
    assert loaded is not None
    assert loaded.render(body) == "file<e>"
    own = tmp_path / "own.jinja"
    own.write_text("own")
    loaded = ChatTemplate.load(tmp_path, str(own))
    assert loaded is not None
    assert loaded.render(body) == "own"
    own.write_text("{% if %}")
    with pytest.raises(TokenizerError, match="not valid"):
        ChatTemplate.load(tmp_path, str(own))
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "x"}]}))
    assert ChatTemplate.load(tmp_path, "auto") is None
