"""Coding agents' command lines on real engines; the features are rows of docs/clients.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.clients.extra import environments
from tests.clients.extra.rig import Client, Platform, check_traffic
from tests.clients.extra.test_claude_code import ClaudeCode
from tests.clients.extra.test_codex import Codex
from tests.engines.conftest import StartProxy
from tests.engines.rig import REAL_ENGINES, Engines

pytestmark = REAL_ENGINES

TIMEOUTS = {"first_byte_s": 120, "total_s": 300, "idle_s": 60}
"""Their prompts have 30,000 tokens of the tiny model's."""
WITHOUT_SUB_AGENTS = """
[agents]
enabled = false
"""
"""vLLM 0.18 refuses tools of type `namespace`, which are those of Codex's sub-agents."""


@pytest.fixture
def node(tmp_path: Path) -> Client:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    reason = environments.missing(environments.NODE)
    if reason is not None:
        pytest.skip(reason)
    return Client(environments.folder_of(environments.NODE), tmp_path, tmp_path)


@pytest.fixture
def platform() -> Platform:
    found = Platform.here()
    if found is None:
        pytest.skip("the clients have no program for this platform in their locks")
    return found


def refusals(answers: list[bytes]) -> list[str]:
    return [json.loads(answer)["error"]["message"] for answer in answers if answer.startswith(b'{"error"')]


async def test_claude_code(engines: Engines, start_proxy: StartProxy, node: Client, platform: Platform) -> None:
    relay = await start_proxy.relay(engines.file.url(0))
    proxy = await start_proxy(0, urls={0: relay.url}, timeouts=TIMEOUTS)
    claude = ClaudeCode.of(node, platform)
    done = await claude.start(proxy.url, "tiny", "-p", "Say done.", CLAUDE_CODE_MAX_OUTPUT_TOKENS="16")
    result: dict[str, Any] = json.loads(done.out)
    await proxy.settled()
    # The tiny model hardly ever ends its turn: the client reports that its answer was cut.
    cut = b'"stop_reason":"max_tokens"' in relay.answers[-1].replace(b" ", b"")
    assert result.get("api_error") == ("max_output_tokens" if cut else None)
    rows = await proxy.rows()
    # vLLM 0.18 refuses the first request for a system message in `messages`; the client repeats it without.
    assert [row["outcome"] for row in rows[:2]] == ["engine_refused", "ok"]
    [refusal] = refusals(relay.answers)
    assert "Input should be 'user' or 'assistant'" in refusal
    answered = rows[1:]
    assert {(row["outcome"], row["stream"]) for row in answered} == {("ok", True)}
    tokens = [row["completion_tokens"] for row in answered]
    assert all(each == 16 for each in (tokens if cut else tokens[:-1]))
    assert tokens[-1] <= 16
    assert {row["session_id"] for row in rows} == {result["session_id"]}
    assert result["usage"]["output_tokens"] == sum(tokens)
    check_traffic("claude_code", rows)


async def test_codex(start_proxy: StartProxy, node: Client, platform: Platform) -> None:
    proxy = await start_proxy(0, 1, timeouts=TIMEOUTS)
    codex = Codex.of(node, platform, WITHOUT_SUB_AGENTS)
    events = await codex.run(proxy.url, "tiny", "Say done.")
    await proxy.settled()
    [row] = await proxy.rows()
    assert (row["outcome"], row["stream"], row["session_id"]) == ("ok", True, events[0]["thread_id"])
    assert events[-1]["type"] == "turn.completed"
    usage = events[-1]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (row["prompt_tokens"], row["completion_tokens"])
    check_traffic("codex", [row])
