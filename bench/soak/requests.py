"""The requests of a run, and their expected answers, byte for byte."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from bench.soak.plan import MODEL, SoakPlan
from bench.soak.processes import SoakError


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request and the text of its answer, which is the same on every engine."""

    path: str
    body: dict[str, Any]
    text: str
    session_id: str


def text_of_choice(choice: dict[str, Any]) -> str:
    """The text of a choice: completion or chat, whole or a piece of a stream."""
    for key in ("message", "delta"):
        if key in choice:
            return str(choice[key].get("content") or "")
    return str(choice.get("text") or "")


async def known_requests(session: aiohttp.ClientSession, engine_url: str, plan: SoakPlan) -> list[KnownRequest]:
    """Draw the requests and get their answers from an engine, without the proxy.

    Raises:
        SoakError: the engine does not answer them.
    """
    draw = random.Random(plan.seed)
    sessions = [(f"soak-{number}", _words(draw, 400)) for number in range(max(1, plan.prompts // 4))]
    asked: list[tuple[str, dict[str, Any], str]] = []
    for number in range(plan.prompts):
        session_id, history = sessions[number % len(sessions)]
        # Greedy: only such a stream may be resumed.
        limit = {"model": MODEL, "max_tokens": draw.randint(1, plan.max_output_tokens), "temperature": 0}
        tail = _words(draw, draw.randint(1, 60))
        if number % 3:
            messages = [{"role": "system", "content": history}, {"role": "user", "content": tail}]
            asked.append(("/v1/chat/completions", {**limit, "messages": messages}, session_id))
        else:
            asked.append(("/v1/completions", {**limit, "prompt": f"{history} {tail}"}, session_id))

    async def ask(path: str, body: dict[str, Any], session_id: str) -> KnownRequest:
        async with session.post(engine_url + path, json=body) as answer:
            content = await answer.read()
            if answer.status != 200:
                raise SoakError(f"{engine_url}{path} answered {answer.status}: {content[:200]!r}")
        return KnownRequest(path, body, text_of_choice(msgspec.json.decode(content)["choices"][0]), session_id)

    return list(await asyncio.gather(*(ask(*one) for one in asked)))


def _words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(("cache", "token", "prefix", "block", "decode", "prefill")) for _ in range(count))
