"""A session like Claude Code's, whose first line changes with every request, on simulated engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.conftest import Cluster, StartCluster
from tests.proxy.sessions.turns import billing_line, claude_code_turn, conversation, words

TURNS = 20
Line = Callable[[int], str]
"""The first line of the system prompt in request n."""


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


def message_turns(line: Line) -> Iterator[dict[str, Any]]:
    for number in range(TURNS):
        yield claude_code_turn(number + 1, line(number), length=120)


def string_turns(line: Line) -> Iterator[dict[str, Any]]:
    for number, turn in enumerate(message_turns(line)):
        yield {**turn, "system": line(number) + words(120, 1)}


def whole_responses(line: Line) -> Iterator[dict[str, Any]]:
    for number in range(TURNS):
        _, *items = conversation(number + 1, length=120)
        yield {"instructions": line(number) + words(120, 1), "input": items, "max_output_tokens": 2}


def continued_responses(line: Line) -> Iterator[dict[str, Any]]:
    for number in range(TURNS):
        yield {"instructions": line(number) + words(240, 1), "input": words(120, number), "max_output_tokens": 2}


@pytest.mark.fleet
@pytest.mark.parametrize(
    ("path", "turns", "loses"),
    [
        ("/v1/messages", message_turns, False),  # engines leave out a block of the system prompt with the line
        ("/v1/messages", string_turns, True),
        ("/v1/responses", whole_responses, True),
        ("/v1/responses", continued_responses, True),
    ],
)
async def test_the_line_is_named_in_every_later_turn_of_messages_and_responses(
    start_cluster: StartCluster, path: str, turns: Callable[[Line], Iterator[dict[str, Any]]], loses: bool
) -> None:
    cluster = await start_cluster(2, "--engine-speed", "1000", policy={"name": "session_sticky"})
    for session, line in (("steady", lambda _: billing_line(0)), ("changing", billing_line)):
        before = None
        for number, turn in enumerate(turns(line)):
            continues = turns is continued_responses
            body = {"model": "warm-sim", "stream": number % 2 == 0 and not continues, **turn}
            if before is not None:
                body["previous_response_id"] = before
            answer = await cluster.client.post(path, json=body, headers={"x-claude-code-session-id": session})
            assert answer.status_code == 200, answer.text
            before = answer.json()["id"] if continues else None
    rows = (await cluster.client.get("/breakdown", params={"limit": 1000})).json()["rows"]
    killers = {
        session: [row["cache_killer"] for row in rows if row["session_id"] == session]
        for session in ("steady", "changing")
    }
    assert killers == {"steady": [None] * TURNS, "changing": [None, *["cch"] * (TURNS - 1)]}
    found = (await cluster.client.get("/cache-killers", params={"session_id": "changing"})).json()["found"]
    prompt_tokens = sum(row["prompt_tokens"] for row in rows if row["session_id"] == "changing")
    lost = sum(each["lost_tokens"] for each in found)
    assert lost > 0.7 * prompt_tokens if loses else lost < 0.1 * prompt_tokens, (lost, prompt_tokens)
