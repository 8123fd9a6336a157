"""Claude Code's command line against the proxy; the features are the rows of docs/clients.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.extra.agent_engine import AgentEngine, ToolCall, tool_results
from tests.clients.extra.rig import EXTRA, Client, Outcome, Platform, check_traffic
from tests.proxy.conftest import Running, StartProxy

pytestmark = EXTRA

SECRET = "marzipan-417"


@dataclass
class ClaudeCode:
    """The command line without a terminal, in a folder with a note."""

    client: Client
    program: str

    @property
    def note(self) -> Path:
        return self.client.work / "note.txt"

    @classmethod
    def of(cls, client: Client, platform: Platform) -> ClaudeCode:
        return cls(client, f"node_modules/@anthropic-ai/claude-code-{platform.npm}/claude")

    async def start(self, url: str, model: str, *arguments: str, **variables: str) -> Outcome:
        """One run to its end, successful or not."""
        self.note.write_text(f"The word is {SECRET}.\n", encoding="utf-8")
        self.client.variables = {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "unused",
            "ANTHROPIC_MODEL": model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            **variables,
        }
        return await self.client.run(self.program, *arguments, "--output-format", "json")

    async def run(self, proxy: Running, *arguments: str) -> dict[str, Any]:
        """One successful run; its result object."""
        return json.loads((await self.start(proxy.url, "stub", *arguments)).checked)


@pytest.fixture
def claude(client_of: Callable[[str], Client], platform: Platform) -> ClaudeCode:
    return ClaudeCode.of(client_of("node"), platform)


async def test_turn_with_a_tool(claude: ClaudeCode, start_proxy: StartProxy) -> None:
    def script(body: dict[str, Any]) -> ToolCall | str:
        results = tool_results(body)
        return f"It says: {results[-1]}" if results else ToolCall("Read", {"file_path": str(claude.note)})

    proxy = await start_proxy(engines=[AgentEngine(script=script)])
    result = await claude.run(proxy, "-p", "Which word is in note.txt?")
    assert result["is_error"] is False
    assert SECRET in result["result"]
    rows = await proxy.rows()
    assert [row["outcome"] for row in rows] == ["ok", "ok"]
    assert {row["session_id"] for row in rows} == {result["session_id"]}
    assert all(row["stream"] for row in rows)
    assert [row["actual_cached_tokens"] for row in rows] == [900, 900]
    check_traffic("claude_code", rows)


async def test_resumed_session(claude: ClaudeCode, start_proxy: StartProxy) -> None:
    proxy = await start_proxy(engines=[AgentEngine(), AgentEngine()])
    first = await claude.run(proxy, "-p", "Say done.")
    second = await claude.run(proxy, "-p", "Say it again.", "--resume", first["session_id"])
    assert (first["result"], second["result"]) == ("done", "done")
    rows = await proxy.rows()
    assert len(rows) == 2
    assert {row["session_id"] for row in rows} == {first["session_id"]}
    assert len({row["instance"] for row in rows}) == 1
    check_traffic("claude_code", rows)


async def test_sub_agent(claude: ClaudeCode, start_proxy: StartProxy) -> None:
    task = "Name the colour of the sea."

    def script(body: dict[str, Any]) -> ToolCall | str:
        if tool_results(body):
            return "The agent was asked."
        if task in json.dumps(body["messages"]):
            return "teal"
        return ToolCall("Agent", {"description": "ask", "prompt": task, "run_in_background": False})

    proxy = await start_proxy(engines=[AgentEngine(script=script)])
    result = await claude.run(proxy, "-p", "Ask a sub-agent.")
    assert result["result"] == "The agent was asked."
    rows = await proxy.rows()
    session = result["session_id"]
    assert [row["parent_session_id"] for row in rows] == [None, session, None]
    assert rows[1]["session_id"].startswith(f"{session}/")
    assert {rows[0]["session_id"], rows[2]["session_id"]} == {session}
    check_traffic("claude_code", rows)


async def test_bounds_and_other_models(claude: ClaudeCode, start_proxy: StartProxy) -> None:
    bodies: list[dict[str, Any]] = []

    def script(body: dict[str, Any]) -> str:
        bodies.append(body)
        return "done"

    proxy = await start_proxy(engines=[AgentEngine(script=script)])
    haiku = ("-p", "Say done.", "--model", "haiku")
    unknown = await claude.start(proxy.url, "stub", *haiku)
    assert json.loads(unknown.out)["is_error"] is True
    known = await claude.start(
        proxy.url,
        "stub",
        *haiku,
        ANTHROPIC_DEFAULT_HAIKU_MODEL="stub",
        CLAUDE_CODE_MAX_CONTEXT_TOKENS="32768",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="4096",
    )
    result = json.loads(known.checked)
    assert result["is_error"] is False
    assert result["modelUsage"]["stub"]["contextWindow"] == 32768
    assert [(body["model"], body["max_tokens"]) for body in bodies] == [("stub", 4096)]
