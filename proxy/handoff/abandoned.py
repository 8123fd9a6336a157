"""Abandoned pulls: D legs that are kept open until it is safe to close them.

Closing a D leg that D still has queued crashes the engine core of vLLM 0.18.1 with all its requests: its scheduler
receives a KV transfer for a request it has already removed. After the first byte, or once the pull has begun, closing
is an ordinary abort. The proxy cannot distinguish the two cases, so it waits for the first byte, within a bound.
"""

from __future__ import annotations

import asyncio
import logging

from policies.holds import KvHold
from proxy.engines.upstream import Answer
from proxy.errors import AttemptFailedError
from proxy.handoff.leaks import LeakWatch

log = logging.getLogger("warmroute.abandoned")

Pulling = asyncio.Future[tuple[Answer, bytes]]


class AbandonedPulls:
    """Owner of abandoned D legs; each ends with its first byte, its failure or the bound."""

    def __init__(self, leaks: LeakWatch, bound_s: float) -> None:
        self._leaks = leaks
        self._bound_s = bound_s
        self._waiting: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def apply(self, bound_s: float) -> None:
        """Set the bound in seconds for pulls that are abandoned from now on."""
        self._bound_s = bound_s

    def adopt(self, decode: str, pulling: Pulling, hold: KvHold) -> None:
        """Take ownership of an abandoned D leg; ``hold`` is the room it takes on D until it ends."""
        task = asyncio.create_task(self._wait_and_close(decode, pulling, hold), name=f"abandoned-pull-{decode}")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def close(self, grace_s: float) -> None:
        """Wait for the remaining legs, at most ``grace_s`` seconds, then cancel them."""
        if not self._waiting:
            return
        _, late = await asyncio.wait(self._waiting, timeout=grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _wait_and_close(self, decode: str, pulling: Pulling, hold: KvHold) -> None:
        try:
            async with asyncio.timeout(self._bound_s):
                answer, _ = await pulling
            answer.close()
        except AttemptFailedError as error:
            log.debug("an abandoned pull on %s failed: %s", decode, error)
            if error.timed_out:
                # The leg's own bound ends at the same time or slightly earlier.
                self._leaks.abandoned(decode)
        except TimeoutError:
            # The KV never arrived: such a request keeps its blocks on D.
            self._leaks.abandoned(decode)
        finally:
            hold.release()
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
