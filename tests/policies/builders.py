"""Short constructors for the data types of a decision, and hypothesis strategies for them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from policies.predict.blocks import hash_token_blocks
from policies.snapshot import FleetSnapshot
from policies.types import (
    CandidateScore,
    Choice,
    Connector,
    Decision,
    HotspotView,
    InstanceView,
    OffloadPlan,
    OffloadReason,
    Reason,
    RequestClass,
    RequestView,
    Role,
    Transport,
)

BLOCK_TOKENS = 16


def ask(prompt_tokens: int = 1_000, **fields: Any) -> RequestView:
    """A request without blocks, for policies that only use token counts."""
    return RequestView("req", prompt_tokens, **fields)


def ask_ids(token_ids: list[int], **fields: Any) -> RequestView:
    """A request with exact blocks of ``BLOCK_TOKENS`` token ids."""
    hashes = hash_token_blocks(token_ids, BLOCK_TOKENS)
    return RequestView("req", len(token_ids), hashes, float(BLOCK_TOKENS), **fields)


def ask_new(number: int, prompt_tokens: int = 1_600, **fields: Any) -> RequestView:
    """A request that shares no block with one of another ``number``."""
    return ask_ids([number * 1_000_000 + i for i in range(prompt_tokens)], **fields)


def fleet_of(*views: InstanceView, **fields: Any) -> FleetSnapshot:
    return FleetSnapshot(tuple(views), **fields)


def idle(n: int) -> tuple[InstanceView, ...]:
    return tuple(InstanceView(f"inst-{i}", role=Role.KV_BOTH) for i in range(n))


def score_of(choice: Choice, instance: str) -> CandidateScore:
    return next(score for score in choice.scores if score.instance == instance)


def decision_for(
    request: RequestView, decode_on: str, prefill_on: str | None = None, cached_tokens: int = 0
) -> Decision:
    """A decision as a policy might have made it."""
    plan = OffloadPlan(prefill_on, OffloadReason.CHOSEN if prefill_on else OffloadReason.PLANNER_NEVER)
    return Decision(
        request.request_id,
        decode_on,
        prefill_on,
        RequestClass.HEAVY if prefill_on else RequestClass.WARM,
        Reason.LOWEST_SCORE,
        plan,
        (),
        "test",
        request.prompt_tokens,
        cached_tokens,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[RequestView, FleetSnapshot]:
    """A request and a random snapshot for it: loads, roles, pins, hotspots and broken pairs."""
    names = draw(st.lists(st.sampled_from([f"inst-{i}" for i in range(9)]), min_size=1, max_size=8, unique=True))
    prompt = draw(st.integers(1, 150_000))
    tokens = st.integers(0, 200_000)
    views = tuple(
        InstanceView(
            name,
            host=draw(st.sampled_from(["h1", "h2"])),
            transport=draw(st.sampled_from([None, *Transport])),
            connector=draw(st.sampled_from([*[Connector.MOONCAKE] * 3, Connector.NIXL])),
            cached_tokens=draw(st.integers(0, prompt - 1)),
            requests=(requests := draw(st.integers(0, 40))),
            prefilling=draw(st.integers(0, requests)),
            pending_prefill_tokens=draw(tokens),
            decoding_tokens=draw(tokens),
            recent_tokens=draw(st.floats(0, 1e6)),
            sessions=draw(st.integers(0, 50)),
            kv_capacity_tokens=draw(st.sampled_from([0, 100_000, 738_432])),
            kv_used_tokens=draw(tokens),
            kv_promised_tokens=draw(tokens),
            role=draw(st.sampled_from(Role)),
            holds_class=draw(st.booleans()),
        )
        for name in names
    )
    request = ask(prompt, session_id=draw(st.sampled_from([None, "s"])), max_tokens=draw(st.integers(1, 8_000)))
    fleet = FleetSnapshot(
        views,
        sequence=draw(st.integers(0, 10**9)),
        pinned=draw(st.sampled_from([None, "inst-0", *names])) if request.session_id else None,
        hotspot=HotspotView(draw(st.floats(0, 1)), draw(st.integers(0, 40)), draw(st.integers(0, 1001))),
        offloads_in_flight=draw(st.integers(0, 6)),
        broken_pairs=draw(st.frozensets(st.tuples(st.sampled_from(names), st.sampled_from(names)), max_size=6)),
    )
    return request, fleet
