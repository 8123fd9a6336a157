"""Codex's command line against the proxy; the features are the rows of docs/clients.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.clients.extra.agent_engine import AgentEngine, ToolCall, tool_results
from tests.clients.extra.rig import EXTRA, MODEL, Client, Platform, Recorded, check_traffic
from tests.proxy.conftest import StartProxy

pytestmark = [*EXTRA, pytest.mark.asyncio(loop_scope="module")]

SECRET = "marzipan-417"
CONFIG = """
model = "{model}"
model_provider = "warmroute"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[model_providers.warmroute]
name = "warmroute"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "WARMROUTE_KEY"

[analytics]
enabled = false
"""


@dataclass
class Codex:
    """The command line without a terminal."""

    client: Client
    program: str
    more: str = ""
    """Further tables of its configuration."""

    @classmethod
    def of(cls, client: Client, platform: Platform, more: str = "") -> Codex:
        return cls(client, f"node_modules/@openai/codex-{platform.npm}/vendor/{platform.triple}/bin/codex", more)

    async def run(self, url: str, model: str, *arguments: str) -> list[dict[str, Any]]:
        """One run; its events."""
        home = self.client.folder / "codex"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(CONFIG.format(url=url, model=model) + self.more, encoding="utf-8")
        self.client.variables = {"CODEX_HOME": str(home), "WARMROUTE_KEY": "unused"}
        done = await self.client.run(self.program, "exec", *arguments, "--skip-git-repo-check", "--json")
        return [json.loads(line) for line in done.checked.splitlines()]


@pytest.fixture
def codex(client_of: Callable[[str], Client], platform: Platform) -> Codex:
    return Codex.of(client_of("node"), platform)


def said(events: list[dict[str, Any]]) -> list[str]:
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item["text"] for item in items if item["type"] == "agent_message"]


async def test_resumed_session(codex: Codex, fleet_url: str, recorded: Recorded) -> None:
    first = await codex.run(fleet_url, MODEL, "Say something.")
    thread = first[0]["thread_id"]
    second = await codex.run(fleet_url, MODEL, "resume", thread, "Say more.")
    assert said(first) != said(second)
    assert len(said(first)) == len(said(second)) == 1
    rows = await recorded.new(2)
    assert {row["session_id"] for row in rows} == {thread}
    assert len({row["instance"] for row in rows}) == 1
    assert rows[1]["actual_cached_tokens"] > 0.9 * rows[0]["prompt_tokens"]
    assert second[-1]["usage"]["cached_input_tokens"] == rows[1]["actual_cached_tokens"]
    check_traffic("codex", rows)


@pytest.mark.asyncio(loop_scope="function")
async def test_turn_with_a_tool(codex: Codex, start_proxy: StartProxy) -> None:
    (codex.client.work / "note.txt").write_text(f"The word is {SECRET}.\n", encoding="utf-8")

    def script(body: dict[str, Any]) -> ToolCall | str:
        results = tool_results(body)
        return f"It says: {results[-1]}" if results else ToolCall("exec_command", {"cmd": "cat note.txt"})

    proxy = await start_proxy(engines=[AgentEngine(script=script)])
    events = await codex.run(proxy.url, "stub", "Which word is in note.txt?")
    assert SECRET in said(events)[-1]
    rows = await proxy.rows()
    assert [row["outcome"] for row in rows] == ["ok", "ok"]
    assert {row["session_id"] for row in rows} == {events[0]["thread_id"]}
    assert [row["actual_cached_tokens"] for row in rows] == [900, 900]
    check_traffic("codex", rows)
