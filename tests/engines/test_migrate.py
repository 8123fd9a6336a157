"""A session that migrates between real engines: same tokens, and its prefix is pulled from the engine that had it."""

from __future__ import annotations

from typing import Any

from tests.engines.conftest import StartProxy
from tests.engines.rig import BLOCK, REAL_ENGINES, Engines, Proxy, Said, fresh_prompt, many, until

pytestmark = REAL_ENGINES

JUDGE = 3
"""Takes no part: its answers are those of one engine that the session never left."""
STREAMS = 4
PULLED = "vllm:external_prefix_cache_hits_total"
MIGRATE = {
    "name": "migrate",
    "params": {
        # On two processors engines cannot be loaded as GPUs are: four streams are an overload, whatever a move costs.
        **{"priced": False, "stream_s": 1.0, "overload_s": STREAMS - 0.5, "min_cached_tokens": 512},
        # Requests go to the longest prefix, however many are there.
        **{"others_weight": 0.0, "queue_crowd": 0.0, "step_s": 0.0},
    },
}


async def turn(proxy: Proxy, prompt: list[int]) -> tuple[Said, dict[str, Any]]:
    said = await proxy.say(proxy.body(prompt))
    row = await proxy.row(said.request_id)
    assert row is not None
    return said, row


async def test_a_session_migrates_with_its_prefix_and_answers_the_same_tokens(
    engines: Engines, start_proxy: StartProxy
) -> None:
    # Tokens are compared here, not times: the bounds allow for two busy processors.
    bounds = {"prefill_timeout_s": 30.0, "first_token_timeout_s": 25.0}
    proxy = await start_proxy(0, 1, policy=MIGRATE, offload={"planner": "never", "params": {}, **bounds})
    alone = await start_proxy(JUDGE, offload={"planner": "never", "params": {}})
    first = fresh_prompt(1_600)
    said, row = await turn(proxy, first)
    assert row["prefill_instance"] is None
    answers = [said]
    home = row["instance"]
    places = (engines.number(home), 1 - engines.number(home))
    other = engines.name(places[1])
    second = [*first, *said.token_ids, *fresh_prompt(100)]

    bodies = [proxy.body([*first, *fresh_prompt(30)], max_tokens=30_000, stream=True) for _ in range(STREAMS)]
    async with many([proxy.say(body) for body in bodies]):

        async def busy() -> bool:
            row = await proxy.instance(home)
            return bool(row["requests"] == STREAMS and not row["prefilling"])

        await until(busy, "the home decodes its streams")
        pulled = [await engines.total(PULLED, number) for number in places]
        said, row = await turn(proxy, second)
        pulled = [await engines.total(PULLED, number) - before for number, before in zip(places, pulled, strict=True)]
        answers.append(said)
        assert (row["instance"], row["prefill_instance"]) == (other, home), row["attempts"]
        assert (row["reason"], row["offload_reason"]) == ("session_migrated", "chosen")
        assert row["planner"] == "migrate"
        # Home computed the new tokens after the prefix that it had; the target pulled all of it and computed nothing.
        assert row["actual_cached_tokens"] >= len(first) - BLOCK
        assert pulled[0] == 0
        assert pulled[1] >= len(second) - 1 - BLOCK

        third = [*second, *said.token_ids, *fresh_prompt(100)]
        said, row = await turn(proxy, third)
        answers.append(said)
        # The session lives there now: the turn is co-located, and its prefix is what was pulled.
        assert (row["instance"], row["prefill_instance"]) == (other, None)
        assert row["actual_cached_tokens"] >= len(second) - BLOCK

    for prompt, mine in zip((first, second, third), answers, strict=True):
        assert (await alone.say(alone.body(prompt))).answer == mine.answer
    await proxy.settled()
    await engines.until_idle(0, 1)
