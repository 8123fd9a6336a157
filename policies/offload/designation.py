"""Designates prefill specialists after every decision, by the state of the fleet that it was made on."""

from __future__ import annotations

from collections.abc import Callable

from policies.costs.book import CostBook
from policies.offload.specialists import FleetLoad, Specialists
from policies.snapshot import FleetSnapshot
from policies.types import Decision, RequestClass, RequestView


def designate(
    specialists: Specialists,
    in_use: Callable[[float], tuple[int, int, float]],
    costs: CostBook,
    request: RequestView,
    fleet: FleetSnapshot,
    decision: Decision,
    cached_tokens: int,
    now_s: float,
    memory: int,
) -> None:
    """Count a context and a HEAVY prefill, and change the specialists by the fleet as it was decided on.

    Args:
        in_use: by the time, the tokens of contexts in flight here and of those in use by other replicas, and the time
            that evictions cost, as a share of one instance's.
        cached_tokens: of the prompt, where it is prefilled.
        memory: most contexts remembered.
    """
    views, heavy = fleet.instances, decision.request_class is RequestClass.HEAVY
    if specialists.sent(request, decision.decode_on, now_s, memory, heavy=heavy):
        on, new_tokens = decision.prefill_on or decision.decode_on, request.prompt_tokens - cached_tokens
        seconds = costs.prefill.seconds(new_tokens, cached_tokens) * costs.slowness.measured.get(on, 1.0)
        specialists.prefilled(on, seconds, now_s)
    if heavy or specialists.names:
        active_tokens, elsewhere_tokens, lost = in_use(now_s)
        used = specialists.contexts.working_set_tokens(active_tokens, now_s) + elsewhere_tokens
        pools = specialists.pools(views, now_s, heavy=heavy)
        lost_share = lost / len(pools) if pools else 0.0
        load = FleetLoad.of(pools, specialists.share(now_s), used, lost_share)
        specialists.update(views, load, now_s, heavy=heavy)
