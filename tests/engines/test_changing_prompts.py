"""A session like Claude Code's on real engines: its first line changes with each request and ends the cached prefix."""

from __future__ import annotations

import uuid
from typing import Any

from tests.engines.conftest import StartProxy
from tests.engines.rig import REAL_ENGINES, Engines, Proxy
from tests.proxy.sessions.turns import billing_line, conversation, words

pytestmark = REAL_ENGINES

TURNS = 20
WORDS, SYSTEM_WORDS = 40, 150
"""Of a message, and of the system prompt besides: the detector knows a conversation by its first KiB. The cached share
depends on the number of turns; engines compute three times as long for messages of 100 words.
"""
ENGINES = (0, 1)
SETTINGS: dict[str, Any] = {"policy": {"name": "session_sticky"}, "offload": {"planner": "never", "params": {}}}


async def session(proxy: Proxy, *, line: bool) -> list[dict[str, Any]]:
    """The breakdown rows of a session's turns; its text is new, so nothing of it is cached before."""
    name, seed = uuid.uuid4().hex, uuid.uuid4().int
    for number in range(TURNS):
        system = f"{billing_line(number) if line else ''}{words(SYSTEM_WORDS, seed)} "
        messages = conversation(number + 1, system, seed=seed, length=WORDS)
        answer = await proxy.client.post(
            "/v1/chat/completions",
            json={"model": proxy.model, "messages": messages, "max_tokens": 2, "stream": number % 2 == 0},
            headers={"x-claude-code-session-id": name},
        )
        assert answer.status_code == 200, answer.text
    rows = await proxy.rows(session_id=name)
    assert len(rows) == TURNS
    assert len({row["instance"] for row in rows}) == 1
    return rows


def hit_rate(rows: list[dict[str, Any]]) -> float:
    return sum(row["actual_cached_tokens"] for row in rows) / sum(row["prompt_tokens"] for row in rows)


async def test_the_rule_restores_the_hit_rate_and_without_it_every_turn_names_the_line(
    engines: Engines, start_proxy: StartProxy
) -> None:
    plain = await start_proxy(*ENGINES, **SETTINGS)
    reference = await session(plain, line=False)
    assert {row["cache_killer"] for row in reference} == {None}
    spoiled = await session(plain, line=True)
    assert [row["cache_killer"] for row in spoiled] == [None, *["cch"] * (TURNS - 1)]
    found = (await plain.client.get("/cache-killers")).json()["rules"]["cch"]
    # The engine's own report: all of the earlier prompt after the line was computed again.
    assert found["lost_tokens"] > 0.8 * sum(row["prompt_tokens"] for row in spoiled[:-1])
    normalizing = await start_proxy(*ENGINES, normalize={"chat": ["cch"]}, **SETTINGS)
    restored = await session(normalizing, line=True)
    assert all(row["normalized"] == ["cch"] for row in restored)
    assert {row["cache_killer"] for row in restored} == {None}
    rates = {"without the line": hit_rate(reference), "with it": hit_rate(spoiled), "and the rule": hit_rate(restored)}
    print(rates)
    assert rates["without the line"] > 0.8, rates
    assert rates["with it"] < 0.1, rates
    assert rates["and the rule"] >= 0.9 * rates["without the line"], rates
    await engines.until_idle(*ENGINES)
