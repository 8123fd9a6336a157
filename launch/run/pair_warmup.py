"""One tiny hand-off for each ordered pair of engines, before a fleet is reported ready.

D looks up a new P and connects to it in the first transfer of the pair, which takes longer for that. A request of
nobody pays for it instead.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from launch.fleet.sections import PairWarmupSettings
from policies.types import Connector, Role
from proxy.handoff.connectors import DIALECTS, engine_ids_of

_SENDS = frozenset({Role.KV_BOTH, Role.KV_PRODUCER})
_RECEIVES = frozenset({Role.KV_BOTH, Role.KV_CONSUMER})
_DIALECT = DIALECTS[Connector.MOONCAKE]
_ORDINARY = range(10, 250)
"""Token ids that every vocabulary has."""


class PairEnd(NamedTuple):
    """One engine of a pair."""

    name: str
    url: str
    role: Role
    bootstrap_url: str | None


class PairError(Exception):
    """A hand-off that failed; the message says how."""


def ordered_pairs(ends: Sequence[PairEnd]) -> list[tuple[PairEnd, PairEnd]]:
    """Every (P, D); neighbours in the list are of different engines, so that few wait for each other."""
    count = len(ends)
    around = ((ends[first], ends[(first + step) % count]) for step in range(1, count) for first in range(count))
    return [(p, d) for p, d in around if p.role in _SENDS and p.bootstrap_url is not None and d.role in _RECEIVES]


async def warm_pairs(
    pairs: Sequence[tuple[PairEnd, PairEnd]], model: str, settings: PairWarmupSettings, client: httpx.AsyncClient
) -> list[str]:
    """Hand over one prompt for each pair; sentences on the pairs for which that failed.

    Args:
        pairs: (P, D), each once.
        model: name to request.
        settings: its bounds: time of all pairs together, hand-offs at a time.
        client: not closed; its timeouts are not used.
    """
    room = asyncio.Semaphore(settings.concurrency)
    problems: dict[tuple[str, str], str] = {(p.name, d.name): f"not within {settings.timeout_s:g} s" for p, d in pairs}

    async def warm(p: PairEnd, d: PairEnd) -> None:
        async with room:
            try:
                await _hand_over(p, d, model, settings.tokens, client)
                del problems[p.name, d.name]
            except PairError as error:
                problems[p.name, d.name] = str(error)

    try:
        async with asyncio.timeout(settings.timeout_s), asyncio.TaskGroup() as tasks:
            for p, d in pairs:
                tasks.create_task(warm(p, d), name=f"warm-{p.name}-{d.name}")
    except TimeoutError:
        pass  # the pairs that are left have their sentence
    return [f"{p} to {d}: {problem}" for (p, d), problem in problems.items()]


async def _hand_over(p: PairEnd, d: PairEnd, model: str, tokens: int, client: httpx.AsyncClient) -> None:
    """One hand-off from P to D.

    Raises:
        PairError: a leg failed, or D computed the prompt.
    """
    try:
        engine_ids = engine_ids_of((await client.get(f"{p.bootstrap_url}/query", timeout=None)).content)
        if not engine_ids:
            raise PairError(f"{p.name} names no engine")
        transfer_id = f"warm-{uuid.uuid4().hex}"
        # Nobody has it cached: D would pull nothing.
        prompt = [_ORDINARY[byte % len(_ORDINARY)] for byte in os.urandom(tokens)]
        await _leg(p, model, prompt, _DIALECT.prefill_params(transfer_id), client)
        answer = await _leg(
            d,
            model,
            prompt,
            _DIALECT.decode_params(transfer_id, None, engine_ids[min(engine_ids)], p.bootstrap_url),
            client,
        )
    except (httpx.HTTPError, ValueError) as error:
        raise PairError(str(error) or type(error).__name__) from error
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    if details.get("cached_tokens") == 0:
        raise PairError(f"{d.name} computed the prompt instead of pulling it")


async def _leg(
    end: PairEnd, model: str, prompt: list[int], transfer: Mapping[str, Any], client: httpx.AsyncClient
) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 1,
        "min_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": transfer,
    }
    # Bounded by the time of all pairs.
    answer = await client.post(f"{end.url}/v1/completions", json=body, timeout=None)
    if answer.status_code != 200:
        raise PairError(f"{end.name} answered {answer.status_code}: {answer.text[:200]}")
    return dict(answer.json())
