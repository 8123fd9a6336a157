"""Chat messages as prompt text: the model's chat template, rendered as vLLM renders it.

Requests that cannot be reproduced here (images, a template of their own, ...) raise NotRenderableError and are routed
by their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from proxy.tokens.encoder import TokenizerError

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal", "thinking"}
_OWN_FIELDS = {"messages", "documents", "add_generation_prompt", "continue_final_message"}
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class NotRenderableError(ValueError):
    """The messages cannot be rendered here as the engine would."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` blocks, which only mark the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """One compiled template with the tokenizer's special tokens."""

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        """Raises TokenizerError if the template is not valid Jinja."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template is not valid: {error}") from error
        self._variables = jinja2.meta.find_undeclared_variables(parsed)
        self._specials = dict(specials)
        self._expects_parts = _loops_over_content(parsed)

    @classmethod
    def load(cls, tokenizer: Path, chat_template: str) -> ChatTemplate | None:
        """The template beside a tokenizer (``auto``) or in its own file; None if there is none.

        Raises:
            TokenizerError: it cannot be read.
        """
        folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
        try:
            config: dict[str, Any] = {}
            if (folder / "tokenizer_config.json").is_file():
                config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            if chat_template != "auto":
                source: Any = Path(chat_template).read_text(encoding="utf-8")
            elif (folder / "chat_template.jinja").is_file():
                source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
            else:
                source = config.get("chat_template")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"the chat template beside {tokenizer} cannot be read: {error}") from error
        # With several named templates the engine picks one by the request, which is not reproduced.
        if not isinstance(source, str):
            return None
        return cls(source, _special_tokens(config))

    def render(self, body: Mapping[str, Any]) -> str:
        """The prompt of a chat request.

        Raises:
            NotRenderableError: it uses features that cannot be reproduced here.
        """
        for key in ("chat_template", "documents", "mm_processor_kwargs", "media_io_kwargs"):
            if body.get(key):
                raise NotRenderableError(f"{key} is given")
        given = body.get("chat_template_kwargs") or {}
        messages = body.get("messages")
        if not isinstance(given, dict) or not isinstance(messages, list) or not messages:
            raise NotRenderableError("messages or chat_template_kwargs have an unexpected type")
        if given.keys() & {"chat_template", "tokenize", "tools"}:
            raise NotRenderableError("chat_template_kwargs contain reserved keys")
        # The request's own fields take precedence over those of chat_template_kwargs.
        arguments = {key: value for key, value in given.items() if key in self._variables - _OWN_FIELDS}
        if body.get("reasoning_effort") is not None and "reasoning_effort" in self._variables:
            arguments["reasoning_effort"] = body["reasoning_effort"]
        conversation = [self._message(message) for message in messages]
        continued = bool(body.get("continue_final_message", False))
        try:
            return self._render(
                conversation,
                continued,
                tools=_tools(body.get("tools")),
                documents=None,
                add_generation_prompt=bool(body.get("add_generation_prompt", True)),
                **{key: value for key, value in self._specials.items() if key not in arguments},
                **arguments,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise NotRenderableError(f"the template rejects the messages: {error!r}") from error

    def _render(self, conversation: list[dict[str, Any]], continued: bool, **arguments: Any) -> str:
        if not continued:
            return self._template.render(messages=conversation, **arguments)
        # The template closes the last message; the part to continue ends where that message's text does.
        last = conversation[-1].get("content")
        if not isinstance(last, str) or not last.strip():
            raise NotRenderableError("the message to continue has no text")
        conversation[-1]["content"] = last + _CONTINUE_TAG
        text = self._template.render(messages=conversation, **arguments)
        place = text.rfind(_CONTINUE_TAG.strip())
        if place < 0:
            raise NotRenderableError("the template does not show the message to continue")
        kept = text[place : place + len(_CONTINUE_TAG)] == _CONTINUE_TAG
        return text[:place] if kept else text[:place].rstrip()

    def _message(self, message: Any) -> dict[str, Any]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise NotRenderableError("a message has no role")
        role = message["role"]
        shown: dict[str, Any] = {"role": role, "content": self._content(message.get("content"))}
        if role == "assistant":
            calls = message.get("tool_calls")
            if calls:
                shown["tool_calls"] = [_tool_call(call) for call in calls]
            if message.get("reasoning") is not None:
                shown["reasoning"] = shown["reasoning_content"] = message["reasoning"]
        elif role == "tool" and "tool_call_id" in message:
            shown["tool_call_id"] = message["tool_call_id"]
        elif role == "developer":
            shown["tools"] = message.get("tools")
        if isinstance(message.get("name"), str):
            shown["name"] = message["name"]
        return shown

    def _content(self, content: Any) -> Any:
        """Content for the template: one string, or parts if the template loops over them, as vLLM passes it."""
        if content is None:
            texts: list[str] = []
        elif isinstance(content, str):
            texts = [content]
        elif isinstance(content, list):
            texts = [_part(part) for part in content]
        else:
            raise NotRenderableError("a message's content has an unexpected type")
        if self._expects_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
        text = part.get(part["type"], part.get("text"))
        if isinstance(text, str):
            return text
    raise NotRenderableError("a message has a part that is not text")


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, which templates expect; OpenAI sends them as JSON text."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise NotRenderableError("a tool call has no function")
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise NotRenderableError("a tool call's arguments are not JSON") from error
    return {**call, "function": {**call["function"], "arguments": arguments or {}}}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools with the fields and order in which the engine's request model serializes them."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise NotRenderableError("tools is not a list")
    shown = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise NotRenderableError("a tool has no function")
        named = {key: function.get(key) for key in ("name", "description", "parameters")}
        rest = {key: value for key, value in function.items() if key not in named}
        others = {key: value for key, value in tool.items() if key not in {"type", "function"}}
        shown.append({"type": tool.get("type", "function"), "function": {**named, **rest}, **others})
    return shown


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _loops_over_content(parsed: jinja2.nodes.Template) -> bool:
    """True if the template loops over a message's content, so that it expects parts and not a string."""
    names = {
        assign.target.name
        for assign in parsed.find_all(jinja2.nodes.Assign)
        if isinstance(assign.target, jinja2.nodes.Name) and _is_content(assign.node, set())
    }
    return any(_is_content(loop.iter, names) for loop in parsed.find_all(jinja2.nodes.For))


def _is_content(node: jinja2.nodes.Node, names: set[str]) -> bool:
    """True for ``message.content``, ``message['content']``, a filter or slice of it, or a name bound to it."""
    if isinstance(node, jinja2.nodes.Filter):
        return node.node is not None and _is_content(node.node, names)
    if isinstance(node, jinja2.nodes.Getitem):
        if isinstance(node.arg, jinja2.nodes.Slice):
            return _is_content(node.node, names)
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, jinja2.nodes.Name) and node.name in names


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which model templates do not expect.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
