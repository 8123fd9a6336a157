"""Both legs of an offloaded request, up to D's first byte, and what is done when one of them fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from policies.types import OffloadReason
from proxy.breakdown import Row
from proxy.errors import AttemptFailedError
from proxy.handoff import HandedOff, OffloadFailedError
from proxy.router import Routed
from proxy.upstream import Answer
from proxy.usage import Usage

if TYPE_CHECKING:
    from proxy.core import Core

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
    open_decode: OpenDecode,
) -> tuple[Opened | None, Usage | None]:
    """Prefill on P, then let D pull: D's opened answer and P's usage.

    (None, None) when the hand-off failed: it is counted by its reason, D has no part of it in hand any more, and the
    caller sends D the plain request.
    """
    decision = routed.decision
    assert decision.prefill_on is not None
    try:
        started_s = time.perf_counter()
        try:
            handed = await core.handoff.prefill(core.instances[decision.prefill_on], path, body, headers)
        except (OffloadFailedError, asyncio.CancelledError):
            # What P computed of it is unknown: better to expect nothing of it.
            routed.commitment.retract(decision.prefill_on)
            raise
        took_s = time.perf_counter() - started_s
        row.stages_ms["prefill_leg"] = took_s * 1e3
        row.note_leg("prefill", *core.router.prefilled_on_p(routed, took_s))
        started_s = time.perf_counter()
        opened = await _pull(core, routed, handed, open_decode)
        took_s = time.perf_counter() - started_s
        row.stages_ms["decode_leg_first_byte"] = took_s * 1e3
        if row.stream:
            row.note_leg("transfer", *core.router.handed_over(routed, took_s))
        else:
            _handed_over_unseen(core, routed)
    except OffloadFailedError as error:
        core.router.fell_back(routed)
        row.attempts.append({"instance": decision.prefill_on, "error": str(error), "offload": error.reason.value})
        row.offload_reason, row.prefill_instance = error.reason.value, None
        row.predicted_cached_tokens = decision.cached_tokens
        return None, None
    return opened, handed.usage


def _handed_over_unseen(core: Core, routed: Routed) -> None:
    """The answer came in one piece: when its first token was there, and so the KV, is not known."""
    routed.commitment.handed_over()
    job = routed.commitment.workload.transfer
    assert job is not None
    core.router.state.pairs.record(job.pair, True, time.monotonic())
    core.router.state.costs.handed_over(job)


async def _pull(core: Core, routed: Routed, handed: HandedOff, open_decode: OpenDecode) -> Opened:
    """D's leg under its own bound, given up at once if P is no longer there to send.

    Raises:
        OffloadFailedError: late, refused or broken, or P is gone.
    """
    decision = routed.decision
    assert decision.prefill_on is not None
    prefill = core.instances[decision.prefill_on]
    pulling = asyncio.ensure_future(open_decode(handed.body, core.settings.offload.first_token_timeout_s))
    watching = asyncio.create_task(core.handoff.watch(prefill, handed.engine_id))
    opened: Opened | None = None
    try:
        await asyncio.wait({pulling, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not pulling.done():
            raise OffloadFailedError(OffloadReason.FELL_BACK_P_GONE, watching.result())
        opened = pulling.result()
        if opened[0].status != 200:
            raise OffloadFailedError(OffloadReason.FELL_BACK_D_ERROR, f"D answered {opened[0].status}")
    except AttemptFailedError as error:
        reason = OffloadReason.FELL_BACK_D_TIMEOUT if error.timed_out else OffloadReason.FELL_BACK_D_ERROR
        raise OffloadFailedError(reason, str(error)) from error
    except OffloadFailedError:
        if opened is not None:
            opened[0].close()
        raise
    finally:
        if opened is None:
            core.leaks.abandoned(decision.decode_on)
        for task in (pulling, watching):
            task.cancel()
        await _ended(pulling, watching, close=opened is None)
    return opened


async def _ended(pulling: asyncio.Future[Opened], watching: asyncio.Task[str], *, close: bool) -> None:
    """Wait for both; an answer that came in the moment it was given up is closed, not left open."""
    with suppress(asyncio.CancelledError):
        await watching
    with suppress(asyncio.CancelledError, AttemptFailedError):
        late = await pulling
        if close:
            late[0].close()
