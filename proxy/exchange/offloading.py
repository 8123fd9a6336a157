"""Both legs of an offloaded request up to D's first byte, and the handling of their failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from policies.row import Row
from policies.session import Routed
from policies.types import OffloadReason, Role
from proxy.core import Core
from proxy.engines.upstream import Answer, NotConnectedError
from proxy.errors import AttemptFailedError
from proxy.exchange.poison import PoisonGuard
from proxy.fleet.instances import Instance
from proxy.handoff.legs import HandedOff, OffloadFailedError
from proxy.request.bodies import Priorities
from proxy.request.usage import Usage

Opened = tuple[Answer, bytes]
"""An answer and the first piece of its body."""
OpenDecode = Callable[[bytes, float], Awaitable[Opened]]
"""(body of the D leg, bound on its first byte in seconds) -> D's answer; raises AttemptFailedError."""


async def hand_over(
    core: Core,
    row: Row,
    routed: Routed,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    priorities: Priorities,
    open_decode: OpenDecode,
    bound_s: float,
    guard: PoisonGuard,
) -> tuple[Opened | None, Usage | None, bool]:
    """Prefill on P, then let D pull within ``bound_s`` seconds; returns D's opened answer, P's usage, and False.

    Both legs count as attempts for ``guard``.

    Returns (None, None, refused) if the hand-off failed: it is counted by its reason, and the caller sends D the plain
    request. ``refused``: the caller calls ``pair_failed`` if D does not refuse that one too.

    Raises:
        AttemptFailedError: the hand-off failed and D does not answer at all, so another instance must be tried.
    """
    decision, routing = routed.decision, core.router.routing
    assert decision.prefill_on is not None
    # Their names may be removed or reused while the legs run.
    prefill, decode = core.instances.chosen(decision.prefill_on), core.instances.chosen(decision.decode_on)
    try:
        started_s, sent_s = time.perf_counter(), time.monotonic()
        try:
            handed = await core.handoff.prefill(prefill, path, body, headers, priorities)
        except (OffloadFailedError, asyncio.CancelledError) as error:
            # The part of the prompt that P computed is unknown, so none is assumed.
            routed.commitment.retract(decision.prefill_on)
            if isinstance(error, OffloadFailedError) and error.lacks_model:
                core.model_lists.refresh(prefill)
            if isinstance(error, OffloadFailedError) and error.by_prefill:
                refused = isinstance(error.__cause__, NotConnectedError)
                # P legs may fail where plain requests do not, and pairs have their own breaker; producers serve only P
                # legs.
                if refused or prefill.settings.role is Role.KV_PRODUCER:
                    core.instances.failed(prefill, str(error), refused=refused, sent_s=sent_s)
            raise
        core.instances.succeeded(prefill, sent_s)
        took_s = time.perf_counter() - started_s
        row.stages_ms["prefill_leg"] = took_s * 1e3
        row.note_leg("prefill", *routing.prefilled_on_p(routed.commitment, took_s, time.monotonic()))
        if row.trace is not None:
            row.trace.leg_ended()
        started_s = time.perf_counter()
        opened = await _pull(core, routed, prefill, handed, open_decode, bound_s)
        took_s = time.perf_counter() - started_s
        row.stages_ms["decode_leg_first_byte"] = took_s * 1e3
        if row.stream:
            row.note_leg("transfer", *routing.handed_over(routed.commitment, took_s, time.monotonic()))
        else:
            routing.handed_over_unseen(routed.commitment, time.monotonic())
    except OffloadFailedError as error:
        if error.received:
            guard.suspect(prefill)
        routing.fell_back(routed.commitment, time.monotonic(), refused=error.refused)
        row.note_failed(decision.prefill_on, str(error), offload=error.reason.value)
        row.offload_reason, row.prefill_instance = error.reason.value, None
        row.predicted_cached_tokens = decision.cached_tokens
        late = error.reason is OffloadReason.FELL_BACK_D_TIMEOUT
        if late and not await core.handoff.alive(decode):
            core.instances.failed(decode, "late, and /health does not answer", refused=True)
            raise AttemptFailedError(decision.decode_on, str(error), timed_out=True) from error
        return None, None, error.refused
    return opened, handed.usage, False


async def _pull(
    core: Core, routed: Routed, prefill: Instance, handed: HandedOff, open_decode: OpenDecode, bound_s: float
) -> Opened:
    """Run D's leg within its own bound; abandon it at once if P can no longer send.

    An abandoned leg is closed later, by `proxy.handoff.abandoned`.

    Raises:
        OffloadFailedError: late, refused or broken, or P is gone.
    """
    pulling = asyncio.ensure_future(open_decode(handed.body, bound_s + core.settings.offload.abandoned_s))
    watching = asyncio.create_task(core.handoff.watch(prefill, handed.engine_id))
    taken = False
    try:
        done, _ = await asyncio.wait({pulling, watching}, timeout=bound_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise OffloadFailedError(OffloadReason.FELL_BACK_D_TIMEOUT, f"no first byte within {bound_s:g} s")
        if not pulling.done():
            raise OffloadFailedError(OffloadReason.FELL_BACK_P_GONE, watching.result(), received=True)
        taken = True
        opened = pulling.result()
    except AttemptFailedError as error:
        reason = OffloadReason.FELL_BACK_D_TIMEOUT if error.timed_out else OffloadReason.FELL_BACK_D_ERROR
        raise OffloadFailedError(reason, str(error)) from error
    finally:
        watching.cancel()
        if not taken:
            core.abandoned.adopt(routed.decision.decode_on, pulling, routed.commitment.hold_on_decode())
        await asyncio.gather(watching, return_exceptions=True)
    if opened[0].status != 200:
        opened[0].close()
        raise OffloadFailedError(OffloadReason.FELL_BACK_D_ERROR, f"D answered {opened[0].status}", refused=True)
    return opened
