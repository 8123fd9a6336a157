"""Designates prefill specialists after every decision, by the state of the fleet that it was made on."""

from __future__ import annotations

from policies.admission.accounts import SessionAccounts
from policies.costs.book import CostBook
from policies.offload.specialists import FleetLoad, Specialists
from policies.snapshot import FleetSnapshot
from policies.types import Decision, RequestClass, RequestView


def designate(
    specialists: Specialists,
    accounts: SessionAccounts,
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
        cached_tokens: of the prompt, where it is prefilled.
        memory: most contexts remembered.
    """
    views, heavy = fleet.instances, decision.request_class is RequestClass.HEAVY
    if specialists.sent(request, decision.decode_on, now_s, memory, heavy=heavy):
        on, new_tokens = decision.prefill_on or decision.decode_on, request.prompt_tokens - cached_tokens
        seconds = costs.prefill.seconds(new_tokens, cached_tokens) * costs.slowness.measured.get(on, 1.0)
        specialists.prefilled(on, seconds, now_s)
    if heavy or specialists.names:
        remote, used = accounts.remote, specialists.contexts.working_set_tokens(accounts.active_tokens, now_s)
        used += remote.active_tokens + remote.kept_tokens
        pools = specialists.pools(views, now_s, heavy=heavy)
        lost_share = accounts.losses.share(len(pools), now_s) + remote.lost_share(len(pools))
        load = FleetLoad.of(pools, specialists.share(now_s), used, lost_share)
        specialists.update(views, load, now_s, heavy=heavy)
