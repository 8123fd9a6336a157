"""The body field ``priority``, by which an engine with vLLM's priority scheduling orders waiting prompts. Pure.

The value is the due time of a leg's prefill (`policies.costs.order`) in Unix milliseconds: all replicas of the proxy
send the same engines values that compare. Where a client may set ``priority`` itself (``fields.allow``), its value is a
tier: it goes before all requests with a higher one, and within a tier the due time decides.
"""

from __future__ import annotations

import msgspec

from policies.costs.order import FIRST_S
from policies.state import Commitment
from proxy.request.bodies import NO_PRIORITIES, Priorities
from proxy.request.parse import Parsed

TIER = 10**13
"""Distance between two tiers in milliseconds, 317 years: due times stay below it until the year 2286."""
MOST_TIERS = 900_000
"""Largest value of a client, up or down, that counts: engines take 64 bits."""

_decode = msgspec.json.Decoder(int, strict=False).decode


def priority_of(due_s: float, unix_offset_s: float, tier: int = 0) -> int:
    """The priority of a prefill, lower first.

    Args:
        due_s: its due time (monotonic).
        unix_offset_s: Unix time less monotonic time.
        tier: the client's own priority.
    """
    due_ms = round(min(max((unix_offset_s + due_s) * 1e3, 0.0), TIER - 1.0))
    return min(max(tier, -MOST_TIERS), MOST_TIERS) * TIER + due_ms


def priorities_of(parsed: Parsed, commitment: Commitment, unix_offset_s: float) -> Priorities:
    """Priorities of the legs of a request that has been routed; ``unix_offset_s`` as of ``priority_of``."""
    prefill, decode = commitment.prefill, commitment.decode
    prefill_due_s = None if prefill is None else prefill.due_s
    if decode.due_s is None and prefill_due_s is None:
        return NO_PRIORITIES
    return Priorities(
        leg_priority(parsed, prefill_due_s, unix_offset_s), leg_priority(parsed, decode.due_s, unix_offset_s)
    )


def leg_priority(parsed: Parsed, due_s: float | None, unix_offset_s: float) -> int | None:
    """The priority of one leg of a request; None: nothing orders it, or its client's value is left for the engine.

    An engine refuses a request whose own value is no integer.
    """
    if due_s is None or due_s == FIRST_S:  # a message has no such field
        return None
    own = parsed.fields.priority
    if not memoryview(own):
        return priority_of(due_s, unix_offset_s)
    try:
        return priority_of(due_s, unix_offset_s, _decode(own))
    except msgspec.DecodeError:
        return None
