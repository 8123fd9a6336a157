"""A session like Claude Code's, whose first line changes with every request, on simulated engines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.conftest import Cluster, StartCluster
from tests.proxy.sessions.turns import billing_line, conversation

TURNS = 20


async def hit_rate(cluster: Cluster, session: str, seed: int, *, line: bool) -> tuple[float, list[dict[str, Any]]]:
    """Share of prompt tokens that the engines had cached over the session's turns, and its rows."""
    for number in range(TURNS):
        # The engines' own answer is not repeated: the next turn has the conversation's.
        messages = conversation(number + 1, billing_line(number) if line else "", seed=seed, length=120)
        body = {"model": "warm-sim", "messages": messages, "max_tokens": 2, "stream": number % 2 == 0}
        answer = await cluster.client.post(
            "/v1/chat/completions", json=body, headers={"x-claude-code-session-id": session}
        )
        assert answer.status_code == 200
    found = (await cluster.client.get("/breakdown", params={"limit": 1000, "session_id": session})).json()["rows"]
    assert len(found) == TURNS
    cached = sum(row["actual_cached_tokens"] for row in found)
    return cached / sum(row["prompt_tokens"] for row in found), found


@pytest.mark.fleet
async def test_normalisation_restores_the_hit_rate_and_the_detector_names_the_line_without_it(
    start_cluster: StartCluster,
) -> None:
    plain = await start_cluster(2, "--engine-speed", "1000", policy={"name": "session_sticky"})
    reference, rows = await hit_rate(plain, "none", 1, line=False)
    assert reference > 0.8
    assert {row["cache_killer"] for row in rows} == {None}
    spoiled, rows = await hit_rate(plain, "line", 2, line=True)
    assert spoiled < 0.1
    assert [row["cache_killer"] for row in rows] == [None, *["cch"] * (TURNS - 1)]
    found = (await plain.client.get("/cache-killers", params={"session_id": "line"})).json()["found"]
    assert sum(each["lost_tokens"] for each in found) > 0.7 * sum(row["prompt_tokens"] for row in rows)

    normalizing = await start_cluster(
        2, "--engine-speed", "1000", policy={"name": "session_sticky"}, normalize={"chat": ["cch"]}
    )
    restored, rows = await hit_rate(normalizing, "rule", 3, line=True)
    assert restored >= 0.9 * reference
    assert {row["cache_killer"] for row in rows} == {None}
    assert all(row["normalized"] == ["cch"] for row in rows)
